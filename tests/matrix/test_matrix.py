"""Each release that ``make matrix`` has set up, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import releases

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    releases.make_models(folder)
    return folder


@pytest.mark.parametrize("release", releases.made())
def test_every_path_restores_every_byte(release: str, models: Path) -> None:
    assert releases.faults(releases.run(release, models)) == []
