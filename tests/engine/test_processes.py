"""The engine core in a process of its own, and two tensor-parallel ranks in two more."""

import pytest

from tests.support import failed_loads
from tests.support.scenario import Report, Scenario, run

pytestmark = pytest.mark.engine


def check(report: Report, part: str) -> None:
    """Right with the package whole, wrong in the cycle after `part` was taken out."""
    assert report.distinct_answers == 3
    assert len(report.cycles) == 2
    assert report.right, report
    assert report.control is not None and not report.control.right, f"right without {part}"


def test_core_in_its_own_process() -> None:
    check(run(Scenario(control="reset"), VLLM_ENABLE_V1_MULTIPROCESSING="1"), "reset")


def test_flat_loop_model() -> None:
    """MiniCPM's ``load_weights`` loops over ``named_parameters`` in every release: only the base view helps it."""
    scenario = Scenario(family="minicpm", control="view")
    # By vLLM's loader: the plan of the first load does not look at names.
    check(run(scenario, VLLM_ENABLE_V1_MULTIPROCESSING="1", LORA_RELOAD_REPLAY="off"), "view")


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_two_ranks(fully_sharded: bool) -> None:
    report = run(
        Scenario(engine={"tensor_parallel_size": 2, "fully_sharded_loras": fully_sharded}, control="mapping"),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    assert report.logits_mappings == [512]
    assert all(cycle.restored == ["checkpoint"] * 2 for cycle in report.cycles)  # each has rows and columns of its own
    check(report, "mapping")
    assert report.control is not None and report.control.bytes_differ
    assert all("sharded_to_full_mapping_gpu" in name for name in report.control.bytes_differ)


def test_loads_that_fail_on_two_ranks() -> None:
    """vLLM leaves the second rank's failure on its queue, where it would answer the next call."""
    report = run(
        Scenario(max_tokens=8, engine={"tensor_parallel_size": 2}),
        module=failed_loads.MODULE,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    assert report.distinct_answers == 2 and len(report.cycles) == 2
    assert report.right, report


def test_without_the_package_it_breaks() -> None:
    assert not run(Scenario(cycles=1), plugins="none", VLLM_ENABLE_V1_MULTIPROCESSING="1").right
