"""vLLM's own adapter manager around a few small wrappers, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager

from .wrapped import Wrapper


def adapter(number: int) -> LoRAModel:
    """An adapter for ``up`` alone, its `lora_a` full of `number`."""
    weights = LoRALayerWeights("up", 1, 1, torch.full((4,), float(number)), torch.zeros(4))
    return LoRAModel(number, 1, {"up": weights})


def make_manager() -> Any:
    """A manager with 3 slots: adapter 2 in slot 0, 3 (pinned) in slot 1, 1 in slot 2; adapter 4 in none."""
    made = object.__new__(LRUCacheLoRAModelManager)
    made.lora_config = SimpleNamespace(max_loras=3, max_cpu_loras=5)
    made.is_pooling_model = False
    made.modules = {name: Wrapper(nn.Identity(), slots=3, width=4) for name in ("up", "down")}
    made.model = nn.ModuleDict(made.modules)
    made.punica_wrapper_mapping = {}
    made.lora_index_to_id = [None] * 3
    made._last_mapping = None
    made._registered_adapters = AdapterLRUCache(5, made.deactivate_adapter)
    made._active_adapters = AdapterLRUCache(3, made._deactivate_adapter)
    for number in (1, 2, 3, 4):
        made._registered_adapters[number] = adapter(number)
    for number in (2, 3, 1):
        made.activate_adapter(number)
    made.pin_adapter(3)
    made._registered_adapters.touch(2)
    made._active_adapters.touch(2)
    return made
