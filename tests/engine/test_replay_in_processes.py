"""Reloading by the plan of the first load, in engines of their own: other families, and two ranks."""

import pytest

from tests.support.scenario import Report, Scenario, run

pytestmark = pytest.mark.engine


def check(report: Report, ranks: int = 1) -> None:
    assert report.right, report
    assert [cycle.restored for cycle in report.cycles] == [["checkpoint"] * ranks] * 2


@pytest.mark.parametrize(
    "family",
    ["minicpm", "qwen3_tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "phi3", "opt"))],
)
def test_family(family: str) -> None:
    """A flat loop, tied embeddings, shards that the checkpoint has fused, biases."""
    check(run(Scenario(family=family)))


def test_two_ranks() -> None:
    """Each has rows or columns of its own."""
    report = run(
        Scenario(engine={"tensor_parallel_size": 2}),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    check(report, ranks=2)


@pytest.mark.slow
def test_setting_off() -> None:
    report = run(Scenario(cycles=1), VLLM_LORA_RELOAD_REPLAY="off")
    assert report.right, report
    assert [cycle.restored for cycle in report.cycles] == [[None]]
