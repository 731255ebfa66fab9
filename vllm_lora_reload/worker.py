"""The worker's part: what is kept at sleep, put back at wake-up, and made right after a weight transfer."""

from __future__ import annotations

from typing import Any

from . import seams
from .lifecycle import State
from .runner import LoRAReloadModelRunner
from .session import WorkerState


class LoRAReloadWorker:
    """Mixed in before the class of a worker whose engine has LoRA enabled."""

    model_runner: Any
    lora_reload: WorkerState
    _lora_reload_draft = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        seams.extend(self.model_runner, LoRAReloadModelRunner)
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.lora_reload = self.model_runner.lora_reload

    def sleep(self, level: int = 1) -> None:
        if level >= 2:
            self.lora_reload.save()
        super().sleep(level)  # type: ignore[misc]
        self.lora_reload.lifecycle.slept(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)  # type: ignore[misc]
        if tags is None or "weights" in tags:
            discarded = self.lora_reload.lifecycle.state is State.DISCARDED
            self.lora_reload.lifecycle.woke()
            if discarded:
                self.lora_reload.unregistered.restore()
                self.model_runner.reset_lora_state()

    def start_draft_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self._lora_reload_draft = True
        super().start_draft_weight_update(*args, **kwargs)  # type: ignore[misc]

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self._lora_reload_draft = False
        super().start_weight_update(*args, **kwargs)  # type: ignore[misc]

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """One chunk of a weight transfer; the whole of it on releases without sessions (before 0.21)."""
        if self._lora_reload_draft:
            super().update_weights(*args, **kwargs)  # type: ignore[misc]
            return
        whole = not hasattr(super(), "finish_weight_update")
        with self.lora_reload.loading(completes=whole):
            super().update_weights(*args, **kwargs)  # type: ignore[misc]
        if whole:
            self.model_runner.reset_lora_state()

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """End a weight transfer session. A draft model's session leaves LoRA state alone."""
        if self._lora_reload_draft:
            super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
            return
        with self.lora_reload.loading():
            super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
        if not seams.engine_resets_lora():
            self.model_runner.reset_lora_state()

    def lora_reload_status(self) -> dict[str, str | None]:
        """For ``collective_rpc``: this rank's ``state`` and the ``error`` that requests get now, if any."""
        lifecycle = self.lora_reload.lifecycle
        return {"state": lifecycle.state.value, "error": lifecycle.error()}
