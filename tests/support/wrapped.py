"""The smallest LoRA wrapper that vLLM's own code accepts, for module trees without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

from vllm_lora_reload.coverage import FirstLoad


class Wrapper(BaseLayerWithLoRA):
    """Holds `base_layer`, and one stack with a row of `width` numbers for each of `slots` LoRA slots."""

    def __init__(self, base_layer: nn.Module, slots: int = 0, width: int = 1) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a_stacked = torch.zeros(slots, width)

    def reset_lora(self, index: int) -> None:
        self.a_stacked[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.a_stacked[index] = lora_a


class Block(nn.Module):
    """Two linear layers, each in a `Wrapper` if `wrapped`; `down` is reachable as ``alias.proj`` too."""

    def __init__(self, wrapped: bool = True) -> None:
        super().__init__()
        wrap = Wrapper if wrapped else lambda layer: layer
        self.up = wrap(nn.Linear(2, 3))
        self.norm = nn.LayerNorm(3)
        self.down = wrap(nn.Linear(3, 2, bias=False))
        self.alias = nn.Module()
        self.alias.proj = self.down


def nothing_to_load(model: nn.Module) -> FirstLoad:
    """A load at start-up that was watched and wrote nothing, so that a load that brings nothing is complete."""
    first = FirstLoad(model)
    first.modules, first.written = {model}, {0: 0}
    return first
