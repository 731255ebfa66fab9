"""Reloading a checkpoint without its loader: bytes go from the files straight to where the load at start-up put them.

While the engine loads for the first time, a `LoadRecorder` notes which elements of which checkpoint tensor are copied
to which region of which parameter or buffer. A `LoadPlan` of it serves later loads of the same folder: headers are read
anew, so the values may have changed and the files may be cut otherwise, and `Ring` fills the running tensors in place.

A plan has to be exact, or there is none. Tensors whose values the loader computes with (``weight + 1``, a scale read
as a number, shards joined by ``cat``) are its *rest* and go through ``model.load_weights``. There is no plan, and the
engine loads, where vLLM derives something from loaded tensors (quantization, repacking, most MLA), replaces them, or
changes them in place; where they are not all in plain safetensors files; or where most would be rest. What is computed
outside of PyTorch operators (numpy, a Triton kernel called directly) is not seen; none of vLLM's loaders does so
without making new parameters.
"""

from __future__ import annotations

import functools
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.multiprocessing.reductions import StorageWeakRef

from .base_view import checkpoint_name
from .coverage import Coverage, FirstLoad, Identities, Region, WriteRecorder, identity, region
from .files import open_regular
from .ring import Piece, Ring
from .snapshot import FileStates, file_state, file_states
from .tensors import SAFETENSORS_DTYPES, written_by

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

_HEADER_LIMIT = 100_000_000  # bytes, as the safetensors library has it
_MOST_REST = 0.5  # of the bytes; with more, reading the others early gains little


class NoReplay(Exception):
    """Why the engine's loader has to load, in words. Nothing was written."""


class ReplayError(Exception):
    """A replay broke off, and may have written something."""


