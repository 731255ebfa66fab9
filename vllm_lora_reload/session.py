"""All that this package keeps for one worker, and how a load of base weights runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import diagnosis, seams
from .adapters import Adapters
from .base_view import base_view, checkpoint_name, checkpoint_names
from .coverage import Coverage, FirstLoad
from .errors import AsleepError, SnapshotError
from .keeper import SnapshotKeeper
from .lifecycle import Lifecycle, State, Transfer
from .lora_state import LoRAState
from .replay import LoadPlan, NoReplay
from .ring import Ring
from .settings import Settings
from .snapshot import Engine, FileStates, Storage, file_states, storages
from .tensors import Canary, Copies, UnregisteredTensors, storage_key

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


class WorkerState:
    """Attribute ``lora_reload`` of a worker and of its model runner; they share one object.

    Args:
        model: the wrapped model.
        worker_manager: vLLM's ``WorkerLoRAManager`` of the model.
        device: where it runs.
        settings: the user's.
        first: the load at start-up, as it was watched.
        ranks: workers of this engine on this host.
        engine: what snapshots belong to, where there are any.
        files: names the files that the weights are loaded from; raises `NoReplay` if that cannot be told.
        before: their `file_states` before the load at start-up.
        sleeps: whether the engine can lose the weights pool.

    Attributes:
        lifecycle: where the worker stands.
        lora: LoRA state of the model.
        adapters: the adapters that live in it.
        coverage: which base tensors are still missing.
        unregistered: base tensors that no loader fills.
        ring: reads files into them.
        keeper: of snapshots, or None without the setting.
        plan: of the first load, or None without the setting ``replay``.
        has_to_load: this rank loads the checkpoint by itself, without asking whether others have it.
        last_restore: of the base weights by this package since level 2 took them, see `SnapshotKeeper.restore`.
    """

    def __init__(
        self,
        model: nn.Module,
        worker_manager: Any,
        device: torch.device,
        settings: Settings,
        first: FirstLoad | None = None,
        ranks: int = 1,
        engine: Engine | None = None,
        files: Callable[[], list[Path]] | None = None,
        before: FileStates | None = None,
        sleeps: bool = False,
    ) -> None:
        self.model = model
        self._device = device
        self.settings = settings
        self.lifecycle = Lifecycle()
        manager = seams.adapter_manager(worker_manager)
        self.lora = LoRAState(model, manager, device)
        self.adapters = Adapters(worker_manager, manager, self.lora)
        with base_view(model):
            self.coverage = Coverage(model, first)
        self.unregistered = UnregisteredTensors(model, device, known=self.lora.storages, more=self.coverage.unloaded)
        self.ring = Ring(
            device, settings.ring_bytes, settings.ring_threads, settings.ring_chunk, settings.ring_reader, ranks
        )
        self.keeper: SnapshotKeeper | None = None
        if settings.snapshot_dir and engine is not None:
            self.keeper = SnapshotKeeper(
                Path(settings.snapshot_dir),
                engine,
                settings.snapshot,
                settings.verify,
                self.ring,
                self.base_storages,
                device,
            )
        self.last_restore: dict[str, Any] | None = None
        self.plan: LoadPlan | None = None
        self._checkpoint_files = files
        # What was loaded, if nobody has written to them meanwhile.
        self._files = before if before is not None and before == self._file_states() else None
        self._all_on_device = all(tensor.device.type == device.type for tensor in model.parameters())
        self.has_to_load = False
        # For memory that is taken without a sleep, which nobody can announce. No load brings what these hold.
        self._canary = Canary(device) if sleeps else None
        self._at_start: Copies | None = None
        self._buffers: Copies | None = None
        self._depth = 0
        self._changed = False  # by a load, since the keeper was last told
        self._bypassed = False
        self._last_given: str | None = None

    def base_storages(self) -> list[Storage]:
        """Memory of all base tensors that the weights pool holds, registered or not, under names as without LoRA."""
        # Not in the base view: the keeper's thread asks while the model serves.
        parameters = [(checkpoint_name(n), t) for n, t in self.model.named_parameters(remove_duplicate=False)]
        buffers = [(checkpoint_name(n), t) for n, t in self.model.named_buffers(remove_duplicate=False)]
        unregistered = list(self.unregistered.named())
        kept = {storage_key(tensor) for _, tensor in (*buffers, *unregistered)}
        unloaded = {storage_key(tensor) for tensor in self.coverage.unloaded}
        kept -= {storage_key(tensor) for _, tensor in parameters} - unloaded
        brought = {storage_key(tensor) for tensor in self.coverage.loaded_buffers()}
        return storages((*parameters, *buffers, *unregistered), self._device, self.lora.storages, kept, brought)

    def started(self) -> None:
        """The model is there; what is allocated from now on is outside the weights pool."""
        if self._canary is not None:
            self._at_start = Copies([*self._buffers_on_device(), *(tensor for _, tensor in self.unregistered.named())])
            self.lora.keep_initial()

    def _buffers_on_device(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.device.type == self._device.type]

    def hold(self) -> None:
        """Base weights may change or go from now on: nobody is to read them."""
        if self.keeper is not None:
            self.keeper.hold()

    def settle(self) -> None:
        """Undo `hold` if the weights are complete."""
        complete = self.lifecycle.state is State.COMPLETE
        if self.keeper is not None:
            if complete and self._changed:
                self.keeper.loaded()
            self.keeper.release(complete)
        self._changed &= not complete

    def save(self, level: int) -> None:
        """Before a sleep: keep on the host what it is about to discard and no load brings back.

        Raises:
            AsleepError: the worker sleeps, at a level that keeps more or not entirely: nothing can be copied from
                unmapped memory.
        """
        self.hold()
        if self.lifecycle.unfinished or (level >= 2 and self.lifecycle.asleep == 1):
            raise AsleepError(
                f"the engine sleeps at level {self.lifecycle.asleep} and cannot sleep at level {level} before "
                'collective_rpc("wake_up")'
            )
        if level >= 2 and not self.lifecycle.asleep:
            self.lora.save()
            self.unregistered.save()
            if self.keeper is not None:
                self.keeper.compare(self.lifecycle.state is State.COMPLETE)

    def save_buffers(self) -> None:
        """Before the weights pool is unmapped behind the worker's back: vLLM keeps buffers only in its own sleep."""
        self._buffers = Copies(self._buffers_on_device())

    def slept(self, level: int, error: BaseException | None = None) -> None:
        """The weights pool is unmapped, or a part of it before an `error`."""
        self.lifecycle.slept(level, error)
        if level:
            self.adapters.slept()
        if level >= 2:
            self.lora.lost = True
            self.coverage.lose()
            self.last_restore = None

    def zeroed(self) -> None:
        """Somebody has overwritten all base weights that a load brings."""
        self.lifecycle.zeroed()
        self.coverage.lose()
        self.last_restore = None

    def restore(self, discarded: bool, by_itself: bool) -> bool:
        """After a wake-up: bring the base weights back from the snapshot, if there is one that has them.

        Without one (it is not written yet, say) the checkpoint is loaded, if it still has what level 2 took.

        A collective where there are snapshots: either every rank's weights come back so, or all ranks go the same way
        from there, since loaders may be collectives too.

        Args:
            discarded: whether level 2 took them.
            by_itself: whether the checkpoint is to be loaded in any case, if nothing else brings the weights.

        Returns:
            Whether the checkpoint has to be loaded.
        """
        keeper = self.keeper
        if keeper is None:
            return by_itself and self.lifecycle.state is State.MISSING
        usable = discarded and keeper.usable
        of_checkpoint = discarded and keeper.lost_first and self._checkpoint_unchanged()
        restored = usable and self._restored(keeper)
        everywhere = seams.true_on_all_ranks(restored)
        checkpoint_has_the_same = seams.true_on_all_ranks(of_checkpoint)
        if not discarded:
            return by_itself and self.lifecycle.state is State.MISSING
        if not everywhere:
            if restored:
                error = SnapshotError("another rank has none that could be read")
                self.lifecycle.restore_failed(error, elsewhere=True)
                self.last_restore = None
            if discarded and not usable:
                self._without_snapshot(keeper, checkpoint_has_the_same)
            return by_itself or checkpoint_has_the_same
        assert self.last_restore is not None
        self.coverage.all_there()
        self.lifecycle.loaded()
        self._end_as_a_load()
        speed = self.last_restore["bytes"] / self.last_restore["seconds"] / 1e9
        logger.info("Base weights restored from the snapshot, %.1f GB/s", speed)
        return False

    def _without_snapshot(self, keeper: SnapshotKeeper, checkpoint_has_the_same: bool) -> None:
        why = keeper.reason or "it was not written yet"
        if checkpoint_has_the_same:
            logger.info("No snapshot has the base weights (%s): loading the checkpoint, which has the same", why)
        elif keeper.lost_first:
            why += "; nor does the checkpoint, whose files have changed or cannot be looked at, here or on another rank"
        self.lifecycle.no_snapshot(why)

    def _restored(self, keeper: SnapshotKeeper) -> bool:
        try:
            self.last_restore = keeper.restore()
        except Exception as error:
            self.lifecycle.restore_failed(error)
            logger.exception("The snapshot could not be restored")
            return False
        return True

    def has_checkpoint(self) -> bool:
        """Whether memory holds already what a load of the checkpoint would bring, byte for byte, on every rank.

        Known only with a snapshot, whose digests tell, and if no file of the checkpoint has changed since start-up. A
        collective where there are snapshots.
        """
        keeper = self.keeper
        if keeper is None or self.has_to_load:
            return False
        complete = self.lifecycle.state is State.COMPLETE and self._depth == 0
        try:  # whatever a rank lacks, it has to take part in the decision
            holds = complete and self._all_on_device and self._checkpoint_unchanged() and keeper.holds()
        except Exception:
            logger.exception("What memory holds could not be compared with the snapshot")
            holds = False
        return seams.true_on_all_ranks(holds)

    def nothing_to_load(self) -> None:
        """Stands for a load of the checkpoint when `has_checkpoint`."""
        self._end_as_a_load()
        self.settle()

    def _end_as_a_load(self) -> None:
        if self.settings.adapters == "drop":
            self.adapters.drop_all()
            self.adapters.put_back()

    def _checkpoint_unchanged(self) -> bool:
        return self._files is not None and self._file_states() == self._files

    def _file_states(self) -> FileStates | None:
        """See `file_states`; None if it cannot be told."""
        if self._checkpoint_files is None:
            return None
        try:
            return file_states(self._checkpoint_files())
        except (NoReplay, OSError):
            return None

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
        try:
            self.mapped(reset)
        except BaseException:  # no memory for what LoRA needs, say
            self.absent()
            raise
        if self.settings.adapters == "keep":
            self.adapters.read_changed()

    def mapped(self, reset: Callable[[], None]) -> None:
        """As `woke`, without asking other ranks."""
        discarded = self.lifecycle.state is State.DISCARDED
        if discarded:
            self.unregistered.restore()  # while asleep: what an interrupt stops here the next wake-up does
            if self._buffers is not None:
                self._buffers.restore()
            if self._canary is not None:
                self._canary.renew()
        self._buffers = None
        self.lifecycle.woke()
        self.adapters.woke()
        if discarded:
            reset()
        else:
            self.adapters.put_pending()

    def _notice_loss(self) -> None:
        """Memory may have been taken and given back by something that this package does not see.

        Then all that a load does not bring is put back, LoRA state at the load's end.
        """
        if self._canary is None or self._canary.alive():
            return
        logger.warning("The memory of the weights was taken without sleep(level=2): all of it is brought back")
        if self._at_start is not None:
            self._at_start.restore()
        self._canary.renew()
        self.lora.lost = True
        self.coverage.lose()
        self.lifecycle.lost()
        self.last_restore = None

    def absent(self) -> None:
        """Take part in what ranks that wake up decide together, though this one does not: they would wait for it."""
        if self.settings.adapters == "keep":
            self.adapters.absent()
        if self.keeper is not None:
            seams.true_on_all_ranks(False)  # restored
            seams.true_on_all_ranks(False)  # the checkpoint has the same

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
        """The weights under checkpoint names; the last one that the model took is named in errors."""
        for name, weight in checkpoint_names(weights):
            self._last_given = name
            yield name, weight

    def bypassed(self) -> None:
        """Weights are about to be written by threads of ours, which nothing watches."""
        self._bypassed = True

    def _wrote(self) -> bool:
        """Whether the load that has ended, or the session, has changed a tensor of the model."""
        return self.coverage.touched() or self._bypassed

    @contextmanager
    def starting_transfer(self) -> Iterator[None]:
        """A transfer session starts in this block; see `end_transfer` for how it may end."""
        if self.lifecycle.transfer is None:
            self._begin()
        with self.layers_observed():
            yield

    def layers_observed(self) -> AbstractContextManager[None]:
        """What a layerwise reload needs to know, where it begins and where it goes on."""
        return seams.layers_observed(self.coverage.carry_over, self.coverage.is_as_loaded)

    def _begin(self) -> None:
        self._notice_loss()
        self.coverage.begin()
        self._bypassed = False

    def end_transfer(self, by: str) -> None:
        """Forget the transfer session that is open, with all that it has buffered: something else came before its end.

        Layers that it has taken apart are put together again. Base weights count as missing if it has written some.
        """
        seams.abort_layerwise_reload(self.model)
        wrote = self.lifecycle.transfer is Transfer.MAIN and self._wrote()
        self.lifecycle.end_transfer(by, wrote)
        if wrote:
            self.coverage.lose()

    def apart(self) -> str | None:
        """What a request has to be told that would run now, though requests may queue: layers are on the meta device.

        So it is while vLLM's layerwise reload buffers what a weight transfer brings.
        """
        if self.lifecycle.transfer is not Transfer.MAIN or not any(
            tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers())
        ):
            return None
        return (
            "a weight transfer is under way and has taken layers of the model apart. Wait for finish_weight_update, "
            f"or load base weights with {self.lifecycle.loads}, then ask again."
        )

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
        if self._depth == 0:
            self._last_given = None
            if self.lifecycle.transfer is not Transfer.MAIN:
                self._begin()
        self._depth += 1
        self.hold()
        try:
            # Some parameters require gradients, which vLLM's copies of kernel-format tensors do not expect.
            with torch.no_grad(), base_view(self.model), self.layers_observed():
                if self._depth > 1:
                    yield
                else:
                    with self.coverage.recording(anew, counts=not patches):
                        yield
            if self._depth == 1 and completes:
                if self.lora.lost:  # its reset at the wake-up did not end
                    self.adapters.put_back()
                self.lifecycle.loaded(self.coverage.missing(), self.coverage.total)
            self._changed = True
        except BaseException as error:
            if self._depth == 1:
                note = diagnosis.where(self._last_given, folder)
                if note and isinstance(error, Exception):
                    diagnosis.annotate(error, note)
                self.lifecycle.transfer = None
                seams.abort_layerwise_reload(self.model)
                wrote = self._wrote()
                self.lifecycle.load_failed(error, wrote)
                if wrote:
                    self.coverage.lose()
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.settle()
