"""Real sleep mode. Each case is an engine in a process of its own."""

import pytest
import torch

from tests.support.scenario import Scenario, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_three_cycles(runner: str, eager: bool) -> None:
    scenario = Scenario(cycles=3, on_gpu=True, engine={"enforce_eager": eager})
    report = run(scenario, VLLM_USE_V2_MODEL_RUNNER="1" if runner == "V2" else "0")
    assert report.distinct_answers == 3
    assert report.pool_tensors > 60
    assert len(report.cycles) == 3
    assert report.right, report


def test_without_the_package_it_breaks() -> None:
    assert not run(Scenario(cycles=1, on_gpu=True), plugins="none").right


@pytest.mark.parametrize("part", ["view", "reset"])
def test_each_part_is_needed(part: str) -> None:
    # By vLLM's loader: the plan of the first load does not look at names.
    scenario = Scenario(family="minicpm", cycles=1, on_gpu=True, control=part)
    report = run(scenario, LORA_RELOAD_REPLAY="off")
    assert report.right, report
    assert report.control and not report.control.right


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_with_lora_on_lm_head() -> None:
    scenario = Scenario(cycles=3, on_gpu=True, engine={"tensor_parallel_size": 2}, control="mapping")
    report = run(scenario)
    assert report.logits_mappings == [512]
    assert report.right, report
    assert report.control and report.control.bytes_differ
    assert not any(report.control.same.values()), "the logits mapping was not needed"
