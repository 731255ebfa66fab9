"""Adapters of every kind over real sleep."""

import pytest
import torch

from tests.support.adapter_cycles import MODULE
from tests.support.scenario import Scenario, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_pinned_gone_changed_and_tensor_only_adapters(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    scenario = Scenario(cycles=3, on_gpu=True, max_tokens=8, engine={"tensor_parallel_size": ranks})
    report = run(scenario, module=MODULE, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert report.distinct_answers == 3 and len(report.cycles) == 3
    assert report.right, report