# --- Files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its bytes are ``[offset, offset + nbytes)``, row by row."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Signature = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Checkpoint:
    """What the headers of safetensors files say.

    Args:
        files: as the engine's loader chooses them.

    Attributes:
        tensors: by name.

    Raises:
        NoReplay: the safetensors library refuses a file, or two have the same name.
        OSError: a file cannot be read.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.tensors: dict[str, Stored] = {}
        self._states: FileStates = {}
        for file in dict.fromkeys(files):
            with open_regular(file) as opened:
                self._states[file] = file_state(opened)
                for name, stored in _header(file, opened, self._states[file][0]):
                    if name in self.tensors:
                        raise NoReplay(f"{name} is in {self.tensors[name].file} and again in {file}")
                    self.tensors[name] = stored

    def signature(self) -> Signature:
        """Everything but the bytes and where they are."""
        return {name: (stored.dtype, stored.shape) for name, stored in self.tensors.items()}

    def ensure_unchanged(self) -> None:
        """Raises:
        OSError: a file is not what it was when this was made: what was read since may be anything.
        """
        now = file_states(self._states)
        for file, state in self._states.items():
            if now[file] != state:
                raise OSError(f"{file} was changed while it was read")


def _header(file: Path, opened: IO[bytes], size: int) -> list[tuple[str, Stored]]:
    """What a file of `size` bytes has: 8 bytes with the length of the header, the header in JSON, then the tensors.

    The library reads the header, so that nothing is taken that it refuses, nor otherwise: of a copy, in a file that is
    as long and has a hole for the tensors, since it maps files, and to cut a mapped one ends the process.
    """
    length = int.from_bytes(head := _read(opened, 8), "little")
    if len(head) < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise NoReplay(f"{file} is too short for its header")
    start, found = 8 + length, list[tuple[str, Stored]]()
    with tempfile.TemporaryFile(buffering=0) as copy:
        for part in (head, _read(opened, length)):
            while part:
                part = part[copy.write(part) :]
        try:
            copy.truncate(size)
            with safe_open(f"/proc/self/fd/{copy.fileno()}", framework="np") as content:
                for name in content.offset_keys():  # the library lets tensors neither overlap nor lie apart
                    tensor = content.get_slice(name)
                    stored = Stored(file, start, SAFETENSORS_DTYPES[tensor.get_dtype()], tuple(tensor.get_shape()))
                    found.append((name, stored))
                    start += stored.nbytes
        except AttributeError:
            raise NoReplay("this release of safetensors does not tell the order of tensors: install 0.6.2") from None
        except (SafetensorError, KeyError, MemoryError, OSError) as damage:
            raise NoReplay(f"{file} has a damaged header: {type(damage).__name__}: {damage}") from damage
    if start != size:
        raise NoReplay(f"{file} has a damaged header: its tensors have {start} bytes and it has {size}")
    return found


def _read(opened: IO[bytes], nbytes: int) -> bytes:
    """As many bytes, or fewer at the end of the file."""
    content = bytearray()
    while len(content) < nbytes and (more := opened.read(nbytes - len(content))):
        content += more
    return bytes(content)


# --- Watching the first load --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Elements of a running tensor's storage, as ``Tensor.as_strided`` has them."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    @property
    def region(self) -> Region:
        return (self.dtype, *region(self.offset, self.shape, self.stride))

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        if 0 in self.shape:
            return 0, 0
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Copied:
    """Elements of checkpoint tensor `name` were copied to `place`.

    Attributes:
        offset: of the first, in bytes from the tensor's first.
        dtype: how the bytes were read.
        stride: in elements, of `place`'s shape.
    """

    place: Place
    name: str
    offset: int
    dtype: torch.dtype
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Filled:
    """A constant was written to `place`."""

    place: Place
    value: Any


@dataclass(frozen=True)
class Computed:
    """Something that was computed from checkpoint tensors `names` was written to `place`."""

    place: Place
    names: frozenset[str]


Event = Copied | Filled | Computed


@dataclass(frozen=True)
class _Given:
    """A span of memory that holds a checkpoint tensor as it is in the file, or a part of it, or a conversion.

    Attributes:
        storage: tells whether the memory is still in use.
        start: first byte in the storage.
        stop: the one after the last.
        name: of the checkpoint tensor.
        origin: byte of the checkpoint tensor that `start` is, or was converted from.
        dtype: of the tensor in the file.
        converted: to this dtype, or None.
    """

    storage: StorageWeakRef
    start: int
    stop: int
    name: str
    origin: int
    dtype: torch.dtype
    converted: torch.dtype | None = None


_aten = torch.ops.aten
# Their results depend on shapes only.
_SHAPE_ONLY = {"empty_like", "new_empty", "new_empty_strided", "is_same_size", "is_pinned", "new_full", "full_like"}
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_VIEWS = {  # never copies
    *("alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice"),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
}
_FILLS = {"fill_", "zero_"}
_CONVERSIONS = {"clone", "_to_copy", "to", "contiguous"}


class ReadRecorder(WriteRecorder):
    """A `WriteRecorder` that also notes what is read of the watched storages, and constants that are written to them.

    Attributes:
        reads: operators that read watched storages, by storage.
        events: what was written, by watched storage, in order.
        changes: operators that wrote something else.
        spoiled: why no plan can be made of this, or None.
    """

    def __init__(self, watched: Iterable[int], fills: bool | None = False) -> None:
        super().__init__(watched, fills)
        self.reads: dict[int, str] = {}
        self.events: dict[int, list[Event]] = {}
        self.changes: dict[int, str] = {}
        self.spoiled: str | None = None

    def spoil(self, reason: str) -> None:
        self.spoiled = self.spoiled or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _kind(func).view:
            return out
        written = written_by(func, args, kwargs)
        if self.spoiled is None and not _is_view(written, args, out):
            try:
                self._follow(func, args, kwargs, out, written)
            except Exception as error:  # exotic tensors; start-up is not to fail for them
                self.spoil(f"{func} could not be followed: {type(error).__name__}: {error}")
        for tensor in written:
            self.note_write(func, tensor, args)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor]) -> None:
        name = _kind(func).name
        if not written and name in _SHAPE_ONLY:
            return
        if func is _aten.copy_.default and _same(args[0], args[1]):
            return
        read = [t for t in _tensors((*args, *kwargs.values())) if not any(t is each for each in written)]
        if name not in _CONSTANTS:
            for tensor in read:
                if (key := identity(tensor)) in self._regions:
                    self.reads.setdefault(key, str(func))
        self._follow_values(func, args, kwargs, out, written, read)

    def _follow_values(
        self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor], read: list[torch.Tensor]
    ) -> None:
        """What `func` did with the values that it read."""
        for tensor in written:
            if (key := identity(tensor)) in self._regions:
                if _kind(func).name in _FILLS and not read:
                    self._filled(key, tensor, args[1] if len(args) > 1 else 0)
                else:
                    self.changes.setdefault(key, str(func))

    def _filled(self, key: int, target: torch.Tensor, value: Any) -> None:
        self.events.setdefault(key, []).append(Filled(Place.of(target), value))


class LoadRecorder(ReadRecorder):
    """A `ReadRecorder` for a load, which notes also where the values come from.

    Attributes:
        names: dtype and shape of every checkpoint tensor that was given to the loader, in its order.
        loose: checkpoint tensors that were used in other ways than to copy them to watched storages.
    """

    def __init__(self, watched: Iterable[int]) -> None:
        super().__init__(watched)
        self.names: Signature = {}
        self.loose: set[str] = set()
        self._given: dict[int, list[_Given]] = {}
        self._computed: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        self._constant: dict[int, tuple[StorageWeakRef, int]] = {}

    def for_processing(self) -> ReadRecorder:
        self._finish()
        return ReadRecorder(self._regions, fills=True)

    def given(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that a load gets, noted as it takes them."""
        for name, tensor in weights:
            if name in self.names:
                self.spoil(f"{name} was given to the loader twice")
            elif not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
                self.spoil(f"{name} was not given to the loader as a contiguous tensor")
            else:
                self.names[name] = tensor.dtype, tuple(tensor.shape)
                self._give(tensor, name, 0, tensor.dtype)
            yield name, tensor
            del tensor

    def _finish(self) -> None:
        """The load is over: a checkpoint tensor that is in use even now has become a part of the model."""
        for known in self._given.values():
            self.loose |= {given.name for given in known if not given.storage.expired()}
        self._given.clear()
        self._computed.clear()
        self._constant.clear()

    def _give(
        self, tensor: torch.Tensor, name: str, origin: int, dtype: torch.dtype, converted: torch.dtype | None = None
    ) -> None:
        start = int(tensor.storage_offset()) * tensor.itemsize
        stop = start + tensor.numel() * tensor.itemsize
        given = _Given(StorageWeakRef(tensor.untyped_storage()), start, stop, name, origin, dtype, converted)
        self._given.setdefault(identity(tensor), []).append(given)

    def _follow_values(
        self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor], read: list[torch.Tensor]
    ) -> None:
        if func is _aten.copy_.default and isinstance(args[1], torch.Tensor):
            self._follow_copy(args[0], args[1])
        elif _kind(func).name in _FILLS:
            self._follow_fill(args[0], args[1] if len(args) > 1 else 0)
        elif (value := _CONSTANTS.get(_kind(func).name)) is not None:
            self._constant[identity(out)] = StorageWeakRef(out.untyped_storage()), value
        elif written or not (_kind(func).name in _CONVERSIONS and len(read) == 1 and self._converted(read[0], out)):
            self._compute(self._names_in(read), [*written, *_tensors((out,))])
            if any(identity(tensor) in self._regions for tensor in written):
                self.spoil(f"loaded tensors are changed in place, by {func}")

    def _follow_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if (key := identity(target)) not in self._regions:
            self._compute(self._names_in([source]), [target])
            return
        place = Place.of(target)
        given = self._find(source)
        if given is not None and given.converted in (None, target.dtype):
            at, dtype = int(source.storage_offset()) * source.itemsize - given.start, source.dtype
            if given.converted is not None:
                at, dtype = at // source.itemsize * given.dtype.itemsize, given.dtype
            stride = source.expand(target.shape).stride()
            self.events.setdefault(key, []).append(Copied(place, given.name, given.origin + at, dtype, stride))
        elif names := self._names_in([source]):
            self.events.setdefault(key, []).append(Computed(place, names))
        elif (constant := self._constant.get(identity(source))) is not None:
            self._filled(key, target, constant[1])
        else:
            self.spoil("the loader writes values that are not in the checkpoint")

    def _follow_fill(self, target: torch.Tensor, value: Any) -> None:
        names = self._names_in([value] if isinstance(value, torch.Tensor) else [])
        if (key := identity(target)) not in self._regions:
            self._compute(names, [target])
        elif names:
            self.events.setdefault(key, []).append(Computed(Place.of(target), names))
        else:
            self._filled(key, target, value.item() if isinstance(value, torch.Tensor) else value)

    def _compute(self, names: frozenset[str], results: Iterable[torch.Tensor]) -> None:
        """`names`, and what `results` may have held of others, are now mixed in `results`."""
        self.loose |= names
        for tensor in results:
            key = identity(tensor)
            self._constant.pop(key, None)
            if key not in self._regions and (mixed := names | self._names_in([tensor])):
                self.loose |= mixed
                self._computed[key] = StorageWeakRef(tensor.untyped_storage()), mixed

    def _find(self, tensor: torch.Tensor) -> _Given | None:
        """The checkpoint tensor that all elements of a tensor are of."""
        known = self._given.get(identity(tensor))
        if known is None:
            return None
        first, end = Place.of(tensor).span
        for given in reversed(known):
            if given.start <= first and end <= given.stop:
                return given if given.converted in (None, tensor.dtype) else None
        return None

    def _names_in(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Checkpoint tensors that these have something of."""
        names: set[str] = set()
        for tensor in tensors:
            key = identity(tensor)
            if (known := self._given.get(key)) is not None:
                found = self._find(tensor)
                names |= {found.name} if found is not None else {given.name for given in known}
            if key in self._computed:
                names |= self._computed[key][1]
            names |= _names_of(self.events.get(key, ()))
        return frozenset(names)

    def _converted(self, tensor: torch.Tensor, out: Any) -> bool:
        """Take a copy, in another dtype or place, for what it was copied from, if elements lie in the same order."""
        given = self._find(tensor)
        if given is None or not isinstance(out, torch.Tensor) or not (tensor.is_contiguous() and out.is_contiguous()):
            return False
        at = int(tensor.storage_offset()) * tensor.itemsize - given.start
        if given.converted is None:
            converted = out.dtype if out.dtype != tensor.dtype else None
            self._give(out, given.name, given.origin + at, tensor.dtype, converted)
            return True
        if out.dtype != given.converted:
            return False
        origin = given.origin + at // tensor.itemsize * given.dtype.itemsize
        self._give(out, given.name, origin, given.dtype, given.converted)
        return True


@dataclass(frozen=True)
class _Kind:
    """Of operators: the name without overload, and whether it writes nothing and its result is always a view."""

    name: str
    view: bool


@functools.cache
def _kind(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    if schema is None:
        return _Kind(str(func), False)
    name = schema.name.rpartition("::")[2]
    return _Kind(name, not schema.is_mutable and schema.name == f"aten::{name}" and name in _VIEWS)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _same(target: torch.Tensor, source: Any) -> bool:
    """Whether one is the other: vLLM copies a parameter to itself that it might have replaced, but did not."""
    if not isinstance(source, torch.Tensor) or identity(target) != identity(source):
        return False
    return Place.of(target) == Place.of(source)


def _is_view(written: list[torch.Tensor], args: Any, out: Any) -> bool:
    """Whether an operator only looked at its first argument in another way. Some do so or copy, as it comes."""
    if written or not args or not isinstance(args[0], torch.Tensor):
        return False
    if isinstance(out, (list, tuple)):
        out = out[0] if out else None
    return isinstance(out, torch.Tensor) and (out is args[0] or identity(out) == identity(args[0]))


# --- The plan -----------------------------------------------------------------------------------------------------


class LoadPlan:
    """Where the bytes of a checkpoint go.

    Attributes:
        reason: why it cannot be used, in a sentence; None if it can.
        names: checkpoint tensors that it copies itself.
        rest: those that go through the model's loader, in the order of the first load.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.names: set[str] = set()
        self.rest: list[str] = []
        self._signature: Signature = {}
        self._identities: Identities | None = None  # what the numbers below mean
        self._names: dict[int, str] = {}
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        self._copies: dict[int, list[Copied]] = {}
        self._fills: dict[int, list[Filled]] = {}

    @property
    def usable(self) -> bool:
        return self.reason is None

    def state(self) -> dict[str, Any]:
        """``usable``, ``reason`` why not, and how many ``tensors`` it copies and how many are its ``rest``."""
        return {"usable": self.usable, "reason": self.reason, "tensors": len(self.names), "rest": len(self.rest)}

    def log(self) -> None:
        if self.reason is not None:
            logger.info("reload_weights will use the engine's loader: %s", self.reason)
        else:
            logger.info(
                "reload_weights will copy %d tensors of the checkpoint itself and leave %d to the engine's loader",
                len(self.names),
                len(self.rest),
            )

    @classmethod
    def of(
        cls, first: FirstLoad | None, coverage: Coverage, device: torch.device, files: Callable[[], Iterable[Path]]
    ) -> LoadPlan:
        """Make a plan of the load at start-up, if there can be one.

        Args:
            first: the load, watched with `LoadRecorder`.
            coverage: says what a load has to bring.
            device: where all tensors are to be.
            files: gives the checkpoint's files, or raises `NoReplay`.
        """
        plan = cls()
        try:
            plan._make(first, coverage, device, files)
        except Exception as error:
            plan.reason = str(error) if isinstance(error, NoReplay) else f"{type(error).__name__}: {error}"
        return plan

    def _make(
        self, first: FirstLoad | None, coverage: Coverage, device: torch.device, files: Callable[[], Iterable[Path]]
    ) -> None:
        if first is None or not isinstance(first.loaded_by, LoadRecorder) or not first.loaded_by.names:
            raise NoReplay("the load at start-up could not be watched")
        loaded, processed = first.loaded_by, first.processed_by
        if not isinstance(processed, ReadRecorder):
            raise NoReplay("the step after the load at start-up could not be watched")
        if reason := loaded.spoiled or processed.spoiled:
            raise NoReplay(reason)
        prefixes = {module: prefix for prefix, module in first.model.named_modules()}
        for module, name, key in first.owners:
            prefix = prefixes.get(module, type(module).__name__)
            self._names.setdefault(key, checkpoint_name(f"{prefix}.{name}" if prefix else name))
        names, self._identities = self._names, first.identities
        written = first.written.keys() | loaded.events.keys()  # with those that hold constants alone
        for key in written:
            if key in processed.reads:
                raise NoReplay(f"{names[key]} is read by {processed.reads[key]} after it was loaded")
            if key in processed.changes:
                raise NoReplay(f"{names[key]} is changed by {processed.changes[key]} after it was loaded")
        self._owners = {key: (module, name) for module, name, key in first.owners if key in written}
        for key in written:
            if self._storage(key).device.type != device.type:
                raise NoReplay(f"{names[key]} is not on {device}")
        if absent := sorted(name for key, name in coverage.needed.items() if key not in first.written):
            raise NoReplay(f"{absent[0]} is made from what is loaded")
        self._resolve(loaded, processed)
        checkpoint = Checkpoint(files())
        self._signature = checkpoint.signature()
        for name, seen in loaded.names.items():
            if self._signature.get(name) != seen:
                raise NoReplay(f"{name} as it was loaded is not in the checkpoint's files")
        sizes = [sum(checkpoint.tensors[name].nbytes for name in some) for some in (self.names, self.rest)]
        if sizes[1] > _MOST_REST * sum(sizes):
            raise NoReplay(f"the loader computes with most of the weights ({self.rest[0]}, ...)")

    def _resolve(self, loaded: LoadRecorder, processed: ReadRecorder) -> None:
        """Sort what was written into constants, copies and rest."""
        rest = set(loaded.loose)
        final: dict[int, list[Event]] = {}
        hidden: dict[int, set[str]] = {}  # whose copies others have replaced
        every = {key: events + processed.events.get(key, []) for key, events in loaded.events.items()}
        for key, events in every.items():
            last: dict[Region, Event] = {}
            hidden[key] = set()
            for event in events:
                old = last.pop(event.place.region, None)
                if isinstance(old, Copied) and getattr(event, "name", None) != old.name:
                    hidden[key].add(old.name)
                last[event.place.region] = event
            final[key] = list(last.values())
        clean = {key for key, events in final.items() if _in_any_order(events)}
        names = {key: _names_of(events) | hidden[key] for key, events in final.items()}
        while True:
            # What a name of the rest writes comes after all copies, so nothing else may be meant to come after it.
            clean = {key for key in clean if not (hidden[key] & rest)}
            more = set().union(*(names[key] for key in final.keys() - clean)) - rest
            if not more:
                break
            rest |= more
        for key in final.keys() - clean:
            if _overwritten_by_constants(every[key]):
                raise NoReplay(f"{self._names[key]} gets a constant where something else was loaded")
        self.rest = [name for name in loaded.names if name in rest]
        self._copies = {key: [e for e in final[key] if isinstance(e, Copied)] for key in clean}
        self._fills = {key: [e for e in events if isinstance(e, Filled)] for key, events in final.items()}
        self.names = {copied.name for copies in self._copies.values() for copied in copies} - rest

    def _storage(self, key: int) -> torch.UntypedStorage:
        module, name = self._owners[key]
        tensor: torch.Tensor | None = module._parameters.get(name)
        tensor = module._buffers.get(name) if tensor is None else tensor
        if tensor is None or tensor.is_meta or identity(tensor) != key:
            raise NoReplay(f"{self._names[key]} was replaced after it was loaded")
        return tensor.untyped_storage()

    def replay(self, files: Iterable[Path]) -> Replay:
        """A load of the checkpoint in `files`; nothing is written yet.

        Raises:
            NoReplay: it is not laid out as the one at start-up, or the running tensors are not those of then.
            OSError: a file cannot be read.
        """
        if self.reason is not None:
            raise NoReplay(self.reason)
        checkpoint = Checkpoint(files)
        if (signature := checkpoint.signature()) != self._signature:
            names = sorted(
                name
                for name in signature.keys() | self._signature.keys()
                if signature.get(name) != self._signature.get(name)
            )
            raise NoReplay(f"the checkpoint is not laid out as at start-up: {', '.join(names[:3])}")
        storages = {key: self._storage(key) for key in self._owners}
        fills = [(e.place.in_storage(storages[key]), e.value) for key, some in self._fills.items() for e in some]
        pieces: dict[Path, list[Piece]] = {}
        for key, copies in self._copies.items():
            for copied in copies:
                stored, target = checkpoint.tensors[copied.name], copied.place.in_storage(storages[key])
                same_order = region(0, target.shape, copied.stride) == region(0, target.shape, target.stride())
                plain = same_order and target.is_contiguous() and copied.dtype == target.dtype
                piece = Piece(stored.offset + copied.offset, target)
                if not plain:
                    piece = replace(piece, stride=copied.stride, dtype=copied.dtype)
                pieces.setdefault(stored.file, []).append(piece)
        return Replay(checkpoint, fills, pieces, self.rest)


def _names_of(events: Iterable[Event]) -> set[str]:
    names: set[str] = set()
    for event in events:
        if isinstance(event, Copied):
            names.add(event.name)
        elif isinstance(event, Computed):
            names |= event.names
    return names


def _in_any_order(events: Sequence[Event]) -> bool:
    """Whether constants first and then all copies in any order give what these writes to one storage gave."""
    if any(isinstance(event, Computed) for event in events):
        return False
    first = next((number for number, event in enumerate(events) if isinstance(event, Copied)), len(events))
    return _disjoint([event.place for event in events[first:]])


def _overwritten_by_constants(events: Sequence[Event]) -> bool:
    return any(
        isinstance(event, Filled)
        and any(not _disjoint([e.place, event.place]) for e in events[:number] if not isinstance(e, Filled))
        for number, event in enumerate(events)
    )


def _disjoint(places: Iterable[Place]) -> bool:
    ordered = sorted((place for place in places if 0 not in place.shape), key=lambda place: place.span)
    if all(left.span[1] <= right.span[0] for left, right in pairwise(ordered)):
        return True
    if len({place.dtype.itemsize for place in ordered}) != 1:
        return False
    size = max(place.span[1] for place in ordered) // ordered[0].dtype.itemsize
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")  # columns side by side, say
    for place in ordered:
        elements = taken.as_strided(place.shape, place.stride, place.offset)
        if elements.any():
            return False
        elements.fill_(True)
    return True


@dataclass(frozen=True)
class Replay:
    """One load by a plan, ready to run."""

    checkpoint: Checkpoint
    fills: list[tuple[torch.Tensor, Any]]
    pieces: Mapping[Path, list[Piece]]
    rest: Sequence[str]

    def run(
        self, ring: Ring, load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any], coverage: Coverage
    ) -> dict[str, Any]:
        """Fill the running tensors. The caller is in a `WorkerState.loading` block.

        Args:
            ring: reads the files.
            load: the model's ``load_weights``, for the rest.
            coverage: is told what was written.

        Returns:
            ``source`` (``checkpoint``), ``bytes`` that were written, ``seconds`` and ``verify_seconds`` (0).

        Raises:
            ReplayError: whatever went wrong.
        """
        start = time.perf_counter()
        try:
            for target, value in self.fills:
                target.fill_(value)
            coverage.wrote(target for target, _ in self.fills)
            ring.read(self.pieces)
            coverage.wrote(piece.target for pieces in self.pieces.values() for piece in pieces)
            if self.rest:
                with ring.device:
                    load(self._rest())
            self.checkpoint.ensure_unchanged()
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        nbytes = sum(piece.target.nbytes for pieces in self.pieces.values() for piece in pieces)
        nbytes += sum(self.checkpoint.tensors[name].nbytes for name in self.rest)
        seconds = time.perf_counter() - start
        logger.info("Base weights read from the checkpoint, %.1f GB/s", nbytes / seconds / 1e9)
        return {"source": "checkpoint", "bytes": nbytes, "seconds": seconds, "verify_seconds": 0.0}

    def _rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.rest:
            with safe_open(self.checkpoint.tensors[name].file, framework="pt") as content:
                yield name, content.get_tensor(name)
