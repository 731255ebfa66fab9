"""Snapshots: a rank's base weights in kernel format in a local file, read back without loader or model code.

A snapshot is a safetensors file, one entry for each storage in the weights pool, and a manifest (JSON) beside it that
says which tensors lie in each storage and how, what engine it was, and the digest of every storage. It is used only if
all of that fits, digests included: they are compared with what the engine has in memory, so neither a file that
changed nor weights that changed can be mistaken for the right ones.

      folder/<model>-<key>/tp0of2-pp0of1.json                      the manifest; written last, renamed into place
      folder/<model>-<key>/tp0of2-pp0of1-<digest>.safetensors      what it names

Files are written under another name, flushed and renamed. Engines on one host share them; one writes, under a lock.
They are for the user that the engine runs as (`files.Folder`), and only names that are written here are ever removed.
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
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from .checksum import BLOCK_BYTES, digest_of_blocks, digests
from .errors import SnapshotError
from .files import Folder, open_regular, parse_json
from .ring import PAGE, EndOfFileError, Piece, Pinned, Ring
from .tensors import SAFETENSORS_DTYPES, storage_key, whole_storage

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

FORMAT = 1
_WRITE = 16 << 20  # bytes that are copied from the device at a time
_PART = 4 << 20  # bytes of one write: after each the writer can be stopped
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
    ctime_ns: when anything about it was last changed; None if that is not known.
    """

    engine: Engine
    file: str
    size: int
    mtime_ns: int
    entries: list[Entry]
    fingerprint: str = ""
    format: int = FORMAT
    ctime_ns: int | None = None

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises:
        SnapshotError: it cannot be read, or is none that was written here.
        """
        try:
            with Folder(path.parent) as folder, folder.open(path.name) as opened:
                given = parse_json(opened)
            if given["format"] != FORMAT:
                raise SnapshotError(f"{path} has format {given['format']!r:.20}; this release reads format {FORMAT}")
            engine, entries = Engine(**given.pop("engine")), [Entry(**entry) for entry in given.pop("entries")]
            manifest = cls(engine=engine, entries=entries, **given)
            manifest._ensure_as_written(path.stem)
            return manifest
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SnapshotError(f"{path} cannot be read: {type(error).__name__}: {error!s:.500}") from error

    def _ensure_as_written(self, stem: str) -> None:
        """Raises:
        ValueError: `write` would not have written this beside files that begin with `stem`.
        TypeError: the same.
        """
        engine = self.engine
        _ensure(str, engine.model, engine.release, engine.dtype, engine.quantization or "", self.file, self.fingerprint)
        _ensure(int, self.format, self.size, self.mtime_ns, self.ctime_ns or 0)
        for rank, size in engine.place.values():
            _ensure(int, rank, size)
        end = self.size if not self.entries else self.entries[0].offset
        for entry in self.entries:
            _ensure(int, entry.offset, entry.nbytes)
            _ensure(bool, entry.loaded)
            if entry.offset != end or entry.nbytes < 0 or not re.fullmatch("[0-9a-f]{16}", entry.digest):
                raise ValueError("an entry is not where it should be, or has no digest")
            end += entry.nbytes
            if not entry.tensors:
                raise ValueError("an entry has no name")
            for tensor in entry.tensors:
                if tensor.keys() != {"name", "shape", "stride", "dtype", "storage_offset"} or not tensor["name"]:
                    raise ValueError("a tensor is not described, or has no name")
                _ensure(str, tensor["name"], tensor["dtype"])
                _ensure(int, *tensor["shape"], *tensor["stride"], tensor["storage_offset"])
        if end != self.size or (self.entries and self.entries[0].offset % PAGE):
            raise ValueError("the entries are not what is in the file")
        if self.fingerprint != fingerprint(self.digests()) or self.file != _file_name(stem, self.fingerprint):
            raise ValueError("the file has not the name that its content gives it")

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


def _file_name(stem: str, combined: str) -> str:
    return f"{stem}-{combined[:_DIGITS]}.safetensors"


def _any_file_name(stem: str) -> str:
    """A regular expression for such names."""
    return rf"{re.escape(stem)}-[0-9a-f]{{{_DIGITS}}}\.safetensors"


def _ensure(kind: type, *values: object) -> None:
    """Raises:
    TypeError: one is of another type; to be true is not to be 1.
    """
    if not all(type(value) is kind for value in values):
        raise TypeError(f"something is no {kind.__name__}")


def listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


class Snapshot:
    """A manifest and its file, which is held open: another engine may put a new one in its place."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._ctime_ns = manifest.ctime_ns  # with which its content is known
        self._ctime_before: int | None = None  # the last restore
        try:
            with Folder(path.parent) as folder:
                self._open = folder.open(manifest.file)
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
        status = os.fstat(self._open.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.manifest.size, self.manifest.mtime_ns):
            raise SnapshotError(f"{self.file} has changed since it was written")

    def _ctime(self) -> int:
        return os.fstat(self._open.fileno()).st_ctime_ns

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
        self._ctime_before = self._ctime()
        pieces = [Piece(entry.offset, storage.memory) for entry, storage in self._lost(found)]
        try:
            ring.read({self._open: pieces})
        except OSError as error:
            if isinstance(error, EndOfFileError) or error.errno == errno.EIO:
                raise SnapshotError(f"{self.file} cannot be read: {error}") from error
            raise
        self.ensure_unchanged()
        return sum(piece.nbytes for piece in pieces)

    @property
    def surely_unchanged(self) -> bool:
        """Whether what `restore` has read is what was written, or checked.

        Size and time of the last change can be put back after a change; ``ctime`` cannot, though it changes also with
        names and rights.
        """
        return self._ctime_ns == self._ctime_before == self._ctime()

    def check(self, found: Sequence[Storage], every: int = 1, first: int = 0) -> None:
        """Compare what `restore` has written with the snapshot's digests.

        Args:
            found: the storages.
            every: 1 for all of them, n for every n-th, one at the least.
            first: where to begin.

        Raises:
            SnapshotError: some differ, named.
        """
        lost = self._lost(found)
        every = max(1, min(every, len(lost)))
        chosen = lost[first % every :: every]
        current = _digests([storage for _, storage in chosen])
        wrong = [entry.name for (entry, _), digest in zip(chosen, current, strict=True) if entry.digest != digest]
        if wrong:
            raise SnapshotError(f"{self.file} is damaged: {listed(wrong)} came back with other bytes")
        if every == 1:
            self._ctime_ns = self._ctime_before

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
                    with Folder(self.path.parent) as folder:
                        folder.remove(self.path.name)
                        folder.remove(self.manifest.file)
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
    """A file that is written from front to back in large blocks, past the page cache where the file system can.

    Args:
        fd: of a new file; closed in the end.
        block: what is written is put there.
        proceed: called between writes; it may raise.
    """

    def __init__(self, fd: int, block: torch.Tensor, proceed: Callable[[], None]) -> None:
        self._fd = fd
        self._direct = True
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:
            self._direct = False
        self._view = block.numpy().data
        self._proceed = proceed
        self.size = 0

    def write(self, nbytes: int) -> None:
        """The first bytes of the block. Only the last call may have a number that is no multiple of a page."""
        done, padded = 0, -(-nbytes // PAGE) * PAGE
        while done < padded:
            self._proceed()
            done += os.pwrite(self._fd, self._view[done : min(done + _PART, padded)], self.size + done)
            if not self._direct:  # else all of it would be left to the flush at the end, which nothing can stop
                os.fdatasync(self._fd)
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


def _proceed() -> None:
    """Nothing stops a writer."""


def write(
    path: Path,
    engine: Engine,
    found: Sequence[Storage],
    current: Sequence[str],
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    proceed: Callable[[], None] = _proceed,
) -> Snapshot:
    """Write a snapshot of what is in memory.

    Args:
        path: of the manifest.
        engine: what it belongs to.
        found: the storages.
        current: `digests_of` them.
        reading: entered for every block that is copied from the device, so that a caller can hold it up.
        proceed: called every few megabytes that are written or read back. What it raises ends the work, and nothing of
            it is left.

    Raises:
        OSError: it cannot be written, say because the disk is full. Nothing of it is left, and an earlier one is as it
            was.
        SnapshotError: weights changed meanwhile; the same.
    """
    device = found[0].memory.device if found else torch.device("cpu")
    with Folder(path.parent, create=True) as folder:
        header = _header(found)
        total = len(header) + sum(storage.memory.numel() for storage in found)
        if (free := shutil.disk_usage(path.parent).free) < total:
            reason = f"{os.strerror(errno.ENOSPC)}: {total} bytes are needed and {free} are free"
            raise OSError(errno.ENOSPC, reason, path)
        combined = fingerprint(current)
        file = _file_name(path.stem, combined)
        pinned = Pinned(_WRITE, device)
        try:
            with folder.replacing(file) as part:
                output = _Output(folder.create(part), pinned.memory, proceed)
                try:
                    _stream(header, found, pinned.memory, output, reading)
                except BaseException:
                    output.abort()
                    raise
                output.close()
                with folder.open(part) as opened:
                    entries = _entries(opened, found, current, len(header), proceed)
        finally:
            pinned.close()
        try:
            status = os.stat(file, dir_fd=folder.fd, follow_symlinks=False)
            manifest = Manifest(
                engine, file, status.st_size, status.st_mtime_ns, entries, combined, ctime_ns=status.st_ctime_ns
            )
            with (
                folder.replacing(path.name) as part,
                os.fdopen(folder.create(part), "w", encoding="utf-8") as text,
            ):
                json.dump(dataclasses.asdict(manifest), text)
                text.flush()
                os.fsync(text.fileno())
        except BaseException:
            folder.remove(file)
            raise
        for other in folder.names():  # the one before, or of a writer that was killed before its manifest was there
            if other != file and re.fullmatch(_any_file_name(path.stem), other):
                folder.remove(other)
    return Snapshot(path, manifest)


def _entries(
    opened: IO[bytes],
    found: Sequence[Storage],
    current: Sequence[str],
    offset: int,
    proceed: Callable[[], None] = _proceed,
) -> list[Entry]:
    """Read a file that was just written. It is then in the page cache too.

    Args:
        opened: it.
        found: the storages that are in it.
        current: `digests_of` them before. What no load brings may have changed since.
        offset: of the first one.
        proceed: called before each block.

    Raises:
        SnapshotError: its bytes are not those whose digests were taken.
    """
    entries, wrong, before = [], [], iter(current)
    for storage in found:
        nbytes = storage.memory.numel()
        opened.seek(offset)
        digest = f"{digest_of_blocks(_blocks(opened, nbytes, proceed)):016x}"
        if storage.loaded and digest != next(before):
            wrong.append(storage.name)
        entries.append(Entry(offset, nbytes, digest, storage.loaded, _described(storage)))
        offset += nbytes
    if wrong:
        raise SnapshotError(f"{listed(wrong)} changed while they were written")
    return entries


def _blocks(opened: IO[bytes], nbytes: int, proceed: Callable[[], None]) -> Iterator[torch.Tensor]:
    block = bytearray(BLOCK_BYTES)
    done = 0
    while done < nbytes:
        proceed()
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


FileState = tuple[int, int, int, int]
FileStates = dict[Path, FileState]


def file_state(opened: IO[bytes]) -> FileState:
    """Size, times of the last change and inode: other ones, and a file has been written or replaced.

    The time of the last change of its content can be put back, that of any change (``ctime``) cannot. Where programs
    write through a mapping, the kernel notes it at the first write to a page since the page was last on the disk.

    Of an open file: a network file system asks its server when one is opened; by name, the answer may be a minute old.
    """
    status = os.fstat(opened.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


def file_states(files: Iterable[Path]) -> FileStates:
    """`file_state` of each.

    Raises:
        OSError: one is gone, or is no regular file.
    """
    states = {}
    for file in files:
        with open_regular(file) as opened:
            states[file] = file_state(opened)
    return states


class Lock:
    """Held by the one engine that writes a rank's snapshot. It goes with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".lock")
        self._fd: int | None = None

    def take(self) -> bool:
        """Whether it is held now. Removes what a writer that died has left.

        Raises:
            OSError: the folder is none to write to.
        """
        with Folder(self._path.parent, create=True) as folder:
            if not self._way_is_free(folder):
                return False
            fd = folder.create(self._path.name, anew=False)
            if not _locked(fd) or not self._stands_for(fd, folder):
                os.close(fd)
                return False
            self._fd = fd
            stem = self._path.stem
            left = re.compile(rf"\.({re.escape(stem)}\.json|{_any_file_name(stem)})\.[0-9a-f]+\.part")
            for name in folder.names():
                if left.fullmatch(name):
                    folder.remove(name)
        return True

    def _way_is_free(self, folder: Folder) -> bool:
        """Whether nothing else than a file has the lock's name any more. Only one engine at a time renames it."""
        status = folder.status(self._path.name)
        if status is None or stat.S_ISREG(status.st_mode):
            return True
        if not _locked(folder.fd):
            return False
        folder.make_way(self._path.name)
        return True

    def _stands_for(self, fd: int, folder: Folder) -> bool:
        """Whether the next engine that comes will open the same file."""
        status = folder.status(self._path.name)
        return status is not None and os.path.samestat(status, os.fstat(fd))

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
