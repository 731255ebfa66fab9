"""The model runner's part: loads go through the base view, and LoRA state is made right after them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import layers, seams
from .base_view import base_view, checkpoint_names
from .lifecycle import Lifecycle
from .lora_state import LoRAState
from .tensors import UnregisteredTensors

if TYPE_CHECKING:
    import torch
    from torch import nn

LoRAModelRunnerMixin = seams.lora_model_runner_mixin()


class LoRAReloadModelRunner(LoRAModelRunnerMixin):  # type: ignore[misc]
    """Mixed in before the V1 or the V2 ``GPUModelRunner`` (or a platform's own) of one worker."""

    lora_reload: Lifecycle
    lora_state: LoRAState
    unregistered: UnregisteredTensors

    def load_lora_model(self, model: nn.Module, vllm_config: Any, device: torch.device) -> nn.Module:
        """Wrap the model with reloadable layers, take stock of the LoRA state, route ``model.load_weights``."""
        with layers.registered():
            model = super().load_lora_model(model, vllm_config, device)
        self.lora_state = LoRAState(model, seams.adapter_manager(self), device)
        self.unregistered = UnregisteredTensors(model, device, known=self.lora_state.storages)
        self._tensors_loaded = 0
        self._loads = 0
        model.load_weights = self._through_base_view(model, model.load_weights)
        return model

    def reload_weights(
        self, weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Reload base weights in place: from disk, or from (name, tensor) pairs, with ``base_layer`` in names or not.

        Arguments are those of vLLM's ``GPUModelRunner.reload_weights``.

        Raises:
            Exception: whatever the load raised. Wrappers and parameters are in place again then, and unless nothing
                was written yet the worker counts as having its base weights missing.
        """
        if weights_iterator is not None:
            weights_iterator = self._counted(checkpoint_names(weights_iterator))
        with self.loading():
            super().reload_weights(weights_iterator, *args, **kwargs)
        if not seams.engine_resets_lora():
            self.reset_lora_state()

    def reset_lora_state(self) -> None:
        """Make all LoRA state right, whatever its memory held. Adapters stay registered and active."""
        self.lora_state.reset()

    @contextmanager
    def loading(self, completes: bool = True) -> Iterator[None]:
        """Run a load of base weights in the base view. The outermost call decides about success or failure.

        Args:
            completes: whether the weights are all there when the block ends (not so for a chunk of a transfer).
        """
        model, before = self.get_model(), self._tensors_loaded
        self._loads += 1
        try:
            with base_view(model):
                yield
        except BaseException as error:
            if self._loads == 1:
                seams.abort_layerwise_reload(model)
                self.lora_reload.load_failed(error, wrote=self._tensors_loaded > before)
            raise
        else:
            if self._loads == 1 and completes:
                self.lora_reload.loaded()
        finally:
            self._loads -= 1

    def _through_base_view(self, model: nn.Module, load: Any) -> Any:
        @functools.wraps(load)
        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            with self.loading():
                loaded = load(self._counted(checkpoint_names(weights)), *args, **kwargs)
                return set(loaded) if inspect.isgenerator(loaded) else loaded

        return load_weights

    def _counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in weights:
            self._tensors_loaded += 1
            yield weight
