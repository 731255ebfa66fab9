"""What is kept of each adapter, when it is read again, and how it comes into its slot.

vLLM's manager keeps every registered adapter in host memory. This adds where it came from (to see whether its files
have changed), adapters that came as tensors and have no files, versions, and two states that vLLM does not know: slots
that were assigned while their memory was unmapped, and adapters that could not be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from . import diagnosis, seams
from .files import ensure_plain
from .lora_state import LoRAState
from .ranks import nearest_max_lora_rank
from .slots import SlotWrite
from .staging import FOLLOWS, NO_FILES

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
Fingerprint = tuple[tuple[str, int, int, int, int], ...]  # name, size in bytes, mtime in ns, inode, ctime in ns
_FIRST_NUMBER = 1_000_000  # callers of ``add_lora`` count from 1
_MOST_NAMES = 4096  # that are remembered though vLLM has not got their adapters any more


def fingerprint(folder: Any) -> Fingerprint:
    """What shows that an adapter's files are not those that were read. Empty where there are none, or no path."""
    found = []
    where = diagnosis.local_folder(folder)
    for name in _FILES if where is not None else ():
        try:
            status = (where / name).stat()  # type: ignore[operator]
        except (OSError, ValueError):  # not there, or not any more
            continue
        found.append((name, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns))
    return tuple(found)


