"""All that this package keeps for one worker, and how a load of base weights runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import diagnosis, seams
from .adapters import Adapters
from .base_view import base_view, checkpoint_names
from .coverage import Coverage, FirstLoad
from .errors import AsleepError
from .lifecycle import Lifecycle, State
from .lora_state import LoRAState
from .ring import Ring, threads_for
from .settings import Settings
from .tensors import UnregisteredTensors

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


class WorkerState:
    """Attribute ``lora_reload`` of a worker and of its model runner; they share one object.

    Args:
        model: the wrapped model.
        worker_manager: vLLM's ``WorkerLoRAManager`` of the model.
        device: where it runs.
        settings: the user's.
        first: the load at start-up, as it was watched.
        ranks: workers of this engine on this host.

    Attributes:
        lifecycle: where the worker stands.
        lora: LoRA state of the model.
        adapters: the adapters that live in it.
        coverage: which base tensors are still missing.
        unregistered: base tensors that no loader fills.
        ring: reads files into them.
    """

    def __init__(
        self,
        model: nn.Module,
        worker_manager: Any,
        device: torch.device,
        settings: Settings,
        first: FirstLoad | None = None,
        ranks: int = 1,
    ) -> None:
        self.model = model
        self.settings = settings
        self.lifecycle = Lifecycle()
        manager = seams.adapter_manager(worker_manager)
        self.lora = LoRAState(model, manager, device)
        self.adapters = Adapters(worker_manager, manager, self.lora)
        with base_view(model):
            self.coverage = Coverage(model, first)
        self.unregistered = UnregisteredTensors(model, device, known=self.lora.storages, more=self.coverage.unloaded)
        threads = settings.ring_threads or threads_for(ranks)
        self.ring = Ring(device, settings.ring_bytes, threads, settings.ring_chunk, settings.ring_reader)
        self._depth = 0
        self._tensors_given = 0
        self._last_given: str | None = None

    def save(self) -> None:
        """Keep on the host what level 2 is about to discard and no load brings back."""
        if not self.lifecycle.asleep:
            self.lora.save()
            self.unregistered.save()

    def slept(self, level: int) -> None:
        """The weights pool is unmapped."""
        self.lifecycle.slept(level)
        if level:
            self.adapters.slept()
        if level >= 2:
            self.lora.lost = True
            self.coverage.lose()

    def reset_lora(self) -> None:
        """Make LoRA state right; at the end of a load, which never touches it, only if it was lost.

        With the setting ``adapters: drop`` a load ends with no adapters.
        """
        at_end_of_load = self._depth > 0
        if at_end_of_load and self.settings.adapters == "drop":
            self.adapters.drop_all()
            self.adapters.put_back()
        elif self.lora.lost or not at_end_of_load:
            self.adapters.put_back()

    def woke(self, reset: Callable[[], None]) -> None:
        """The weights pool is mapped again: bring back all that a load does not, LoRA state with `reset`."""
        discarded = self.lifecycle.state is State.DISCARDED
        self.lifecycle.woke()
        self.adapters.woke()
        if discarded:
            self.unregistered.restore()
            reset()
        else:
            self.adapters.put_pending()
        if self.settings.adapters == "keep":
            self.adapters.read_changed()

    def must_be_mapped(self) -> None:
        """Raises:
        AsleepError: base weights have no memory now.
        """
        if self.lifecycle.asleep:
            raise AsleepError(
                f"base weights cannot be loaded while the engine sleeps at level {self.lifecycle.asleep}: "
                'call wake_up(["weights"]) first'
            )

    def incoming(self, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The weights under checkpoint names, counted as the model takes them."""
        for name, weight in checkpoint_names(weights):
            self._tensors_given += 1
            self._last_given = name
            yield name, weight

    def drop_transfer(self) -> None:
        """Forget the transfer session that is open, with all that it has buffered."""
        self.lifecycle.transfer = None
        seams.abort_layerwise_reload(self.model)

    @contextmanager
    def loading(
        self, completes: bool = True, folder: Path | None = None, patches: bool = False, anew: bool = False
    ) -> Iterator[None]:
        """Run a load of base weights in the base view. The outermost block decides about success or failure.

        After an error, wrappers and parameters are in their places again, and base weights count as missing unless
        nothing can have been written yet.

        Args:
            completes: whether the weights are all there when the block ends (not so for a chunk of a transfer).
            folder: the checkpoint that is read, if the block reads one; named in errors.
            patches: whether single elements are written, which brings no lost tensor back.
            anew: whether layers may be made anew (vLLM's layerwise reload).
        """
        self.must_be_mapped()
        before = self._tensors_given
        if self._depth == 0:
            self._last_given = None
        self._depth += 1
        try:
            # Some parameters require gradients, which vLLM's copies of kernel-format tensors do not expect.
            with torch.no_grad(), base_view(self.model), seams.layers_observed(self.coverage.carry_over):
                if self._depth > 1 or patches:
                    yield
                else:
                    with self.coverage.recording(anew):
                        yield
            if self._depth == 1 and completes:
                self.lifecycle.loaded(self.coverage.missing(), self.coverage.total)
        except BaseException as error:
            if self._depth == 1:
                note = diagnosis.where(self._last_given, folder)
                if note and isinstance(error, Exception):
                    diagnosis.annotate(error, note)
                # Transfer engines also write without `load_weights`, and earlier chunks are there already.
                wrote = self._tensors_given > before or self.lifecycle.transfer is not None
                self.lifecycle.load_failed(error, wrote)
                self.lifecycle.transfer = None
                if wrote:
                    self.coverage.lose()
                seams.abort_layerwise_reload(self.model)
            raise
        finally:
            self._depth -= 1
