"""Snapshots: a rank's base weights in kernel format in a local file, read back without loader or model code.

A snapshot is a safetensors file, one entry for each storage in the weights pool, and a manifest (JSON) beside it that
says which tensors lie in each storage and how, what engine it was, and the digest of every storage. It is used only if
all of that fits, digests included: they are compared with what the engine has in memory, so neither a file that
changed nor weights that changed can be mistaken for the right ones.

      folder/<model>-<key>/tp0of2-pp0of1.json                      the manifest; written last, renamed into place
      folder/<model>-<key>/tp0of2-pp0of1-<digest>.safetensors      what it names

Files are written under another name, flushed and renamed. Engines on one host share them; one writes, under a lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from .checksum import BLOCK_BYTES, digest_of_blocks, digests
from .errors import SnapshotError
from .ring import PAGE, EndOfFileError, Piece, Pinned, Ring
from .tensors import SAFETENSORS_DTYPES, storage_key, whole_storage

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

FORMAT = 1
_WRITE = 16 << 20  # bytes of one write
_DIGITS = 16  # of a fingerprint, in the name of a file
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Engine:
    """What a snapshot belongs to.

    Attributes:
        model: name or path of the model, as the user gave it.
        release: of vLLM.
        dtype: of the model.
        quantization: its method, or None.
        place: rank and size by kind of parallelism, ``{"tp": [0, 2], "pp": [0, 1]}``.
    """

    model: str
    release: str
    dtype: str
    quantization: str | None
    place: dict[str, list[int]]

    def folder(self, parent: Path) -> Path:
        """Where snapshots of this engine's ranks lie. Not by release: a newer one takes the place of an older one."""
        sizes = {kind: size for kind, (_, size) in self.place.items()}
        identity = json.dumps([self.model, self.dtype, self.quantization, sizes])
        slug = re.sub(r"[^\w.-]+", "-", Path(self.model).name) or "model"
        return parent / f"{slug}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    @property
    def rank(self) -> str:
        """Name of this rank's files."""
        return "-".join(f"{kind}{rank}of{size}" for kind, (rank, size) in self.place.items())


@dataclass
class Storage:
    """Memory of base tensors.

    Attributes:
        memory: all of it, uint8, ``[bytes]``.
        tensors: by name, as without LoRA; several where they are tied or views.
        loaded: whether a load brings it: then its bytes have to be those of the snapshot.
        kept: whether vLLM or this package keep it on the host over a sleep: then it is not restored.
    """

    memory: torch.Tensor
    tensors: dict[str, torch.Tensor]
    loaded: bool = True
    kept: bool = False

    @property
    def name(self) -> str:
        return next(iter(self.tensors))


def loaded(found: Sequence[Storage]) -> list[Storage]:
    """Those that a load brings."""
    return [storage for storage in found if storage.loaded]


def storages(
    named: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    without: Set[int],
    kept: Set[int],
    brought: Set[int] = frozenset(),
) -> list[Storage]:
    """Storages of base tensors, in the order in which their first tensor comes.

    Args:
        named: the tensors, with any number of names each.
        device: those elsewhere are left out.
        without: storages (`storage_key`) that are not base tensors'.
        kept: storages that are kept on the host over a sleep.
        brought: those of them that a load brings all the same.
    """
    found: dict[int, Storage] = {}
    for name, tensor in named:
        if tensor.device.type != device.type or not tensor.untyped_storage().nbytes():
            continue
        key = storage_key(tensor)
        if key not in without:
            of_load = key not in kept or key in brought
            storage = found.setdefault(key, Storage(whole_storage(tensor.detach()), {}, of_load, key in kept))
            storage.tensors[name] = tensor
    return list(found.values())


@dataclass(frozen=True)
class Entry:
    """A storage as the manifest has it.

    Attributes:
        offset: of its first byte in the file.
        nbytes: its size.
        digest: of `checksum.digests`, in hexadecimal.
        loaded: see `Storage`. The rest is in the file for the sake of completeness only.
        tensors: name, shape, stride, dtype and storage offset (in elements) of the tensors in it.
    """

    offset: int
    nbytes: int
    digest: str
    loaded: bool
    tensors: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.tensors[0]["name"])


