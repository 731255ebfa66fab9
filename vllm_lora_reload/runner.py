"""The model runner's part: wrap with reloadable layers, load through the base view, make LoRA state right."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import layers, seams, snapshot
from .coverage import FirstLoad, WriteRecorder
from .replay import LoadPlan, LoadRecorder, NoReplay, ReplayError
from .session import WorkerState
from .settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

if not TYPE_CHECKING:
    LoRAModelRunnerMixin = seams.lora_model_runner_mixin()


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


class LoRAReloadModelRunner(LoRAModelRunnerMixin):
    """Mixed in before the V1 or the V2 ``GPUModelRunner`` (or a platform's own) of one worker."""

    lora_reload: WorkerState
    _first_load: FirstLoad | None = None
    _files_before: snapshot.FileStates | None = None

    def watch_first_load(self, model: nn.Module) -> None:
        """Record the load at start-up, the reference for what a load writes. Draft models are not followed."""
        if self._first_load is not None or "lora_reload" in vars(self):
            return
        settings = Settings.of(self.vllm_config)
        if settings.snapshot_dir:
            with contextlib.suppress(NoReplay, OSError):
                self._files_before = snapshot.file_states(self._checkpoint_files(model))
        replay = settings.replay == "on" and not seams.weights_can_move(self.vllm_config)
        self._first_load = first = FirstLoad(model, LoadRecorder if replay else WriteRecorder)
        load: Any = model.load_weights

        @functools.wraps(load)
        def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
            with first.recording():
                if isinstance(first.loaded_by, LoadRecorder):
                    weights = first.loaded_by.given(weights)
                return _drained(load(weights, *args, **kwargs))

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
        settings = Settings.of(vllm_config)
        if not seams.sleeps(vllm_config):
            settings = dataclasses.replace(settings, snapshot="never")  # only on request, for other engines
        files = functools.partial(self._checkpoint_files, model)
        self.lora_reload = WorkerState(
            model,
            seams.worker_manager(self),
            device,
            settings,
            first,
            seams.ranks_on_this_host(vllm_config),
            snapshot.Engine(**seams.identity(vllm_config)) if settings.snapshot_dir else None,
            files,
            self._files_before,
            seams.sleeps(vllm_config),
        )
        if not seams.can_read_checkpoint(self):
            self.lora_reload.lifecycle.loads = "a weight transfer or model.load_weights(...)"
        model.load_weights = _through_base_view(model.load_weights, self.lora_reload)
        if settings.replay == "on":
            self.lora_reload.plan = LoadPlan.of(first, self.lora_reload.coverage, device, files)
            self.lora_reload.plan.log()
        return model

    def _checkpoint_files(self, model: nn.Module) -> list[Path]:
        try:
            return seams.checkpoint_files(self, model)
        except Exception as error:
            raise NoReplay(str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}") from error

    def reload_weights(
        self, weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Reload base weights in place: from disk, or from (name, tensor) pairs, with ``base_layer`` in names or not.

        Arguments are those of vLLM's ``GPUModelRunner.reload_weights``.

        Raises:
            Exception: whatever the load raised. See `WorkerState.loading` for what holds then.
        """
        if weights_iterator is None and _of_checkpoint(*args, **kwargs):
            if self.lora_reload.has_checkpoint():
                logger.info("reload_weights: base weights are complete and are those of the checkpoint; nothing to do")
                self.lora_reload.nothing_to_load()
                return
            if self._replayed():
                return
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

    def _replayed(self) -> bool:
        """Load the checkpoint by the plan of the first load; False leaves it to the engine's loader."""
        state = self.lora_reload
        if state.plan is None or not state.plan.usable:
            return False
        try:
            replay = state.plan.replay(self._checkpoint_files(state.model))
        except (NoReplay, OSError) as reason:
            logger.warning("reload_weights: the engine's loader has to load: %s", reason)
            return False
        try:
            with state.loading(folder=_folder(seams.checkpoint(self))):
                state.bypassed()
                state.last_restore = replay.run(state.ring, self.get_model().load_weights, state.coverage)
                self.reset_lora_state()
        except ReplayError as error:
            logger.warning("reload_weights: the engine's loader has to load, reading broke off: %s", error)
            return False
        seams.after_reload(self)
        return True

    def _of_right_shape(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """For tensors that vLLM copies as they are: it would broadcast one that is too small."""
        for name, weight in weights:
            self.check_shape(name, weight.shape)
            yield name, weight

    def check_shape(self, name: str, shape: torch.Size) -> None:
        """Raises:
        ValueError: a tensor of this shape is not all of the parameter.
        """
        needed = self.get_model().get_parameter(name).shape
        if shape != needed:
            raise ValueError(f"{name} has shape {list(shape)} where {list(needed)} is needed")

    def reset_lora_state(self) -> None:
        """Make all LoRA state right, whatever its memory held. Adapters stay registered and active.

        Called at wake-up, and by loads at their end, where it does something only if the state is still lost.
        """
        self.lora_reload.reset_lora()


def _of_checkpoint(weights_path: str | None = None, is_checkpoint_format: bool = True, **others: Any) -> bool:
    """Whether these arguments of ``reload_weights`` ask for the checkpoint that is the runner's own."""
    return not weights_path and is_checkpoint_format and not others


def _folder(checkpoint: str) -> Path | None:
    return Path(checkpoint) if Path(checkpoint).is_dir() else None


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