@dataclass
class Source:
    """Where an adapter was read from. `request` is the ``LoRARequest``, its path a whole one."""

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
        numbers: adapter ids by name, until `forget`; of those that vLLM has not got any more only the last ones.
        versions: how often an adapter was updated, by name. A name that was forgotten begins above all of these.
    """

    worker_manager: Any
    manager: Any
    lora: LoRAState
    broken: dict[int, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    _forgotten: int = 0  # the highest version that was forgotten
    _highest: int = _FIRST_NUMBER - 1  # id that an adapter has or had
    _lent: bool = False  # for the length of a `with_modules` block
    _modules: Any = None  # what vLLM's manager has not got while it must not write
    _sources: dict[int, Source] = field(default_factory=dict)
    _without_files: dict[int, Any] = field(default_factory=dict)
    _homes: dict[int, Any] = field(default_factory=dict)  # request for an adapter that was updated from a folder
    _inplace: dict[int, str] = field(default_factory=dict)  # path that ``load_inplace`` has counted for
    _wanted: dict[int, str] = field(default_factory=dict)  # path that it is to count for when it has been read
    _unreadable: set[int] = field(default_factory=set)
    _pending: set[int] = field(default_factory=set)
    _writes: dict[int, SlotWrite] = field(default_factory=dict)
    _staged: dict[str, Staged] = field(default_factory=dict)
    _held: dict[int, Any] = field(default_factory=dict)  # those that the engine core counts on
    _stepping: bool = False
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
        number, plain = request.lora_int_id, seams.is_lora_request(request)  # another may bring tensors
        inplace = getattr(request, "load_inplace", False)
        if self._stepping and not inplace and number in self._held:
            return self._held[number]  # vLLM has evicted it, or the user has removed it
        if plain and not inplace:
            if (kept := self._kept(request)) is not None:
                return kept
            home = self._homes.get(number)
            request = home if home is not None and home.lora_name == request.lora_name else request
        files = fingerprint(request.lora_path)
        adapter = self._read(request, load)
        self._being_read = adapter
        self._removed.discard(number)
        self._name(request.lora_name, number)
        registered = seams.registered(self.manager)
        self._sources = {each: source for each, source in self._sources.items() if each in registered}
        if files:  # else there is nothing to look at again, and the request may carry tensors
            folder = str(diagnosis.local_folder(request.lora_path))
            self._sources[number] = Source(seams.at_folder(request, folder), files)
        else:
            self._sources.pop(number, None)
        for table in (self._without_files, self.broken):
            table.pop(number, None)
        if inplace or not plain:
            self._homes.pop(number, None)
        if inplace and plain:
            self._inplace[number] = str(diagnosis.local_folder(request.lora_path))
        return adapter

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step's look at its adapters: it finds those that its requests were let in for, and reads no file."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def adding(self, number: int) -> None:
        """An adapter is about to be added. If the user has removed one of that id, vLLM is not to find it there."""
        if not self._stepping and number in self._removed:
            self._removed.discard(number)
            seams.remove_adapter(self.manager, number)

    def _kept(self, request: Any) -> Any:
        """The adapter of a request whose files are not there, or are not to be read; None if there is none."""
        number, name = request.lora_int_id, request.lora_name
        return self._without_files.get(number) if self.numbers.get(name, number) == number else None

    def _name(self, name: str, number: int) -> None:
        """An id has one name, the last that it was given."""
        for other in [each for each, known in self.numbers.items() if known == number and each != name]:
            self._forget_name(other)
        self.numbers.pop(name, None)
        self.numbers[name] = number  # the last one now
        self._highest = max(self._highest, number)
        if len(self.numbers) > _MOST_NAMES:
            there = seams.registered(self.manager).keys() | self._without_files.keys() | {number}
            gone = (each for each, known in self.numbers.items() if known not in there)
            if (oldest := next(gone, None)) is not None:
                self._forget_number(self.numbers[oldest])
                self._forget_name(oldest)

    def _forget_name(self, name: str) -> None:
        del self.numbers[name]
        self._forgotten = max(self._forgotten, self.versions.pop(name, 0))

    def _forget_number(self, number: int) -> None:
        for table in (self._sources, self._without_files, self._homes, self._inplace, self._wanted, self.broken):
            table.pop(number, None)
        self._unreadable.discard(number)

    def free_number(self) -> int:
        """An id that no adapter of this worker has or had."""
        return max([self._highest, *seams.registered(self.manager), *self._without_files]) + 1

    def _read(self, request: Any, load: Callable[[Any], Any]) -> Any:
        if str(request.lora_path).startswith(NO_FILES):
            raise FileNotFoundError("it came as tensors and was removed")
        if (where := diagnosis.local_folder(request.lora_path)) is not None:
            ensure_plain(where, _FILES)
        try:
            adapter = load(request)
        except Exception as error:
            rank = diagnosis.adapter_rank(request.lora_path)
            if rank is not None and rank > self.worker_manager.lora_config.max_lora_rank:
                diagnosis.annotate(error, f"start the engine with max_lora_rank={nearest_max_lora_rank(rank)}")
            raise
        ours = seams.reads_files(load) and seams.is_lora_request(request)
        for weights in adapter.loras.values():
            weights.lora_a, weights.lora_b = _owned(weights.lora_a, ours), _owned(weights.lora_b, ours)
        for whole in seams.whole_modules(adapter).values():
            whole.weight, whole.bias = _owned(whole.weight, ours), _owned(whole.bias, ours)
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
        """Have a request's adapter in host memory, and hold it until the next call, whatever vLLM evicts.

        Nothing is registered here, so that one rank that cannot read it does not leave the books of the others apart.

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
        if number in self._removed or (number not in registered and number not in self._held):
            removed = number in self._removed  # what is held serves requests that were let in before, not this one
            adapter = self.worker_manager._load_adapter(request)
            if not self.merged(adapter):
                seams.merge_packed_modules(self.manager, adapter)
            with self.with_modules():
                self._dry_run(0, adapter, strict=False)
            if removed and number in registered:
                seams.remove_adapter(self.manager, number)
            self._held[number] = adapter
        elif number in registered:
            self._held[number] = registered[number]
        return self._to_be_read_again(request)

    def _to_be_read_again(self, request: Any) -> bool:
        """What ``load_inplace`` asks for, of an adapter that is there.

        A server sends it with every request of a name that it has loaded so. For each path it counts when it first
        comes, and when files have changed that serve: an update that came in between stays.
        """
        if not getattr(request, "load_inplace", False) or not seams.is_lora_request(request):
            return False
        number, now = request.lora_int_id, fingerprint(request.lora_path)
        source, path = self._sources.get(number), str(diagnosis.local_folder(request.lora_path))
        if source is not None and source.request.lora_path == path:
            return bool(now) and now != source.files
        again = bool(now) and self._inplace.get(number) != path
        if again:
            self._wanted[number] = path
        return again

    def held(self) -> list[int]:
        """Ids of the adapters that a step will find."""
        return [number for number in self._held if number not in self._removed]

    def forget(self, number: int) -> None:
        """The user has removed the adapter. Requests that need it go on with it, no other is let in."""
        if number in self._held:
            self._removed.add(number)
        self._forget_number(number)
        for name in [name for name, known in self.numbers.items() if known == number]:
            self._forget_name(name)

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
        """For what looks at wrappers but does not write to them. Such blocks may lie in one another."""
        if not self.unmapped or self._lent:
            yield
            return
        seams.give_modules(self.manager, self._modules)
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
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
        undo = None
        try:
            if not _same(staged.adapter, current):
                undo = self._install(staged, activate=False)
        except Exception as error:
            problem = f"its files have changed, and {type(error).__name__}: {error}"
        if not seams.true_on_all_ranks(problem is None):
            if undo is not None:
                undo()
            self.broken[number] = problem or f"its files have changed, and {FOLLOWS}"
            self._unreadable.add(number)
        elif undo is None:
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
        folder = diagnosis.local_folder(seams.adapter_folder(request.lora_path))
        request = seams.at_folder(request, str(folder))
        files = fingerprint(request.lora_path)
        config = diagnosis.peft_config(request.lora_path)
        if unfit := diagnosis.unfit_settings(config, seams.peft_settings()):
            raise ValueError(f"adapter_config.json: {'; '.join(unfit)}")
        if unfit := diagnosis.unfit_dtypes(request.lora_path):
            raise ValueError(f"{_first(unfit)}; float16, bfloat16, float32 or float64 is needed")
        adapter = self._read(request, self.worker_manager.load_unnoted)
        with self.with_modules():
            for module, weights in adapter.loras.items():
                _check_pair(module, weights, seams.experts(self.manager, module))
        for module, whole in seams.whole_modules(adapter).items():
            _check_finite(module, weight=whole.weight, bias=whole.bias)
        seams.merge_packed_modules(self.manager, adapter)
        with self.with_modules():
            if lost := seams.modules_without_a_place(self.manager, adapter):
                raise ValueError(f"the model has no place for {_first(lost)}")
            self._dry_run(0, adapter, strict=True)
        return Staged(name, adapter, Source(request, files) if lasting else None)

    def discard(self, token: str) -> None:
        self._staged.pop(token, None)

    def commit(self, token: str, together: bool = False) -> int | str:
        """Swap a staged adapter in: into the host registry, and into its slot if it has one or one can be had.

        Args:
            together: whether all ranks are called, so that they can agree: all swap, or all keep what they had.

        Returns:
            The adapter's version; 0 if its id has gone to another name since it was staged, or why it could not be
            swapped in: then nothing was changed.
        """
        problem, undo, taken, name = None, None, False, ""
        try:  # whatever a rank lacks, it has to take part in the decision
            staged = self._staged.pop(token)
            name, number = staged.name, staged.adapter.id
            taken = any(known == number for other, known in self.numbers.items() if other != name)
            taken = taken and number in seams.registered(self.manager)
            if not taken:
                undo = self._install(staged)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not (seams.true_on_all_ranks(undo is not None) if together else undo is not None):
            if undo is not None:
                undo()
            return 0 if taken else problem or FOLLOWS
        self._name(name, number)
        self.versions[name] = self.versions.get(name, self._forgotten) + 1
        return self.versions[name]

    def _install(self, staged: Staged, activate: bool = True) -> Callable[[], None]:
        """Put a checked adapter into the host registry, and into its slot.

        Returns:
            What brings back all that was there before.

        Raises:
            Exception: it could not be written, and what was there before is back.
        """
        number = staged.adapter.id
        before = seams.registered(self.manager).get(number)
        active = number in seams.slots(self.manager)
        tables: list[dict[int, Any]] = [self._sources, self._without_files, self._homes, self.broken, self._held]
        entries = [table.get(number) for table in tables]

        def undo() -> None:
            for table, entry in zip(tables, entries, strict=True):
                table.pop(number, None)
                if entry is not None:
                    table[number] = entry
            self._unwrite(number, before, active)

        try:
            self._put(staged, activate)
        except Exception:
            undo()
            raise
        return undo

    def _put(self, staged: Staged, activate: bool) -> None:
        number = staged.adapter.id
        seams.register_adapter(self.manager, staged.adapter)
        for table in (self._sources, self._without_files, self._homes, self.broken):
            table.pop(number, None)
        if staged.source is None:
            self._without_files[number] = staged.adapter
        else:
            self._sources[number] = staged.source
            self._homes[number] = staged.source.request
            if self._wanted.pop(number, None) == (path := staged.source.request.lora_path):
                self._inplace[number] = path
        self._removed.discard(number)
        if number in self._held:
            self._held[number] = staged.adapter
        slots = seams.slots(self.manager)
        if number in slots:
            self._writes.pop(slots.index(number), None)
            if self.unmapped:
                self._pending.add(slots.index(number))
            else:
                seams.write_slot(self.manager, slots.index(number), staged.adapter)
        elif activate:
            seams.activate_if_possible(self.manager, number)

    def _unwrite(self, number: int, before: Any, active: bool) -> None:
        """Give an adapter's place in registry and slots back to what was `before`; None if there was nothing."""
        slots = seams.slots(self.manager)
        index = slots.index(number) if number in slots else None
        if before is not None and seams.registered(self.manager).get(number) is not before:
            seams.register_adapter(self.manager, before)
        if before is None:
            seams.remove_adapter(self.manager, number)
        elif index is not None and not active:
            seams.deactivate_adapter(self.manager, number)
        if index is None:
            return
        self._writes.pop(index, None)
        if self.unmapped:
            self._pending.add(index)
            return
        self.lora.clear_slot(index)
        if active:
            try:
                seams.write_slot(self.manager, index, before)
            except Exception as error:
                self.broken[number] = f"an update broke off, and {type(error).__name__}: {error}"
                self.lora.clear_slot(index)

    def known(self, name: str | None = None) -> dict[str, dict[str, int]]:
        """Id and version by name: of one, if it is known, or of all."""
        numbers = {each: number for each, number in self.numbers.items() if name in (None, each)}
        return {
            each: {"lora_int_id": number, "version": self.versions.get(each, 0)} for each, number in numbers.items()
        }


