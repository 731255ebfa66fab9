"""Reloading by the plan of the first load, in engines of their own: other families. Two ranks: test_processes."""

import pytest

from tests.support.scenario import Report, Scenario, run

pytestmark = pytest.mark.engine


def check(report: Report) -> None:
    assert report.right, report
    assert [cycle.restored for cycle in report.cycles] == [["checkpoint"]] * 2


@pytest.mark.parametrize(
    "family",
    ["minicpm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_tied", "gemma3", "phi3", "opt"))],
)
def test_family(family: str) -> None:
    """A flat loop, tied embeddings, shards that the checkpoint has fused, biases."""
    check(run(Scenario(family=family)))


@pytest.mark.slow
def test_setting_off() -> None:
    report = run(Scenario(cycles=1), LORA_RELOAD_REPLAY="off")
    assert report.right, report
    assert [cycle.restored for cycle in report.cycles] == [[None]]
