"""Bytes of files to device memory, at what the bus can do and with little host memory.

Threads read chunks into a small ring of pinned buffers, two for each thread, and send each on its way on the thread's
own stream while they read the next. Python threads suffice: nearly all of their time passes in ``preadv``, which holds
no lock. A mapping would save a system call, but a file that somebody truncates would then end the process (SIGBUS);
``preadv`` merely returns less.

The shape of the loop (a worker that knows nothing of models, fed with offsets) is checkpoint-engine's.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from .tensors import as_bytes

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

Reader = Literal["auto", "buffered", "direct"]

PAGE = 4096  # offsets and sizes of direct reads and writes are multiples of it
_CHUNK = 8 << 20  # smaller ones cost a GPU machine more in Python than they save
_LEAST_CHUNK = 1 << 20
_THREADS = 16
_GAP = 64 << 10  # bytes that are rather read and dropped than skipped


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
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # pinning goes page by page
        self.memory: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
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


_Copy = Callable[[int, int, int, int, int], int]  # target, source, bytes, kind, stream; an error's number
_HOST_TO_DEVICE = 1


def _copy_async(device: torch.device) -> _Copy | None:
    """``cudaMemcpyAsync`` of the CUDA runtime that torch has loaded, keeping the GIL; None where it cannot be had.

    ``Tensor.copy_`` releases the GIL for a few microseconds, and getting it back among many threads costs more than the
    call: with the reads, that would be most of what a chunk costs. How to find the library is vLLM's ``CudaRTLibrary``.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    maps = Path("/proc/self/maps").read_text().split()
    path = next((word for word in maps if Path(word).name.startswith("libcudart.so")), None)
    if path is None:
        return None
    copy = ctypes.PyDLL(path).cudaMemcpyAsync
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    copy.restype = ctypes.c_int
    return copy


