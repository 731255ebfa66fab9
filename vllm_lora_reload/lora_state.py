"""LoRA state: every device tensor that wrappers, adapter manager and punica own and no weight loader fills.

Two kinds. *Stacks* hold adapters, one LoRA slot after another; they are rebuilt from the adapters in host memory.
Everything else (punica metadata, small tensors beside the stacks) is *metadata*: a few hundred kilobytes, kept on the
host at sleep and copied back. The logits mapping is rebuilt by its layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import seams
from .errors import SeamMissingError
from .slots import Stack
from .tensors import storage_key, tensors_of, whole_storage


class LoRAState:
    """The LoRA state of one model on one worker.

    Args:
        model: the wrapped model.
        manager: its ``LoRAModelManager``.
        device: where the model runs; host tensors of a GPU worker (flags for kernels) are never lost.

    Attributes:
        lost: level 2 took it and nothing has reset it since.
    """

    def __init__(self, model: nn.Module, manager: Any, device: torch.device) -> None:
        self.manager = manager
        wrapper_class = seams.base_layer_with_lora()
        names = {module: name for name, module in model.named_modules() if isinstance(module, wrapper_class)}
        wrappers = list(names)
        self.logits_processors = [wrapper for wrapper in wrappers if hasattr(wrapper, "reset_sharded_to_full_mapping")]
        punica = seams.punica_wrappers(manager)
        base = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        mappings = {
            storage_key(tensor)
            for wrapper in self.logits_processors
            if (tensor := wrapper.sharded_to_full_mapping_gpu) is not None
        }
        stacks: dict[int, torch.Tensor] = {}
        self.stack_of: dict[int, Stack] = {}
        metadata: dict[int, torch.Tensor] = {}
        slots = len(seams.slots(manager))
        self._with_metadata: list[Any] = []  # wrappers that mark in a small tensor which slots are in use
        for owner in (*wrappers, *punica):
            owned: dict[int, list[tuple[str, torch.Tensor]]] = {}
            for name, tensor in tensors_of(owner):
                if (key := storage_key(tensor)) not in base | mappings and tensor.device.type == device.type:
                    owned.setdefault(key, []).append((name, tensor))
            beside = {key: of[0][1] for key, of in owned.items() if not any("stacked" in name for name, _ in of)}
            for key, of in owned.items():
                if key not in beside:
                    where = names.get(owner, type(owner).__name__)
                    name, stacks[key] = _whole_stack(of, slots, where)
                    self.stack_of[key] = Stack(where, _filled(owner, name), stacks[key].shape[1:])
            metadata |= beside
            if beside and owner not in punica:
                self._with_metadata.append(owner)
        self.storages = stacks.keys() | metadata.keys() | mappings
        self._slots = list(stacks.values())
        self.stacks = [whole_storage(tensor) for tensor in stacks.values()]
        self.metadata = [whole_storage(tensor) for tensor in metadata.values()]
        # vLLM leaves punica's index tensors unset until the first batch with LoRA fills a part of them, and a padded
        # batch reads past that part: whatever stands there must be valid indices.
        for owner in punica:
            for _, tensor in tensors_of(owner):
                if tensor.device.type == device.type:
                    tensor.zero_()
        self.keep_initial()
        self._saved: list[torch.Tensor | None] | None = None
        self.lost = False

    def keep_initial(self) -> None:
        """What the metadata is now is what it is to be after a `reset` without a `save` before."""
        self._initial = [tensor.cpu().clone() if tensor.any() else None for tensor in self.metadata]

    def save(self) -> None:
        """Keep the metadata in host memory as it is now, for the next `reset`."""
        self._saved = [tensor.to("cpu", copy=True) for tensor in self.metadata]

    def reset(self, write: Callable[[int, int, bool], None]) -> None:
        """Make all LoRA state right, whatever its memory holds now.

        Adapters that the manager has in slots are written there again from host memory; free slots become zero. The
        manager's bookkeeping (slot table, pins, LRU order) stays as it is. Metadata becomes what it was at a `save`
        since the last reset, else what it was when the model was wrapped.

        Args:
            write: called with a slot, which is zero, the adapter id that belongs there, and whether the metadata knows
                of it.
        """
        saved, self._saved = self._saved, None
        for tensor, value in zip(self.metadata, saved or self._initial, strict=True):
            tensor.zero_() if value is None else tensor.copy_(value)
        _zero(self.stacks)
        for index, adapter_id in enumerate(seams.slots(self.manager)):
            if adapter_id is not None:
                write(index, adapter_id, saved is not None)
            elif saved is None:
                for wrapper in self._with_metadata:
                    wrapper.reset_lora(index)
        for logits_processor in self.logits_processors:
            logits_processor.reset_sharded_to_full_mapping()
        seams.forget_mapping(self.manager)
        self.lost = False

    def clear_slot(self, index: int) -> None:
        """Zero one slot of every stack."""
        _zero([stack[index] for stack in self._slots])


def _whole_stack(tensors: list[tuple[str, torch.Tensor]], slots: int, where: str) -> tuple[str, torch.Tensor]:
    """The one of several tensors of one storage that is all slots, with its name.

    The others are views: of one slot's one expert, or of all slots in one long row (embeddings).
    """
    whole = [(name, tensor) for name, tensor in tensors if tensor.ndim > 1 and len(tensor) == slots]
    if not whole:
        raise SeamMissingError(f"{where}: no tensor of {', '.join(name for name, _ in tensors)} has {slots} LoRA slots")
    return max(whole, key=lambda each: each[1].numel())


def _zero(tensors: list[torch.Tensor]) -> None:
    if tensors:  # a pipeline stage may have nothing to adapt
        torch._foreach_zero_(tensors)


def _filled(owner: Any, name: str) -> int | None:
    """See `Stack.whole`."""
    if not isinstance(owner, seams.linear_with_lora()):
        return None
    return {"lora_a_stacked": -1, "lora_b_stacked": -2}.get(name)
