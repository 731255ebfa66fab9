"""Adapters of every kind over real sleep, and in pinned memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.adapter_cycles import MODULE
from tests.support.manager import adapter, make_manager
from tests.support.scenario import Scenario, run
from vllm_lora_reload import seams
from vllm_lora_reload.adapters import Adapters
from vllm_lora_reload.lora_state import LoRAState

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


class Worker:
    """A ``WorkerLoRAManager`` as far as it is needed to read."""

    lora_config = SimpleNamespace(max_lora_rank=16)

    def _load_adapter(self, request: Any) -> Any:
        """As frameworks' own does: the tensors of a request, which vLLM would neither copy nor pin again."""
        made = adapter(request.lora_int_id)
        made.loras["up"].lora_a, made.loras["up"].lora_b = (tensor.pin_memory() for tensor in request.tensors)
        made.loras["up"].scaling = 2.0
        return made


def test_tensors_in_a_trainers_pinned_buffers() -> None:
    """They are not written to, and what the trainer writes there later does not reach the adapter."""
    manager = make_manager()
    manager.packed_modules = {}
    lora = LoRAState(nn.ModuleDict(manager.modules), manager, torch.device("cpu"))
    worker: Any = Worker()
    Adapters(worker, manager, lora)
    theirs = [torch.full((4,), 3.0, pin_memory=True), torch.full((4,), 5.0, pin_memory=True)]
    kind = type("WithTensors", (type(seams.lora_request("a", 9, "x")),), {"tensors": theirs})
    mine = worker._load_adapter(kind(lora_name="a", lora_int_id=9, lora_path="x"))
    seams.merge_packed_modules(manager, mine)
    assert all(tensor.eq(value).all() for tensor, value in zip(theirs, (3, 5), strict=True))
    for tensor in theirs:
        tensor.fill_(-1)
    weights = mine.loras["up"]
    assert weights.lora_a.eq(3).all() and weights.lora_b.eq(10).all() and weights.scaling == 1
    assert weights.lora_a.is_pinned() and weights.lora_b.is_pinned()
