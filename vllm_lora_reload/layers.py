"""Subclasses of vLLM's LoRA layers, and the place where vLLM is made to pick them.

Idea of the delegation and of rebuilding the logits mapping: vllm-project/vllm pull request 39935, which vLLM has
from 0.28 on. A subclass adds only what the release's own class lacks; where it lacks nothing, vLLM's class is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import seams

if TYPE_CHECKING:
    import torch


class DelegatesLoading:
    """Mixin for a ``BaseLayerWithLoRA``: checkpoint weights go to the wrapped layer's own loader."""

    base_layer: Any

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        """Load tensors named relative to the base layer.

        Fused layers (QKV, gate/up) bring a ``load_weights`` that reads the shard id; any other layer is walked by
        vLLM's ``AutoWeightsLoader``.

        Returns:
            The names loaded, relative to the base layer.
        """
        load = getattr(self.base_layer, "load_weights", None)
        if load is None:
            load = seams.auto_weights_loader()(self.base_layer).load_weights
        names: Iterable[str] = load(weights)
        return names


class RebuildsLogitsMapping:
    """Mixin for ``LogitsProcessorWithLoRA``: its index mapping (TP > 1) can be written anew."""

    sharded_to_full_mapping: list[int] | None
    sharded_to_full_mapping_gpu: torch.Tensor | None

    def reset_sharded_to_full_mapping(self) -> None:
        """Rewrite ``sharded_to_full_mapping_gpu`` (int64, ``[padded vocabulary]``) in place from its CPU list."""
        if self.sharded_to_full_mapping_gpu is not None:
            mapping = self.sharded_to_full_mapping_gpu
            mapping.copy_(mapping.new_tensor(self.sharded_to_full_mapping))


def reloadable(layer_class: type) -> type:
    """The class itself where it can already do all this, else a subclass of the same name that can.

    The name is kept since vLLM compares wrapper class names in places.
    """
    mixins: list[type] = []
    if issubclass(layer_class, seams.logits_processor_with_lora()):
        if not hasattr(layer_class, "reset_sharded_to_full_mapping"):
            mixins.append(RebuildsLogitsMapping)
    elif not hasattr(layer_class, "load_weights"):
        mixins.append(DelegatesLoading)
    if not mixins:
        return layer_class
    return type(layer_class.__name__, (*mixins, layer_class), {"__module__": __name__, "__doc__": layer_class.__doc__})


@contextmanager
def registered() -> Iterator[None]:
    """While a model is wrapped, let vLLM pick from `reloadable` classes; afterwards its own tables are as before."""
    with seams.wrapper_classes_replaced(reloadable):
        yield
