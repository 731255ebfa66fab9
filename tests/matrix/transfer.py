"""A weight transfer whose trainer sits in the same process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.v1.worker.gpu_worker import Worker

BACKEND = "in process"
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