class _Lane:
    """One thread's buffers and stream."""

    def __init__(self, buffers: Sequence[torch.Tensor], device: torch.device, copy: _Copy | None) -> None:
        self.buffers = buffers
        self._addresses = [buffer.data_ptr() for buffer in buffers]
        self._copy = copy
        self.views = [buffer.numpy().data for buffer in buffers]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.sent = [torch.cuda.Event() for _ in buffers] if device.type == "cuda" else []
        self.scratch: torch.Tensor | None = None

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def wait_for(self, index: int) -> None:
        # To ask first costs less than to wait: by then the copy is nearly always done, and waiting releases the GIL.
        if self.sent and not self.sent[index].query():
            self.sent[index].synchronize()

    def send(self, index: int, chunk: _Chunk) -> None:
        buffer = self.buffers[index]
        for piece in chunk.pieces:
            start = piece.offset - chunk.start
            if piece.stride is not None:
                self._spread(buffer[start : start + piece.nbytes], piece, piece.stride)
            elif self._copy is not None and self.stream is not None:
                target, source = piece.target.data_ptr(), self._addresses[index] + start
                stream = self.stream.cuda_stream
                torch.cuda.check_error(self._copy(target, source, piece.nbytes, _HOST_TO_DEVICE, stream))
            else:
                piece.target.copy_(buffer[start : start + piece.nbytes], non_blocking=True)
        if self.sent:
            self.sent[index].record()

    def _spread(self, source: torch.Tensor, piece: Piece, stride: tuple[int, ...]) -> None:
        """Copy elements that lie apart: as they are to the device, which sorts them faster than the host."""
        assert self.scratch is not None
        scratch = self.scratch[: source.numel()]
        scratch.copy_(source, non_blocking=True)
        piece.target.copy_(scratch.view(piece.dtype or piece.target.dtype).as_strided(piece.target.shape, stride))

    def finish(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def threads_for(ranks: int) -> int:
    """How many threads each of `ranks` processes of one host reads with; an eighth of the cores is left free."""
    return max(1, min(_THREADS, len(os.sched_getaffinity(0)) * 7 // 8 // ranks))


class Ring:
    """Reads files into device memory. One per worker; not for use by several threads at a time.

    Args:
        device: where targets are.
        max_bytes: of pinned host memory, at most.
        threads: how many read; 0: from the number of cores.
        chunk: bytes of one read, a power of two; 0: 8 MiB, less if `max_bytes` asks for it.
        reader: ``buffered`` reads through the page cache, ``direct`` past it (O_DIRECT). ``auto`` reads a file through
            the page cache if it is there, else past it, which is faster for many threads, and has it brought there
            afterwards (`warm`).

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
    ) -> None:
        self.device = device
        self.threads = threads or threads_for(1)
        self.chunk = chunk or _CHUNK
        while not chunk and self.chunk > _LEAST_CHUNK and 2 * self.chunk * self.threads > max_bytes:
            self.chunk //= 2
        self.threads = max(1, min(self.threads, max_bytes // (2 * self.chunk)))
        self.reader: Reader = reader
        self.nbytes = 0
        self._pinned: Pinned | None = None
        self._lanes: list[_Lane] = []
        self._pool: ThreadPoolExecutor | None = None
        self._cold: list[Path] = []
        self._warming = threading.Event()  # set: to be given up

    def prepare(self) -> None:
        """Take the buffers now instead of in the first `read`."""
        if self._pinned is not None:
            return
        size = 2 * self.chunk * self.threads
        self._pinned = Pinned(size, self.device)
        assert self._pinned.memory is not None
        buffers = self._pinned.memory.split(self.chunk)
        copy = _copy_async(self.device)
        self._lanes = [_Lane(pair, self.device, copy) for pair in zip(buffers[::2], buffers[1::2], strict=True)]
        self._pool = ThreadPoolExecutor(self.threads, "lora-reload-ring")
        self.nbytes = size

    def warm(self, paths: Iterable[Path]) -> None:
        """Read files in the background so that they are in the page cache, as long as half of the free memory does.

        The next `read` ends it. Does nothing for a ring that is to read past the page cache.
        """
        self._warming.set()
        if self.reader != "direct":
            self._warming = threading.Event()
            args = (tuple(paths), self._warming)
            threading.Thread(target=_warm, args=args, name="lora-reload-warm", daemon=True).start()

    def close(self) -> None:
        """Free buffers and threads; the next `read` takes new ones."""
        self._warming.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._lanes = None, []
        if self._pinned is not None:
            self._pinned.close()
        self._pinned, self.nbytes = None, 0

    def read(self, wanted: Mapping[Path, Sequence[Piece]]) -> None:
        """Fill every target; returns when the device has all bytes.

        Args:
            wanted: pieces by file. Pieces of one file may lie in any order, in gaps and twice.

        Raises:
            OSError: a file is gone, ends too early or cannot be read; what was read before it is in its target.
        """
        self.prepare()
        assert self._pool is not None
        self._warming.set()
        self._cold = []
        with ExitStack() as stack:
            names: dict[int, Path] = {}
            todo: deque[_Chunk] = deque()
            for path, pieces in wanted.items():
                fd = self._open(path)
                stack.callback(os.close, fd)
                names[fd] = path
                todo.extend(_chunks(fd, pieces, self.chunk))
            scratch = None
            if any(piece.stride is not None for chunk in todo for piece in chunk.pieces):
                scratch = torch.empty(self.chunk * len(self._lanes), dtype=torch.uint8, device=self.device)
            for number, lane in enumerate(self._lanes):
                lane.scratch = None if scratch is None else scratch[number * self.chunk :][: self.chunk]
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            running = [self._pool.submit(self._run, lane, todo, names) for lane in self._lanes]
            wait(running)  # all of them, before files close and buffers are used again
            for lane in self._lanes:
                lane.scratch = None
            for future in running:
                future.result()
        if scratch is not None and self.device.type == "cuda":
            del scratch
            torch.cuda.empty_cache()
        if self._cold:
            self.warm(self._cold)

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        if self.reader == "buffered" or (self.reader == "auto" and resident(fd)):
            return fd
        try:
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return fd  # a file system without direct reads
        os.close(fd)
        if self.reader == "auto":
            self._cold.append(path)
        return direct

    def _run(self, lane: _Lane, todo: deque[_Chunk], names: Mapping[int, Path]) -> None:
        turn = 0
        try:
            with torch.no_grad(), torch.cuda.device(self.device) if lane.stream else nullcontext(), lane.active():
                while todo:
                    try:
                        chunk = todo.popleft()
                    except IndexError:  # another thread took the last one
                        break
                    lane.wait_for(turn)
                    _fill(lane.views[turn], chunk, names[chunk.file])
                    lane.send(turn, chunk)
                    turn = 1 - turn
        except BaseException:
            todo.clear()
            raise
        finally:
            lane.finish()


def _fill(buffer: memoryview, chunk: _Chunk, path: Path) -> None:
    """Read a chunk. The last read of a direct file may ask for more than there is."""
    needed, asked = chunk.stop - chunk.start, -(-chunk.stop // PAGE) * PAGE - chunk.start
    done = 0
    while done < needed:
        try:
            got = os.preadv(chunk.file, [buffer[done:asked]], chunk.start + done)
        except OSError as error:
            raise OSError(error.errno, f"{os.strerror(error.errno or 0)} at byte {chunk.start + done}", path) from error
        if got == 0:
            raise OSError(f"{path} ends at byte {chunk.start + done}; {chunk.stop} are needed")
        done += got


def _warm(paths: Sequence[Path], given_up: threading.Event) -> None:
    block = bytearray(_CHUNK)
    try:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size > available_memory() // 2 or resident(file.fileno()):
                    continue
                while not given_up.is_set() and file.readinto(block):
                    pass
    except OSError as error:
        logger.warning("%s: %s; reading it when it is needed may be slow", path, error)


def resident(fd: int, samples: int = 64) -> bool:
    """Whether (nearly) all of a file is in the page cache, by a sample of pages. True where the kernel cannot tell."""
    size = os.fstat(fd).st_size
    page, missing = bytearray(1), 0
    for number in range(samples):
        try:
            os.preadv(fd, [page], size * number // samples, os.RWF_NOWAIT)
        except BlockingIOError:
            missing += 1
        except OSError:
            return True
    return missing * 10 <= samples


def available_memory() -> int:
    """Bytes of host memory that can be used without swapping, page cache included (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