class ReadsAdapters:
    """Mixed in before the class of a worker's ``WorkerLoRAManager``."""

    lora_reload: Adapters

    def _load_adapter(self, lora_request: Any) -> Any:
        return self.lora_reload.read(lora_request, super()._load_adapter)  # type: ignore[misc]

    def load_unnoted(self, lora_request: Any) -> Any:
        return super()._load_adapter(lora_request)  # type: ignore[misc]

    def _apply_adapters(self, adapter_requests: Any) -> None:
        with self.lora_reload.step():
            super()._apply_adapters(adapter_requests)  # type: ignore[misc]

    def add_adapter(self, adapter_request: Any) -> bool:
        self.lora_reload.adding(adapter_request.lora_int_id)
        added: bool = super().add_adapter(adapter_request)  # type: ignore[misc]
        return added

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


def _owned(tensor: Any, ours: bool) -> Any:
    """A tensor, or each of a list, in memory of its own: others may write to what a request brings, or to a file.

    Args:
        ours: whether vLLM has read a file, so that what is pinned is a copy.
    """
    if isinstance(tensor, (list, tuple)):
        return [_owned(each, ours) for each in tensor]
    return tensor if tensor is None or (ours and tensor.is_pinned()) else tensor.clone()  # vLLM pins it later


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _check_pair(module: str, weights: Any, experts: int | None) -> None:
    """What vLLM takes on trust of one module of an adapter that has just been read.

    Args:
        experts: how many lie side by side in flat tensors; None if the module is none of experts, 0 if that is unknown.

    Raises:
        ValueError: one of the two tensors is missing, their ranks are not that of the config, or a value is not finite,
            also after scaling.
    """
    a, b = weights.lora_a, weights.lora_b
    if a is None or b is None:
        raise ValueError(f"{module} has lora_{'B' if a is None else 'A'} but no lora_{'A' if a is None else 'B'}")
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"{module}: lora_A of shape {list(a.shape)} and lora_B of {list(b.shape)} are no matrices")
    if a.shape[-2] != b.shape[-1]:
        raise ValueError(f"{module}: lora_A has rank {a.shape[-2]}, lora_B has rank {b.shape[-1]}")
    rank = weights.rank * (experts if experts is not None and a.ndim == 2 else 1)
    told = rank or weights.rank
    if a.shape[-2] != rank and (rank or a.shape[-2] % told):
        raise ValueError(f"{module} has tensors of rank {a.shape[-2]}, and adapter_config.json says {told}")
    _check_finite(module, weights.scaling, lora_A=a, lora_B=b)


def _check_finite(module: str, scaling: float = 1.0, /, **tensors: torch.Tensor | None) -> None:
    """`scaling` is what vLLM multiplies ``lora_B`` by."""
    for name, tensor in tensors.items():
        extremes = torch.aminmax(tensor) if tensor is not None else ()  # NaN is both the least and the greatest
        if not all(extreme.isfinite() for extreme in extremes):
            raise ValueError(f"{module}: {name} has values that are not finite")
        if name == "lora_B" and not all((extreme * scaling).isfinite() for extreme in extremes):
            raise ValueError(f"{module}: {name} scaled by {scaling} has values that are not finite")


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