def _described(storage: Storage) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "storage_offset": tensor.storage_offset(),
        }
        for name, tensor in storage.tensors.items()
    ]


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    engine: what it belongs to.
    file: name of the safetensors file beside it.
    size: its size in bytes.
    mtime_ns: when it was last written.
    entries: what is in it, in order.
    fingerprint: one digest for all that a load brings.
    """

    engine: Engine
    file: str
    size: int
    mtime_ns: int
    entries: list[Entry]
    fingerprint: str = ""
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises:
        SnapshotError: it cannot be read.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if given["format"] != FORMAT:
                raise SnapshotError(f"{path} has format {given['format']}; this release reads format {FORMAT}")
            engine, entries = Engine(**given.pop("engine")), [Entry(**entry) for entry in given.pop("entries")]
            if not all(entry.name for entry in entries):
                raise ValueError("an entry has no name")
            return cls(engine=engine, entries=entries, **given)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SnapshotError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    @property
    def loaded(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.loaded]

    def digests(self) -> list[str]:
        """Of all that a load brings."""
        return [entry.digest for entry in self.loaded]

    def unlike(self, engine: Engine) -> str | None:
        """What about the engine is another than that of the snapshot."""
        for part in dataclasses.fields(Engine):
            mine, its = getattr(self.engine, part.name), getattr(engine, part.name)
            if mine != its:
                return f"it was taken with {part.name} {mine!r}, and this is {its!r}"
        return None

    def misfits(self, found: Sequence[Storage]) -> str | None:
        """What about the tensors' names, shapes and places in memory is another than in the snapshot."""
        here = loaded(found)
        if len(here) != len(self.loaded):
            return f"it has {len(self.loaded)} tensors, and this model has {len(here)}"
        for entry, storage in zip(self.loaded, here, strict=True):
            if (mine := _described(storage)) != entry.tensors or storage.memory.numel() != entry.nbytes:
                return f"{entry.name} is {entry.tensors}, {entry.nbytes} bytes there, and {mine} here"
        return None

    def differing(self, current: Sequence[str]) -> list[str]:
        """Names of tensors whose bytes are others than those in the snapshot, by the digests of all loaded ones."""
        return [entry.name for entry, digest in zip(self.loaded, current, strict=True) if entry.digest != digest]


def digests_of(found: Sequence[Storage]) -> list[str]:
    """Of every storage that a load brings, as a manifest has them."""
    return _digests(loaded(found))


def _digests(of: Sequence[Storage]) -> list[str]:
    return [f"{digest:016x}" for digest in digests([storage.memory for storage in of])]


def fingerprint(of: Iterable[str]) -> str:
    """One digest for many."""
    return hashlib.sha256("".join(of).encode()).hexdigest()


def listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


