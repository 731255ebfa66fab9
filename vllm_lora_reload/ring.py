"""Bytes of files to device memory, at what the bus can do and with little host memory.

Threads (`reads`) fill a small ring of pinned buffers, two for each thread, while one Python thread begins these reads
and sends each buffer that is full on its way on one of two streams. Reads go by ``pread``: a mapping would save a
system call, but a file that somebody truncates would then end the process (SIGBUS); ``pread`` merely returns less.

The shape of the loop (a worker that knows nothing of models, fed with offsets) is checkpoint-engine's.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal, TypeVar

import torch

from .pagecache import bring_in, cached, cached_of_file
from .reads import Reads, reads_for
from .tensors import as_bytes

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

Reader = Literal["auto", "buffered", "direct"]
F = TypeVar("F", Path, IO[bytes])

PAGE = 4096  # offsets and sizes of direct reads and writes are multiples of it
_CHUNK = 4 << 20
_LEAST_CHUNK = 1 << 20
_THREADS = 10  # as fast on an H200 as 14; more fight over the host's memory, those of several ranks sooner
_THREADS_OF_MANY = 8
_STREAMS = 2  # so that the bus has the next copy before the one before has ended
_GAP = 64 << 10  # bytes that are rather read and dropped than skipped


class EndOfFileError(OSError):
    """A file is shorter than what is wanted of it."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, and the tensor they are.

    Attributes:
        offset: where they start, in bytes.
        target: gets them. Without `stride` it is contiguous and they are its bytes in order.
        stride: how the elements of the target's shape lie in the file, in elements, as ``Tensor.stride`` has it.
        dtype: of the elements in the file, with `stride` only; that of the target if None.
    """

    offset: int
    target: torch.Tensor
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the file."""
        return (self.dtype or self.target.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last."""
        if self.stride is None or self.target.numel() == 0:
            return self.target.numel() * self.itemsize
        last = sum((size - 1) * step for size, step in zip(self.target.shape, self.stride, strict=True))
        return (last + 1) * self.itemsize


@dataclass
class _Chunk:
    file: int
    start: int  # multiple of PAGE
    stop: int
    pieces: list[Piece] = field(default_factory=list)


def _split(piece: Piece, limit: int) -> Iterator[Piece]:
    """A piece with `stride` in parts of at most `limit` bytes, a single element at the least."""
    shape, stride, target = piece.target.shape, piece.stride, piece.target
    if piece.nbytes <= limit or stride is None or not shape:
        yield piece
        return
    dim = max((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: stride[d])
    step = stride[dim] * piece.itemsize
    one = replace(piece, target=target.narrow(dim, 0, 1)).nbytes
    rows = max(1, (limit - one) // step + 1) if step else shape[dim]
    for first in range(0, shape[dim], rows):
        some = target.narrow(dim, first, min(rows, shape[dim] - first))
        part = replace(piece, offset=piece.offset + first * step, target=some)
        yield from _split(part, limit) if rows < shape[dim] else (part,)


def _chunks(file: int, pieces: Iterable[Piece], size: int) -> Iterator[_Chunk]:
    """Pieces of one file cut and packed into chunks of at most `size` bytes."""
    chunk: _Chunk | None = None
    for whole in sorted(pieces, key=lambda piece: piece.offset):
        for piece in _split(whole, size - PAGE):
            done, total = 0, piece.nbytes
            flat = as_bytes(piece.target) if piece.stride is None else None
            while done < total:
                offset = piece.offset + done
                fits = chunk is not None and chunk.start <= offset <= chunk.stop + _GAP
                if chunk is not None and (not fits or offset - chunk.start >= size):
                    yield chunk
                    chunk = None
                if chunk is None:
                    start = offset // PAGE * PAGE
                    chunk = _Chunk(file, start, start)
                room = chunk.start + size - offset
                if flat is not None:
                    take = min(total - done, room)
                    chunk.pieces.append(Piece(offset, flat[done : done + take]))
                elif total <= room:
                    take = total
                    chunk.pieces.append(piece)
                else:
                    yield chunk
                    chunk = None
                    continue
                chunk.stop = max(chunk.stop, offset + take)
                done += take
    if chunk is not None:
        yield chunk


class Pinned:
    """Page-aligned host memory, pinned where `device` is a GPU; nothing of it stays when it is closed or collected.

    Attributes:
        memory: uint8, ``[nbytes]``.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._map = mmap.mmap(-1, nbytes)
        with suppress(AttributeError, OSError):  # not every kernel has them
            self._map.madvise(mmap.MADV_HUGEPAGE)  # pinning goes page by page
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        address = None
        if device.type == "cuda":
            address = self.memory.data_ptr()
            with torch.cuda.device(device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        self.close = weakref.finalize(self, _unpin, address, self._map)
        """Give the memory back. The caller has waited for copies from and to it."""


def _unpin(address: int | None, memory: mmap.mmap) -> None:
    # `memory` is let go only after this, so it is never unmapped while it is pinned.
    if address is not None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def _mapped(name: str, maps: str) -> str | None:
    """Path of the first library that begins with `name` in ``/proc/self/maps``."""
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    return next((path for *_, path in fields if Path(path).name.startswith(name)), None)


_Copy = Callable[[int, int, int, int, int], int]  # target, source, bytes, kind, stream; an error's number
_HOST_TO_DEVICE = 1


def _copy_async(device: torch.device) -> _Copy | None:
    """``cudaMemcpyAsync`` of the CUDA runtime that torch has loaded, keeping the GIL; None where it cannot be had.

    ``Tensor.copy_`` takes several times as long to begin a copy, which counts where the tensors are many and small. How
    to find the library is vLLM's ``CudaRTLibrary``.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    path = _mapped("libcudart.so", Path("/proc/self/maps").read_text())
    if path is None:
        return None
    try:
        copy = ctypes.PyDLL(path).cudaMemcpyAsync
    except OSError:  # replaced by an upgrade under this process, say
        return None
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    copy.restype = ctypes.c_int
    return copy


class _Source:
    """An open file, and how its chunks are best read.

    Attributes:
        path: of it.
        fd: as which chunks name it.
        missed: whether anything was read past the page cache because it was not there.
    """

    def __init__(self, file: Path | IO[bytes], reader: Reader, stack: ExitStack) -> None:
        self.path = file if isinstance(file, Path) else Path(file.name)
        self.missed = False
        self._stack = stack
        # A FIFO that somebody has put in a file's place is not waited for: reading it is an error.
        self.fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK) if isinstance(file, Path) else os.dup(file.fileno())
        stack.callback(os.close, self.fd)
        self._past: int | None = None  # what reads past the page cache
        # `auto`: chunk by chunk.
        self._reader: Reader = reader
        if reader == "auto" and cached_of_file(self.fd) in (1, None):  # all is there, or nobody knows
            self._reader = "buffered"

    def best(self, start: int, stop: int) -> int:
        """The descriptor to read some bytes with."""
        if self._reader == "buffered" or (self._reader == "auto" and cached(self.fd, start, stop) == 1):
            return self.fd
        if self._past is None:
            try:
                self._past = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECT)
            except OSError:  # a file system without direct reads, or no descriptor is left
                return self.through()
            self._stack.callback(os.close, self._past)
        self.missed |= self._reader == "auto"
        return self._past

    def through(self) -> int:
        """From now on all goes through the page cache; the descriptor for that."""
        self._reader = "buffered"
        return self.fd


@dataclass
class _Slot:
    """One buffer, and the chunk that is on its way through it.

    Attributes:
        fd: what the chunk is read with.
        sent: marks the end of the copies out of it; None where copies are done when they return.
        base: where in the buffer the present read begins: at a page, as direct reads must.
        got: bytes of the chunk that have been read.
    """

    number: int
    buffer: torch.Tensor
    address: int
    sent: torch.cuda.Event | None
    chunk: _Chunk = field(default_factory=lambda: _Chunk(-1, 0, 0))
    fd: int = -1
    base: int = 0
    got: int = 0

    def start(self, reads: Reads) -> None:
        """Read what is missing. The last read of a direct file may ask for more than there is."""
        self.base = self.got // PAGE * PAGE
        end = -(-self.chunk.stop // PAGE) * PAGE - self.chunk.start
        reads.start(self.number, self.fd, self.buffer[self.base : end], self.chunk.start + self.base)

    def collect(self, reads: Reads, source: _Source) -> bool:
        """Whether the whole chunk is here. A part of it that is missing is asked for."""
        at = self.chunk.start + self.got
        try:
            came = reads.done(self.number)
        except OSError as error:
            if error.errno == errno.EINVAL and self.fd != source.fd:  # it was opened for direct reads, yet has none
                self.fd = source.through()
                self.start(reads)
                return False
            raise OSError(error.errno, f"{os.strerror(error.errno or 0)} at byte {at}", source.path) from error
        if came is None:
            return False
        if self.base + came <= self.got:
            raise EndOfFileError(f"{source.path} ends at byte {at}; {self.chunk.stop} are needed")
        self.got = self.base + came
        if self.got < self.chunk.stop - self.chunk.start:
            self.start(reads)
            return False
        return True


def threads_for(ranks: int) -> int:
    """How many threads each of `ranks` processes of one host reads with; an eighth of the cores is left free."""
    most = _THREADS if ranks == 1 else _THREADS_OF_MANY
    return max(1, min(most, len(os.sched_getaffinity(0)) * 7 // 8 // ranks))


class Ring:
    """Reads files into device memory. One per worker; not for use by several threads at a time.

    Args:
        device: where targets are.
        max_bytes: of pinned host memory, at most.
        threads: how many reads go on at a time; 0: from the number of cores and `ranks`.
        chunk: bytes of one read, a power of two; 0: 4 MiB, less if `max_bytes` asks for it.
        reader: ``buffered`` reads through the page cache, ``direct`` past it (O_DIRECT). ``auto`` reads what is in the
            page cache from there, the rest past it, which is faster for many threads, and has that brought there
            afterwards (`warm`).
        ranks: processes of this host that read side by side.

    Attributes:
        nbytes: of pinned memory that it holds now.
    """

    def __init__(
        self,
        device: torch.device,
        max_bytes: int = 512 << 20,
        threads: int = 0,
        chunk: int = 0,
        reader: Reader = "auto",
        ranks: int = 1,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # reads go on in another thread
        self.device = device
        self.threads = threads or threads_for(ranks)
        self.chunk = chunk or _CHUNK
        while not chunk and self.chunk > _LEAST_CHUNK and 2 * self.chunk * self.threads > max_bytes:
            self.chunk //= 2
        self.threads = max(1, min(self.threads, max_bytes // (2 * self.chunk)))
        self.reader: Reader = reader
        self._ranks = ranks
        self.nbytes = 0
        self._pinned: Pinned | None = None
        self._slots: list[_Slot] = []
        self._streams: list[torch.cuda.Stream] = []
        self._copy: _Copy | None = None
        self._running: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self._warming = threading.Event()  # set: to be given up
        self._turn = threading.Lock()  # around a change of the two above: files are not brought in during a read

    def prepare(self) -> None:
        """Take the buffers now instead of in the first `read`."""
        if self._pinned is not None:
            return
        size = 2 * self.chunk * self.threads
        on_gpu = self.device.type == "cuda"
        self._pinned = Pinned(size, self.device)
        self._slots = [
            _Slot(number, buffer, buffer.data_ptr(), torch.cuda.Event() if on_gpu else None)
            for number, buffer in enumerate(self._pinned.memory.split(self.chunk))
        ]
        self._streams = [torch.cuda.Stream(self.device) for _ in range(_STREAMS)] if on_gpu else []
        self._copy = _copy_async(self.device)
        self.nbytes = size

    def warm(self, paths: Iterable[Path]) -> None:
        """Read files in the background so that they are in the page cache, if they fit into half of the free memory.

        The next `read` ends it. Does nothing for a ring that is to read past the page cache, nor during a `read`.
        """
        if self.reader == "direct":
            return
        with self._turn:
            if self._running is not None:
                return
            self._warming.set()
            self._warming = threading.Event()
            args = (tuple(paths), self._warming, self._ranks)
            try:
                threading.Thread(target=bring_in, args=args, name="lora-reload-warm", daemon=True).start()
            except RuntimeError as error:
                logger.warning("Files are not brought into the page cache: %s", error)

    def close(self) -> None:
        """Free the buffers; the next `read` takes new ones."""
        self._warming.set()
        self._finish()
        self._slots, self._streams = [], []
        if self._pinned is not None:
            self._pinned.close()
        self._pinned, self.nbytes = None, 0

    def read(self, wanted: Mapping[F, Sequence[Piece]]) -> None:
        """Fill every target; returns when the device has all bytes.

        Args:
            wanted: pieces by file, a path or an open one. Those of a file may lie in any order, in gaps and twice.

        Raises:
            EndOfFileError: a file ends too early; what was read before it is in its target.
            OSError: a file is gone or cannot be read, or this process has too little of something.
            RuntimeError: `close` has ended it.
        """
        self._finish()
        self.prepare()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        # In a thread of its own no mode of the caller is active, such as the recorder of what loaders write. It owns
        # all that it uses: an interrupt (Ctrl-C) ends it soon, but does not take files or memory away from under it.
        self._stop.clear()
        running = ThreadPoolExecutor(1, "lora-reload-ring")
        with self._turn:
            self._warming.set()
            self._running = running
        try:
            running.submit(int).result()  # an interrupt while its thread starts would not wait for that thread
            missed = running.submit(self._read, wanted).result()
        finally:
            self._finish()
        if missed:
            self.warm(missed)

    def _finish(self) -> None:
        """Wait for the thread of the last read, which an interrupt may have left behind."""
        if (running := self._running) is not None:
            self._stop.set()
            running.shutdown()
            self._running = None

    @torch.no_grad()
    def _read(self, wanted: Mapping[F, Sequence[Piece]]) -> list[Path]:
        """Files of which something was not in the page cache."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with ExitStack() as stack:
            sources: dict[int, _Source] = {}
            parts: list[Iterator[_Chunk]] = []  # made while others are on their way
            for file, pieces in wanted.items():
                source = _Source(file, self.reader, stack)
                sources[source.fd] = source
                parts.append(_chunks(source.fd, pieces, self.chunk))
            scratch = None
            if any(piece.stride is not None for pieces in wanted.values() for piece in pieces):
                scratch = torch.empty(max(1, len(self._streams)), self.chunk, dtype=torch.uint8, device=self.device)
            self._run(itertools.chain.from_iterable(parts), sources, scratch)
            if scratch is not None and self.device.type == "cuda":
                del scratch
                torch.cuda.empty_cache()
            return [source.path for source in sources.values() if source.missed]

    def _run(self, chunks: Iterator[_Chunk], sources: Mapping[int, _Source], scratch: torch.Tensor | None) -> None:
        free, sent = deque(self._slots), deque[_Slot]()
        reading: list[_Slot] = []
        reads = reads_for(len(self._slots), self.threads)
        turns = itertools.cycle(range(max(1, len(self._streams))))
        todo = next(chunks, None)
        moved = time.monotonic()
        try:
            while (todo is not None or reading) and not self._stop.is_set():
                while todo is not None and free and len(reading) < reads.ahead:
                    slot = free.popleft()
                    slot.chunk, slot.got = todo, 0
                    slot.fd = sources[todo.file].best(todo.start, todo.stop)
                    slot.start(reads)
                    reading.append(slot)
                    todo = next(chunks, None)
                for slot in tuple(reading):
                    if slot.collect(reads, sources[slot.chunk.file]):
                        reading.remove(slot)
                        self._send(slot, next(turns), scratch)
                        sent.append(slot)
                        moved = time.monotonic()
                while sent and (sent[0].sent is None or sent[0].sent.query()):
                    free.append(sent.popleft())
                    moved = time.monotonic()
                if time.monotonic() - moved < reads.spin:
                    continue
                if reading:  # slower than the bus: others may have the processor
                    reads.wait([slot.number for slot in reading], 0.001)
                else:
                    time.sleep(0.0001)
            if todo is not None or reading:
                raise RuntimeError("the read was ended before all of it was there")
        finally:
            reads.close()
            for stream in self._streams:
                stream.synchronize()

    def _send(self, slot: _Slot, turn: int, scratch: torch.Tensor | None) -> None:
        """Put the copies of a chunk's pieces on a stream."""
        stream = self._streams[turn] if self._streams else None
        for piece in slot.chunk.pieces:
            start = piece.offset - slot.chunk.start
            if self._copy is not None and stream is not None and piece.stride is None:
                target, address = piece.target.data_ptr(), slot.address + start
                if error := self._copy(target, address, piece.nbytes, _HOST_TO_DEVICE, stream.cuda_stream):
                    torch.cuda.check_error(error)
                continue
            source = slot.buffer[start : start + piece.nbytes]
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if piece.stride is not None:
                    assert scratch is not None
                    _spread(source, piece, piece.stride, scratch[turn])
                else:
                    piece.target.copy_(source, non_blocking=True)
        if slot.sent is not None:
            slot.sent.record(stream)


def _spread(source: torch.Tensor, piece: Piece, stride: tuple[int, ...], scratch: torch.Tensor) -> None:
    """Copy elements that lie apart: as they are to the device, which sorts them faster than the host."""
    scratch = scratch[: source.numel()]
    scratch.copy_(source, non_blocking=True)
    piece.target.copy_(scratch.view(piece.dtype or piece.target.dtype).as_strided(piece.target.shape, stride))
