"""Writing an adapter into a LoRA slot: checked before anything is written, and fast the second time.

vLLM's ``activate_adapter`` zeroes and fills a slot with small operations and much Python for each of hundreds of
tensors. `SlotWrite` lets that code run once with its writes held back. What comes of it shows whether the adapter fits,
and is the list of plain copies that a later wake-up needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import seams
from .tensors import storage_key, written_by


@dataclass(frozen=True)
class Stack:
    """What is known of a stacked tensor.

    Attributes:
        module: name of the wrapper that owns it.
        whole: dimension of a slot that an adapter has to fill, as vLLM copies what is too small into a part of it
            without a word; None where padding makes that right (vocabularies) or the layout is unknown (experts).
        slot: shape of one slot, ``[..., rank, inputs]`` or ``[..., outputs, rank]``.
    """

    module: str
    whole: int | None
    slot: torch.Size


class _HeldBack(TorchDispatchMode):
    """Keeps operations from writing to LoRA state, and notes copies into stacks."""

    def __init__(self, stacks: Mapping[int, Stack], others: set[int], strict: bool) -> None:
        super().__init__()
        self._strict = strict
        self._stacks, self._held = stacks, stacks.keys() | others
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.only_copies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = {storage_key(tensor) for tensor in written_by(func, args, kwargs)}
        if not written & self._held:
            return func(*args, **kwargs)
        if written & self._stacks.keys():
            if func is torch.ops.aten.copy_.default:
                self._note(args[0], args[1])
            elif func not in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor):
                self.only_copies = False
        return args[0]

    def _note(self, into: torch.Tensor, weights: torch.Tensor) -> None:
        stack = self._stacks[storage_key(into)]
        if weights.ndim == 0:  # `stack[index] = 0`
            return
        whole = stack.whole is None or weights.shape[stack.whole] == stack.slot[stack.whole]
        if self._strict and (into.shape != weights.shape or not whole):
            raise ValueError(
                f"{stack.module}: weights of shape {list(weights.shape)} do not fit into a slot of {list(stack.slot)}"
            )
        self.copies.append((into, weights))


class SlotWrite:
    """One adapter and one slot, checked.

    Args:
        manager: the ``LoRAModelManager``.
        index: the slot.
        adapter: the ``LoRAModel`` in host memory, its packed modules merged.
        stacks: stacks of all wrappers, by `storage_key`.
        others: storages of the other tensors of LoRA state.
        strict: whether to refuse what vLLM copies into a part of the slot, or spreads over it.

    Raises:
        Exception: the adapter does not fit.

    Attributes:
        adapter: as given.
    """

    def __init__(
        self, manager: Any, index: int, adapter: Any, stacks: Mapping[int, Stack], others: set[int], strict: bool
    ) -> None:
        self.adapter = adapter
        self._manager, self._index = manager, index
        held = _HeldBack(stacks, others, strict)
        # Wrappers keep facts about slots in lists too (label counts of classification heads), which no mode holds back.
        lists = [
            each for wrapper in seams.wrappers(manager) for each in vars(wrapper).values() if isinstance(each, list)
        ]
        before = [list(each) for each in lists]
        try:
            with torch.no_grad(), held:
                seams.write_slot(manager, index, adapter)
        finally:
            for live, old in zip(lists, before, strict=True):
                live[:] = old
        # A layer that does more than copy has to do it itself.
        self._copies = [(into, weights.contiguous()) for into, weights in held.copies] if held.only_copies else None

    def into_zeroed_slot(self) -> None:
        """Write the weights, given that the slot is zero and the metadata of the wrappers is right."""
        if self._copies is None:
            seams.write_slot(self._manager, self._index, self.adapter)
            return
        for into, weights in self._copies:
            into.copy_(weights, non_blocking=True)
