"""The model's module tree as it would be without LoRA, for the length of one ``with`` block.

A LoRA wrapper keeps its layer one level down (``proj.weight`` becomes ``proj.base_layer.weight``), so neither a
flat loop over ``named_parameters`` nor ``get_parameter`` finds a checkpoint's names. Inside the view each wrapper's
base layer stands in the wrapper's place, under every parent that holds it. Nothing is copied and no method is
overridden: only entries of the parents' ``_modules`` change, and the prefix under which experts of a wrapped MoE layer
expect their names; both are put back on the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from . import seams

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@contextmanager
def base_view(model: nn.Module) -> Iterator[nn.Module]:
    """Put base layers in the place of their LoRA wrappers; put the wrappers back on exit, also after an error.

    Views nest: an inner one finds no wrapper and changes nothing.

    Args:
        model: the model that the engine runs, wrapped or not.

    Yields:
        The same model.
    """
    wrapper_class = seams.base_layer_with_lora()
    swapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, wrapper_class)
    ]
    prefixed = seams.expert_name_prefixes(model)
    try:
        for parent, name, wrapper in swapped:
            parent._modules[name] = wrapper.base_layer
        for experts in prefixed:
            seams.set_expert_name_prefix(experts, "")
        yield model
    finally:
        for parent, name, wrapper in swapped:
            parent._modules[name] = wrapper
        for experts, prefix in prefixed.items():
            seams.set_expert_name_prefix(experts, prefix)


def checkpoint_names(weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Drop ``base_layer`` from the names, as callers that walked the wrapped model (or a PEFT model) give them."""
    for name, weight in weights:
        yield checkpoint_name(name), weight


def checkpoint_name(name: str) -> str:
    return name.replace(".base_layer.", ".")
