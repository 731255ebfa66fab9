"""The model runner's part: wrap with reloadable layers, load through the base view, make LoRA state right."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import layers, seams
from .coverage import FirstLoad
from .session import WorkerState
from .settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

if not TYPE_CHECKING:
    LoRAModelRunnerMixin = seams.lora_model_runner_mixin()


class LoRAReloadModelRunner(LoRAModelRunnerMixin):
    """Mixed in before the V1 or the V2 ``GPUModelRunner`` (or a platform's own) of one worker."""

    lora_reload: WorkerState
    _first_load: FirstLoad | None = None

    def watch_first_load(self, model: nn.Module) -> None:
        """Record the load at start-up, the reference for what a load writes. Draft models are not followed."""
        if self._first_load is not None or "lora_reload" in vars(self):
            return
        self._first_load = first = FirstLoad(model)
        load: Any = model.load_weights

        @functools.wraps(load)
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            with first.recording():
                return _drained(load(*args, **kwargs))

        vars(model)["load_weights"] = load_weights

    def watch_processing(self, model: nn.Module) -> AbstractContextManager[None]:
        """Record also what vLLM derives from the weights right after that load."""
        first = self._first_load
        return first.processing() if first is not None and first.model is model else nullcontext()

    def load_lora_model(self, model: nn.Module, vllm_config: Any, device: torch.device) -> nn.Module:
        """Wrap the model as vLLM does, with layers that can reload, and take stock of what sleep can lose."""
        with layers.registered():
            model = super().load_lora_model(model, vllm_config, device)
        vars(model).pop("load_weights", None)
        first, self._first_load = self._first_load, None
        self.lora_reload = WorkerState(
            model,
            seams.worker_manager(self),
            device,
            Settings.of(vllm_config),
            first,
            seams.ranks_on_this_host(vllm_config),
        )
        model.load_weights = _through_base_view(model.load_weights, self.lora_reload)
        return model

    def reload_weights(
        self, weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Reload base weights in place: from disk, or from (name, tensor) pairs, with ``base_layer`` in names or not.

        Arguments are those of vLLM's ``GPUModelRunner.reload_weights``.

        Raises:
            Exception: whatever the load raised. See `WorkerState.loading` for what holds then.
        """
        settings = seams.checkpoint_settings(self)
        if weights_iterator is not None:
            weights_iterator = self.lora_reload.incoming(weights_iterator)
            if not kwargs.get("is_checkpoint_format", args[1] if len(args) > 1 else True):
                weights_iterator = self._of_right_shape(weights_iterator)
            folder = None
        else:
            path = Path(kwargs.get("weights_path") or (args[0] if args else None) or seams.checkpoint(self))
            folder = path if path.is_absolute() or path.exists() else None  # else a hub's name
        try:
            with self.lora_reload.loading(folder=folder, anew=True):
                super().reload_weights(weights_iterator, *args, **kwargs)
                if not seams.engine_resets_lora():
                    self.reset_lora_state()
        except BaseException:
            seams.set_checkpoint(self, settings)  # the next reload without a path is not to try the bad one again
            raise

    def _of_right_shape(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """For tensors that vLLM copies as they are: it would broadcast one that is too small."""
        for name, weight in weights:
            shape = self.get_model().get_parameter(name).shape
            if weight.shape != shape:
                raise ValueError(f"{name} has shape {list(weight.shape)} where {list(shape)} is needed")
            yield name, weight

    def reset_lora_state(self) -> None:
        """Make all LoRA state right, whatever its memory held. Adapters stay registered and active.

        Called at wake-up, and by loads at their end, where it does something only if the state is still lost.
        """
        self.lora_reload.reset_lora()


def _drained(loaded: Any) -> Any:
    """What a load returned; a generator has loaded nothing until it is run to its end."""
    return set(loaded) if inspect.isgenerator(loaded) else loaded


def _through_base_view(load: Any, state: WorkerState) -> Any:
    """Wrap a model's ``load_weights``, which weight transfer and RL frameworks call directly."""

    @functools.wraps(load)
    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        with state.loading():
            return _drained(load(state.incoming(weights), *args, **kwargs))

    return load_weights
