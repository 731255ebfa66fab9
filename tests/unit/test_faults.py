"""Faults that reviews found: failures between the chunks of a transfer, races, second views of a storage."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tests.support.wrapped import Block
from vllm_lora_reload import seams, session
from vllm_lora_reload.session import WorkerState
from vllm_lora_reload.settings import Settings
from vllm_lora_reload.tensors import UnregisteredTensors, whole_storage
from vllm_lora_reload.worker import extend

CPU = torch.device("cpu")


def test_abort_unwraps_the_loader_of_a_bias() -> None:
    layer = nn.Linear(2, 3)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    model = nn.Sequential(layer)
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    seams.abort_layerwise_reload(model)
    bias = model[0].bias
    getattr(bias, "weight_loader", default_weight_loader)(bias, torch.full((3,), 7.0))
    assert (bias == 7).all()


class Worker:
    def __init__(self) -> None:
        self.model_runner: Any = type("Runner", (), {"reset_lora_state": lambda self: None})()

    def start_weight_update(self) -> None: ...

    def start_draft_weight_update(self) -> None:
        raise RuntimeError("start_weight_update called while a weight update is already active")

    def update_weights(self, info: str) -> None:
        state: WorkerState = self.lora_reload  # type: ignore[attr-defined]
        if info == "good":
            for name, weight in state.incoming([("up.weight", torch.ones(3, 2))]):
                with torch.no_grad():
                    state.model.get_parameter(name).copy_(weight)
        elif info == "sparse":  # as sparse_nccl_engine: get_parameter(name).index_copy_(...), no load_weights
            with torch.no_grad():
                state.model.get_parameter("up.weight").view(-1)[0] = 1
            raise RuntimeError("connection lost")
        else:
            raise RuntimeError("connection lost")

    def finish_weight_update(self) -> None: ...


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    part = type("Part", (), {"storages": set(), "save": lambda s: None, "restore": lambda s: None, "lost": False})
    monkeypatch.setattr(session, "LoRAState", lambda *args: part())
    monkeypatch.setattr(session, "UnregisteredTensors", lambda *args, known, more: part())
    monkeypatch.setattr(seams, "engine_resets_lora", lambda: True)
    made: Any = Worker()
    extend(made)
    monkeypatch.setattr(session, "Adapters", lambda *args: SimpleNamespace(broken={}))
    made.lora_reload = WorkerState(Block(), SimpleNamespace(_adapter_manager=None), CPU, Settings())
    return made


def test_chunk_that_fails_early_after_a_good_chunk(worker: Any) -> None:
    worker.start_weight_update()
    worker.update_weights("good")
    with pytest.raises(RuntimeError):
        worker.update_weights("lost before its first tensor")
    assert worker.lora_reload_status()["state"] == "missing"


def test_session_in_progress_is_not_complete(worker: Any) -> None:
    worker.start_weight_update()
    worker.update_weights("good")
    assert worker.lora_reload_status()["state"] != "complete"


def test_sparse_transfer_that_fails_after_writing(worker: Any) -> None:
    worker.start_weight_update()
    with pytest.raises(RuntimeError):
        worker.update_weights("sparse")
    assert worker.lora_reload_status()["state"] == "missing"


def test_refused_draft_session_does_not_turn_the_running_one_into_a_draft(worker: Any) -> None:
    worker.lora_reload.lifecycle.slept(2)
    worker.lora_reload.lifecycle.woke()
    worker.start_weight_update()
    with pytest.raises(RuntimeError):
        worker.start_draft_weight_update()
    worker.update_weights("good")
    worker.finish_weight_update()
    assert worker.lora_reload_status()["state"] == "complete"


def test_second_view_of_a_storage_is_restored_after_the_first_is_gone() -> None:
    model = nn.Module()
    whole = torch.ones(4)
    model.first, model.second = whole[:2], whole[2:]
    del whole
    unregistered = UnregisteredTensors(model, CPU, known=set())
    del model.first
    unregistered.save()
    whole_storage(model.second).fill_(0xFF)
    unregistered.restore()
    assert (model.second == 1).all()


def test_abort_leaves_loaders_that_are_partial_functions() -> None:
    """MiniMax-M2 has one, on a tensor that never goes to the meta device."""
    layer = nn.Linear(2, 3).requires_grad_(False)
    model = nn.Sequential(layer)
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    loader = functools.partial(default_weight_loader)
    layer.bias.weight_loader = loader
    seams.abort_layerwise_reload(model)
    assert layer.bias.weight_loader is loader
    assert not any(parameter.is_meta for parameter in model.parameters())
