"""A weight transfer whose trainer sits in the same process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch as replaced

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.v1.worker.gpu_worker import Worker

try:
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine
except ModuleNotFoundError:  # before 0.25 the sparse form is a part of the NCCL engine
    SparseNCCLWeightTransferEngine = None

BACKEND = "in process"
SPARSE = SparseNCCLWeightTransferEngine is not None or hasattr(base, "SparseWeightPatch")
Weights = list[tuple[str, torch.Tensor]]


@dataclass
class Chunk:
    """What the engine is handed instead of names and shapes."""

    weights: Weights
    is_checkpoint_format: bool = True
    update_kind: str = "dense"


class InProcessEngine(NCCLWeightTransferEngine):
    """The release's NCCL engine, except that tensors come with the call and not over NCCL."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> Chunk:
        return Chunk(**update_dict)

    def receive_weights(self, update_info: Chunk, load_weights: Callable[[Weights], Any] | None = None) -> None:
        (load_weights or self.model.load_weights)(update_info.weights)


WeightTransferEngineFactory.register_engine(BACKEND, InProcessEngine)


def send(worker: Any, weights: Weights, chunk: int = 5) -> None:
    """Through a session with several chunks, or where the release has no sessions, all at once."""
    if not hasattr(Worker, "start_weight_update"):
        worker.update_weights({"weights": weights})
        return
    worker.start_weight_update()
    for start in range(0, len(weights), chunk):
        worker.update_weights({"weights": weights[start : start + chunk]})
    worker.finish_weight_update()


@dataclass
class Patch:
    """New `values` for the elements of a tensor at the flat `indices` (int32)."""

    name: str
    shape: torch.Size
    indices: torch.Tensor
    values: torch.Tensor


class _Broadcasts:
    """Stands for the NCCL group: what is received is what `patch` holds."""

    device = torch.device("cpu")

    def __init__(self, patch: Patch) -> None:
        self._queue = [patch.indices, patch.values]

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        tensor.copy_(self._queue.pop(0))


def send_patch(worker: Any, patch: Patch) -> None:
    """A session with one patch, through the release's own sparse code but for NCCL and CUDA streams."""
    info: dict[str, Any] = {
        "names": [patch.name],
        "dtype_names": [str(patch.values.dtype).removeprefix("torch.")],
        "shapes": [list(patch.shape)],
        "num_updates_list": [patch.indices.numel()],
    }
    dense = worker.weight_transfer_engine
    if SparseNCCLWeightTransferEngine is None:
        engine: Any = NCCLWeightTransferEngine(dense.config, worker.parallel_config, worker.model_runner.get_model())
        start = {"is_checkpoint_format": False}
        info["update_kind"] = "sparse_flat"
    else:
        model = worker.model_runner.get_model()
        engine = SparseNCCLWeightTransferEngine(dense.config, worker.vllm_config, worker.device, model)
        start = {}
    engine.model_update_group = _Broadcasts(patch)
    worker.weight_transfer_engine = engine
    try:
        with (
            replaced("torch.cuda.current_stream"),
            replaced("torch.accelerator.current_device_index", lambda: "cpu"),
            replaced("torch.accelerator.device_index", lambda index: nullcontext()),
        ):
            worker.start_weight_update(**start)
            worker.update_weights(info)
            worker.finish_weight_update()
    finally:
        worker.weight_transfer_engine = dense