class Snapshot:
    """A manifest and its file, which is held open: another engine may put a new one in its place."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        try:
            self._open = self.file.open("rb")
        except OSError as error:
            raise SnapshotError(f"{self.file} cannot be opened: {error}") from error
        self.ensure_unchanged()

    @classmethod
    def find(cls, path: Path, engine: Engine, found: Sequence[Storage], current: Sequence[str]) -> Snapshot:
        """The snapshot whose manifest is at `path`, if it holds exactly what is in memory.

        Raises:
            SnapshotError: it does not, and why.
        """
        manifest = Manifest.read(path)
        if reason := manifest.unlike(engine) or manifest.misfits(found):
            raise SnapshotError(f"{path} is not used: {reason}")
        if differing := manifest.differing(current):
            raise SnapshotError(f"{path} is not used: other weights were loaded, {listed(differing)} differ")
        return cls(path, manifest)

    @property
    def file(self) -> Path:
        return self.path.parent / self.manifest.file

    def ensure_unchanged(self) -> None:
        """Raises:
        SnapshotError: the file is not as it was written.
        """
        stat = os.fstat(self._open.fileno())
        if (stat.st_size, stat.st_mtime_ns) != (self.manifest.size, self.manifest.mtime_ns):
            raise SnapshotError(f"{self.file} has changed since it was written")

    @property
    def in_place(self) -> bool:
        """Whether other engines find it too; somebody may have removed it."""
        try:
            return self.path.exists() and os.path.samestat(self.file.stat(), os.fstat(self._open.fileno()))
        except OSError:
            return False

    def restore(self, found: Sequence[Storage], ring: Ring) -> int:
        """Read what a load brings back into memory; the rest is kept on the host over a sleep.

        Args:
            found: the storages, as they fitted.
            ring: reads it.

        Returns:
            Bytes read.

        Raises:
            SnapshotError: the file has changed, ends too early, or its disk cannot read it.
            OSError: it cannot be read now, which is not the file's fault.
        """
        self.ensure_unchanged()
        pieces = [Piece(entry.offset, storage.memory) for entry, storage in self._lost(found)]
        try:
            ring.read({self._open: pieces})
        except OSError as error:
            if isinstance(error, EndOfFileError) or error.errno == errno.EIO:
                raise SnapshotError(f"{self.file} cannot be read: {error}") from error
            raise
        self.ensure_unchanged()
        return sum(piece.nbytes for piece in pieces)

    def check(self, found: Sequence[Storage], every: int = 1, first: int = 0) -> None:
        """Compare what `restore` has written with the snapshot's digests.

        Args:
            found: the storages.
            every: 1 for all of them, n for every n-th.
            first: where to begin.

        Raises:
            SnapshotError: some differ, named.
        """
        chosen = self._lost(found)[first::every]
        current = _digests([storage for _, storage in chosen])
        wrong = [entry.name for (entry, _), digest in zip(chosen, current, strict=True) if entry.digest != digest]
        if wrong:
            raise SnapshotError(f"{self.file} is damaged: {listed(wrong)} came back with other bytes")

    def _lost(self, found: Sequence[Storage]) -> list[tuple[Entry, Storage]]:
        pairs = zip(self.manifest.loaded, loaded(found), strict=True)
        return [(entry, storage) for entry, storage in pairs if not storage.kept]

    def forget(self) -> None:
        """Remove manifest and file, unless they are others by now, so that nobody takes them up again."""
        lock = Lock(self.path)
        try:
            if not lock.take():
                return  # somebody is putting another one in its place
            try:
                if Manifest.read(self.path) == self.manifest:
                    self.path.unlink(missing_ok=True)
                    self.file.unlink(missing_ok=True)
            finally:
                lock.release()
        except SnapshotError:
            pass  # somebody else has removed it
        except OSError as error:
            logger.warning("A snapshot that cannot be used cannot be removed either: %s", error)


def _header(found: Sequence[Storage]) -> bytes:
    """Of the safetensors file; its data begins on a page."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": "vllm-lora-reload"}}
    offset = 0
    for storage in found:
        nbytes = storage.memory.numel()
        tensor = storage.tensors[storage.name]
        whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == nbytes
        known = _NAMES.get(tensor.dtype) if whole else None
        entries[storage.name] = {
            "dtype": known or "U8",
            "shape": list(tensor.shape) if known else [nbytes],
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(len(text) + 8) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


class _Output:
    """A file that is written from front to back in large blocks, past the page cache where the file system can."""

    def __init__(self, path: Path, block: torch.Tensor) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        except OSError:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._view = block.numpy().data
        self.size = 0

    def write(self, nbytes: int) -> None:
        """The first bytes of the block. Only the last call may have a number that is no multiple of a page."""
        done, padded = 0, -(-nbytes // PAGE) * PAGE
        while done < padded:
            done += os.pwrite(self._fd, self._view[done:padded], self.size + done)
        self.size += nbytes

    def close(self) -> None:
        """Cut what the last page has too much, and flush."""
        try:
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def abort(self) -> None:
        os.close(self._fd)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; renamed to it at the end, removed after an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write(
    path: Path,
    engine: Engine,
    found: Sequence[Storage],
    current: Sequence[str],
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Snapshot:
    """Write a snapshot of what is in memory.

    Args:
        path: of the manifest.
        engine: what it belongs to.
        found: the storages.
        current: `digests_of` them.
        reading: entered for every block that is copied from the device, so that a caller can hold it up.

    Raises:
        OSError: it cannot be written, say because the disk is full. Nothing of it is left, and an earlier one is as it
            was.
        SnapshotError: weights changed meanwhile; the same.
    """
    device = found[0].memory.device if found else torch.device("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    header = _header(found)
    total = len(header) + sum(storage.memory.numel() for storage in found)
    if (free := shutil.disk_usage(path.parent).free) < total:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {total} bytes are needed and {free} are free", path)
    combined = fingerprint(current)
    file = path.with_name(f"{path.stem}-{combined[:_DIGITS]}.safetensors")
    pinned = Pinned(_WRITE, device)
    try:
        with _replacing(file) as part:
            output = _Output(part, pinned.memory)
            try:
                _stream(header, found, pinned.memory, output, reading)
            except BaseException:
                output.abort()
                raise
            output.close()
            entries = _entries(part, found, current, len(header))
    finally:
        pinned.close()
    stat = file.stat()
    manifest = Manifest(engine, file.name, stat.st_size, stat.st_mtime_ns, entries, combined)
    try:
        with _replacing(path) as part, part.open("w", encoding="utf-8") as text:
            json.dump(dataclasses.asdict(manifest), text)
            text.flush()
            os.fsync(text.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    for other in path.parent.glob(f"{path.stem}-{'[0-9a-f]' * _DIGITS}.safetensors"):
        if other != file:  # the one before, or of a writer that was killed before its manifest was there
            other.unlink(missing_ok=True)
    return Snapshot(path, manifest)


def _entries(file: Path, found: Sequence[Storage], current: Sequence[str], offset: int) -> list[Entry]:
    """Read a file that was just written. It is then in the page cache too.

    Args:
        file: it.
        found: the storages that are in it.
        current: `digests_of` them before. What no load brings may have changed since.
        offset: of the first one.

    Raises:
        SnapshotError: its bytes are not those whose digests were taken.
    """
    entries, wrong, before = [], [], iter(current)
    with file.open("rb", buffering=0) as opened:
        for storage in found:
            nbytes = storage.memory.numel()
            opened.seek(offset)
            digest = f"{digest_of_blocks(_blocks(opened, nbytes)):016x}"
            if storage.loaded and digest != next(before):
                wrong.append(storage.name)
            entries.append(Entry(offset, nbytes, digest, storage.loaded, _described(storage)))
            offset += nbytes
    if wrong:
        raise SnapshotError(f"{listed(wrong)} changed while they were written")
    return entries


def _blocks(opened: IO[bytes], nbytes: int) -> Iterator[torch.Tensor]:
    block = bytearray(BLOCK_BYTES)
    done = 0
    while done < nbytes:
        filled = 0
        with memoryview(block)[: min(len(block), nbytes - done)] as wanted:
            while filled < len(wanted) and (got := opened.readinto(wanted[filled:])):  # type: ignore[attr-defined]
                filled += got
        if not filled:
            return
        yield torch.frombuffer(block, dtype=torch.uint8, count=filled)
        done += filled


def _stream(
    header: bytes,
    found: Sequence[Storage],
    block: torch.Tensor,
    output: _Output,
    reading: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Header and storages, one after another, through one block of host memory."""
    sources = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *(storage.memory for storage in found)]
    filled = 0
    for source in sources:
        done = 0
        while done < source.numel():
            take = min(source.numel() - done, block.numel() - filled)
            with reading():
                block[filled : filled + take].copy_(source[done : done + take])
            done, filled = done + take, filled + take
            if filled == block.numel():
                output.write(filled)
                filled = 0
    if filled:
        output.write(filled)


FileState = tuple[int, int, int]
FileStates = dict[Path, FileState]


def file_state(opened: IO[bytes]) -> FileState:
    """Size, time of the last change and inode: other ones, and a file has been written or replaced.

    Of an open file: a network file system asks its server when one is opened; by name, the answer may be a minute old.
    """
    stat = os.fstat(opened.fileno())
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def file_states(files: Iterable[Path]) -> FileStates:
    """`file_state` of each.

    Raises:
        OSError: one is gone.
    """
    states = {}
    for file in files:
        with file.open("rb") as opened:
            states[file] = file_state(opened)
    return states


class Lock:
    """Held by the one engine that writes a rank's snapshot. It goes with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".lock")
        self._file: IO[bytes] | None = None

    def take(self) -> bool:
        """Whether it is held now. Removes what a writer that died has left."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            return False
        for left in self._path.parent.glob(f".{self._path.stem}*.part"):
            left.unlink(missing_ok=True)
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
