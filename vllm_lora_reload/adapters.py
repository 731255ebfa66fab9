"""What is kept of each adapter, when it is read again, and how it comes into its slot.

vLLM's manager keeps every registered adapter in host memory. This adds where it came from (to see whether its files
have changed), adapters that came as tensors and have no files, versions, and two states that vLLM does not know: slots
that were assigned while their memory was unmapped, and adapters that could not be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import diagnosis, seams
from .lora_state import LoRAState
from .ranks import nearest_max_lora_rank
from .slots import SlotWrite

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
Fingerprint = tuple[tuple[str, int, int, int], ...]  # name, size in bytes, mtime in ns, inode


def fingerprint(folder: str) -> Fingerprint:
    """What shows that an adapter's files are not those that were read. Empty where there are none."""
    found = []
    for name in _FILES:
        try:
            status = (Path(folder).expanduser() / name).stat()
        except OSError:  # not there, or not any more
            continue
        found.append((name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


@dataclass
class Source:
    """Where an adapter was read from. `request` is the ``LoRARequest``."""

    request: Any
    files: Fingerprint


@dataclass
class Staged:
    """An adapter that was checked and waits to be swapped in. `source` is None if it came as tensors."""

    name: str
    adapter: Any
    source: Source | None


@dataclass
class Adapters:
    """The adapters of one worker.

    Attributes:
        worker_manager: vLLM's ``WorkerLoRAManager``.
        manager: vLLM's ``LoRAModelManager``.
        lora: LoRA state of the model.
        broken: why an adapter could not be put back, by id.
        numbers: adapter ids by name, of all that were ever known and whose id has not gone to another name.
        versions: how often an adapter was updated, by id. Never goes back: prefix caches know adapters by it.
    """

    worker_manager: Any
    manager: Any
    lora: LoRAState
    broken: dict[int, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    _modules: Any = None  # what vLLM's manager has not got while it must not write
    _sources: dict[int, Source] = field(default_factory=dict)
    _without_files: dict[int, Any] = field(default_factory=dict)
    _unreadable: set[int] = field(default_factory=set)
    _pending: set[int] = field(default_factory=set)
    _writes: dict[int, SlotWrite] = field(default_factory=dict)
    _staged: dict[str, Staged] = field(default_factory=dict)
    _held: dict[int, Any] = field(default_factory=dict)  # those that the engine core counts on
    _being_read: Any = None
    _removed: set[int] = field(default_factory=set)  # by the user, while requests needed them

    def __post_init__(self) -> None:
        for manager, mixin in ((self.worker_manager, ReadsAdapters), (self.manager, AssignsSlots)):
            seams.extend(manager, mixin)
            manager.lora_reload = self
        seams.watch_slots(self.manager, self.assigned)

    # --- Reading ----------------------------------------------------------------------------------------------

    def read(self, request: Any, load: Callable[[Any], Any]) -> Any:
        """What vLLM gets when it wants to read the adapter of a ``LoRARequest``."""
        number = request.lora_int_id
        if number in self._without_files and not getattr(request, "load_inplace", False):
            return self._without_files[number]
        files = fingerprint(request.lora_path)
        try:
            adapter = self._read(request, load)
        except Exception:  # removed, or evicted and its files gone, while a request needs it
            if number in self._held and not getattr(request, "load_inplace", False):
                return self._held[number]
            raise
        self._being_read = adapter
        self._removed.discard(number)
        self._name(request.lora_name, number)
        registered = seams.registered(self.manager)
        self._sources = {each: source for each, source in self._sources.items() if each in registered}
        if files:  # else there is nothing to look at again, and the request may carry tensors
            self._sources[number] = Source(request, files)
        else:
            self._sources.pop(number, None)
        self._without_files.pop(number, None)
        self.broken.pop(number, None)
        return adapter

    def _name(self, name: str, number: int) -> None:
        """An id has one name, the last that it was given."""
        self.numbers = {each: known for each, known in self.numbers.items() if known != number} | {name: number}

    def _read(self, request: Any, load: Callable[[Any], Any]) -> Any:
        try:
            adapter = load(request)
        except Exception as error:
            rank = diagnosis.adapter_rank(request.lora_path)
            if rank is not None and rank > self.worker_manager.lora_config.max_lora_rank:
                diagnosis.annotate(error, f"start the engine with max_lora_rank={nearest_max_lora_rank(rank)}")
            raise
        for weights in adapter.loras.values():
            weights.lora_a, weights.lora_b = _owned(weights.lora_a), _owned(weights.lora_b)
        for whole in seams.whole_modules(adapter).values():
            whole.weight, whole.bias = _owned(whole.weight), _owned(whole.bias)
        return adapter

    def merged(self, adapter: Any) -> bool:
        """Whether an adapter already has the form that slots take, so that it must not be merged again."""
        return self._without_files.get(adapter.id) is adapter or self._held.get(adapter.id) is adapter

    def was_merged(self, adapter: Any) -> None:
        """What vLLM read again because it had evicted it is held in the place of what it read before."""
        if adapter is self._being_read:
            self._being_read = None
            if adapter.id in self._held:
                self._held[adapter.id] = adapter

    # --- Requests ---------------------------------------------------------------------------------------------

    def admit(self, request: Any, live: Collection[int]) -> bool:
        """Have a request's adapter in the host registry, and hold it until the next call, whatever vLLM evicts.

        Args:
            request: the ``LoRARequest``.
            live: ids of the adapters that requests need: they are held on.

        Returns:
            Whether it is there, but the request wants its files read again and they are not those that were read.

        Raises:
            Exception: it cannot be read, or does not fit.
        """
        registered = seams.registered(self.manager)
        self._held = {number: held for number, held in self._held.items() if number in live or number in registered}
        for gone in self._removed - set(live):
            self._removed.discard(gone)
            self.worker_manager.remove_adapter(gone)
        number = request.lora_int_id
        registered = seams.registered(self.manager)
        if number not in registered or number in self._removed:
            adapter = self._removed_or_read(request)
            if not self.merged(adapter):
                with self.with_modules():
                    seams.merge_packed_modules(self.manager, adapter)
            with self.with_modules():
                self._dry_run(0, adapter, strict=False)
            seams.register_adapter(self.manager, adapter)
            registered = seams.registered(self.manager)
        self._held[number] = registered[number]
        source = self._sources.get(number)
        if not getattr(request, "load_inplace", False) or source is None:
            return False
        now = fingerprint(request.lora_path)
        return bool(now) and now != source.files

    def held(self) -> list[int]:
        """Ids of the adapters that a step will find."""
        return [number for number in self._held if number not in self._removed]

    def _removed_or_read(self, request: Any) -> Any:
        if request.lora_int_id in self._removed:
            # What is held serves requests that were let in before, not this one.
            held = self._held.pop(request.lora_int_id, None)
            try:
                return self.worker_manager._load_adapter(request)
            except Exception:
                if held is not None:
                    self._held[request.lora_int_id] = held
                raise
        return self.worker_manager._load_adapter(request)

    def forget(self, number: int) -> None:
        """The user has removed the adapter. Requests that need it go on with it, no other is let in."""
        if number in self._held:
            self._removed.add(number)
        for table in (self._sources, self._without_files, self.broken):
            table.pop(number, None)

    # --- Slots ------------------------------------------------------------------------------------------------

    def assigned(self, index: int) -> None:
        """vLLM has given a slot to another adapter, or to none."""
        seams.forget_mapping(self.manager)
        self._writes.pop(index, None)
        if self.unmapped:
            self._pending.add(index)

    def slept(self) -> None:
        """The memory of the slots is unmapped: vLLM keeps its books about them, and reaches none until `woke`."""
        if not self.unmapped:
            self._modules = seams.take_modules(self.manager)

    def woke(self) -> None:
        """It is mapped again."""
        if self.unmapped:
            seams.give_modules(self.manager, self._modules)
            self._modules = None

    @property
    def unmapped(self) -> bool:
        return self._modules is not None

    @contextmanager
    def with_modules(self) -> Iterator[None]:
        """For what looks at wrappers but does not write to them."""
        if not self.unmapped:
            yield
            return
        seams.give_modules(self.manager, self._modules)
        try:
            yield
        finally:
            self._modules = seams.take_modules(self.manager)

    def put_back(self) -> None:
        """Bring every slot into being after its memory was lost."""
        self.lora.reset(self._write)
        self._pending.clear()

    def put_pending(self) -> None:
        """Write the slots that were assigned while their memory was unmapped; it holds all the rest."""
        pending, self._pending = self._pending, set()
        slots = seams.slots(self.manager)
        for index in sorted(pending):
            self.lora.clear_slot(index)
            if (number := slots[index]) is not None:
                self._write(index, number, False)

    def _write(self, index: int, number: int, known: bool) -> None:
        """Write an adapter into a zeroed slot. `known`: the wrappers' metadata is that of this adapter already."""
        adapter = seams.registered(self.manager)[number]
        try:
            if known and index not in self._pending:
                if (write := self._writes.get(index)) is None or write.adapter is not adapter:
                    write = self._writes[index] = self._dry_run(index, adapter, strict=False)  # it served
                write.into_zeroed_slot()
            else:
                seams.write_slot(self.manager, index, adapter)
            self.broken.pop(number, None)
        except Exception as error:
            self.broken[number] = f"{type(error).__name__}: {error}"
            self.lora.clear_slot(index)

    def _dry_run(self, index: int, adapter: Any, strict: bool) -> SlotWrite:
        return SlotWrite(self.manager, index, adapter, self.lora.stack_of, self.lora.storages, strict)

    def drop_all(self) -> None:
        """As vLLM does from 0.28 on when base weights have been replaced."""
        gone = dict.fromkeys(self._without_files, "it came as tensors and was dropped when base weights were replaced")
        self.worker_manager.remove_all_adapters()
        for table in (self._sources, self._without_files, self.broken, self._writes):
            table.clear()
        self._pending.clear()
        self.broken.update(gone)  # vLLM would look for files that never were

    # --- Changed files ----------------------------------------------------------------------------------------

    def read_changed(self) -> None:
        """Read adapters again whose files are not those that were read; those whose files are gone stay as they are.

        A collective: all ranks take the new content, or none does and the adapter counts as broken.
        """
        changed = [number for number in sorted(seams.registered(self.manager)) if self._files_changed(number)]
        for number in seams.same_on_all_ranks(changed):
            self._read_again(number)

    def absent(self) -> None:
        """Stands for `read_changed` on a rank that cannot read anything now."""
        for _ in seams.same_on_all_ranks([]):
            seams.true_on_all_ranks(False)

    def _files_changed(self, number: int) -> bool:
        source = self._sources.get(number)
        now = fingerprint(source.request.lora_path) if source else ()
        return bool(now) and source is not None and (now != source.files or number in self._unreadable)

    def _read_again(self, number: int) -> None:
        problem, staged, current = None, None, None
        try:  # whatever a rank lacks, it has to take part in the decision
            request = self._sources[number].request
            current = seams.registered(self.manager)[number]
            staged = self._check(request.lora_name, request, lasting=True)
        except Exception as error:
            problem = f"its files have changed, and {type(error).__name__}: {error}"
        if not seams.true_on_all_ranks(staged is not None):
            self.broken[number] = problem or "its files have changed, and another rank could not read them"
            self._unreadable.add(number)
            return
        self._unreadable.discard(number)
        assert staged is not None
        if not _same(staged.adapter, current):
            self._install(staged, activate=False)
        else:
            self._sources[number] = staged.source or self._sources[number]
            self.broken.pop(number, None)

    # --- Updates ----------------------------------------------------------------------------------------------

    def stage(self, token: str, name: str, number: int, folder: str, lasting: bool) -> None:
        """Read, check and keep an adapter for `commit`.

        Args:
            token: stands for this update.
            number: adapter id.
            folder: a PEFT folder.
            lasting: whether the folder stays, so that the adapter has files.

        Raises:
            Exception: the adapter does not fit.
        """
        self._staged[token] = self._check(name, seams.lora_request(name, number, folder), lasting)

    def _check(self, name: str, request: Any, lasting: bool) -> Staged:
        files = fingerprint(request.lora_path)
        if unknown := diagnosis.special_settings(request.lora_path) - seams.peft_settings():
            raise ValueError(f"{', '.join(sorted(unknown))} in adapter_config.json: this vLLM would leave it out")
        adapter = self._read(request, self.worker_manager.load_unnoted)
        for module, weights in adapter.loras.items():
            _check_pair(module, weights)
        for module, whole in seams.whole_modules(adapter).items():
            _check_finite(module, weight=whole.weight, bias=whole.bias)
        seams.merge_packed_modules(self.manager, adapter)
        with self.with_modules():
            if lost := seams.modules_without_a_place(self.manager, adapter):
                more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
                raise ValueError(f"the model has no place for {', '.join(lost[:3])}{more}")
            self._dry_run(0, adapter, strict=True)
        return Staged(name, adapter, Source(request, files) if lasting else None)

    def discard(self, token: str) -> None:
        self._staged.pop(token, None)

    def commit(self, token: str) -> int:
        """Swap a staged adapter in: into the host registry, and into its slot if it has one or one can be had.

        Returns:
            The adapter's version; 0 if its id has gone to another name since it was staged, and nothing was changed.
        """
        staged = self._staged.pop(token)
        number = staged.adapter.id
        taken = any(known == number for name, known in self.numbers.items() if name != staged.name)
        if taken and number in seams.registered(self.manager):
            return 0
        self._name(staged.name, number)
        self.versions[number] = self.versions.get(number, 0) + 1
        self._install(staged)
        return self.versions[number]

    def _install(self, staged: Staged, activate: bool = True) -> None:
        number = staged.adapter.id
        seams.register_adapter(self.manager, staged.adapter)
        if staged.source is None:
            self._without_files[number] = staged.adapter
            self._sources.pop(number, None)
        else:
            self._sources[number] = staged.source
            self._without_files.pop(number, None)
        self.broken.pop(number, None)
        self._removed.discard(number)
        if number in self._held:
            self._held[number] = staged.adapter
        slots = seams.slots(self.manager)
        if number not in slots:
            if activate:
                seams.activate_if_possible(self.manager, number)
            return
        self._writes.pop(slots.index(number), None)
        if self.unmapped:
            self._pending.add(slots.index(number))
        else:
            seams.write_slot(self.manager, slots.index(number), staged.adapter)

    def known(self) -> dict[str, dict[str, int]]:
        """Id and version by name."""
        return {
            name: {"lora_int_id": number, "version": self.versions.get(number, 0)}
            for name, number in self.numbers.items()
        }


class ReadsAdapters:
    """Mixed in before the class of a worker's ``WorkerLoRAManager``."""

    lora_reload: Adapters

    def _load_adapter(self, lora_request: Any) -> Any:
        return self.lora_reload.read(lora_request, super()._load_adapter)  # type: ignore[misc]

    def load_unnoted(self, lora_request: Any) -> Any:
        return super()._load_adapter(lora_request)  # type: ignore[misc]

    def remove_adapter(self, adapter_id: int) -> bool:
        self.lora_reload.forget(adapter_id)
        removed: bool = super().remove_adapter(adapter_id)  # type: ignore[misc]
        return removed


class AssignsSlots:
    """Mixed in before the class of a worker's ``LoRAModelManager``."""

    lora_reload: Adapters

    def remove_all_adapters(self) -> None:
        super().remove_all_adapters()  # type: ignore[misc]
        seams.watch_slots(self, self.lora_reload.assigned)  # it has made a new table

    def _create_merged_loras_inplace(self, lora_model: Any) -> None:
        if not self.lora_reload.merged(lora_model):
            with self.lora_reload.with_modules():
                super()._create_merged_loras_inplace(lora_model)  # type: ignore[misc]
            self.lora_reload.was_merged(lora_model)


def _owned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor in memory of its own. Where vLLM does not pin it, it may be a view of the file, which can change."""
    return tensor if tensor is None or tensor.is_pinned() else tensor.clone()


def _check_pair(module: str, weights: Any) -> None:
    """What vLLM takes on trust of one module of an adapter that has just been read.

    Raises:
        ValueError: one of the two tensors is missing, their ranks differ, or a value is not finite.
    """
    a, b = weights.lora_a, weights.lora_b
    if a is None or b is None:
        raise ValueError(f"{module} has lora_{'B' if a is None else 'A'} but no lora_{'A' if a is None else 'B'}")
    if a.shape[-2] != b.shape[-1]:
        raise ValueError(f"{module}: lora_A has rank {a.shape[-2]}, lora_B has rank {b.shape[-1]}")
    _check_finite(module, lora_A=a, lora_B=b)


def _check_finite(module: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        # NaN is both the least and the greatest.
        if tensor is not None and not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
            raise ValueError(f"{module}: {name} has values that are not finite")


def _tensors(adapter: Any) -> list[tuple[str, torch.Tensor | None]]:
    found: list[tuple[str, torch.Tensor | None]] = []
    for module in sorted(adapter.loras):
        weights = adapter.loras[module]
        for part in (weights.lora_a, weights.lora_b):
            found += [(module, tensor) for tensor in (part if isinstance(part, (list, tuple)) else [part])]
    for module, whole in sorted(seams.whole_modules(adapter).items()):
        found += [(module, whole.weight), (module, whole.bias)]
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two merged adapters have equal weights."""
    ours, theirs = _tensors(one), _tensors(other)
    return [name for name, _ in ours] == [name for name, _ in theirs] and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )
