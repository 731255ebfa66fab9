"""Reads of files into memory, several at a time, begun and collected by one Python thread.

Where glibc is, its POSIX AIO threads do them (``aio_read(3)``): they never need Python's lock. Python threads need it
after each read, and with a dozen of them that costs more than 100 microseconds a read, which with reads of 4 MiB is as
much as the bus needs.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Protocol

import torch

_SIGEV_NONE = 1


class Reads(Protocol):
    """Reads by number of the slot that they are for; one at a time in each slot.

    Attributes:
        ahead: how many to have begun at the most. Where they wait their turn these are more than go on at a time: then
            no thread is idle between the end of one and the start of the next.
        spin: how long to go on asking before waiting pays, in seconds.
    """

    ahead: int
    spin: float

    def start(self, slot: int, fd: int, buffer: torch.Tensor, offset: int) -> None:
        """Begin to fill `buffer` (uint8, contiguous) from byte `offset` of a file.

        Raises:
            OSError: it cannot be begun.
        """

    def done(self, slot: int) -> int | None:
        """How many bytes came, 0 at the end of the file; None while the read is going on.

        Raises:
            OSError: it failed.
        """

    def wait(self, slots: Collection[int], seconds: float) -> None:
        """Return when one of some reads that are going on is done, or later than `seconds`."""

    def close(self) -> None:
        """Wait for all that are going on, whatever comes of them, and give back what they needed."""


class ThreadReads:
    """By Python threads."""

    spin = 0.0  # they would wait for the lock of the thread that spins

    def __init__(self, slots: int, threads: int) -> None:
        self.ahead = slots
        self._pool = ThreadPoolExecutor(threads, "lora-reload-ring")
        self._reads: dict[int, Future[int]] = {}

    def start(self, slot: int, fd: int, buffer: torch.Tensor, offset: int) -> None:
        self._reads[slot] = self._pool.submit(os.preadv, fd, [buffer.numpy().data], offset)

    def done(self, slot: int) -> int | None:
        return self._reads[slot].result() if self._reads[slot].done() else None

    def wait(self, slots: Collection[int], seconds: float) -> None:
        wait([self._reads[slot] for slot in slots], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        self._pool.shutdown()


class _Control(ctypes.Structure):
    """``struct aiocb`` of glibc on 64-bit machines, ``<bits/types/struct_aiocb.h>``; `_private` is its own."""

    _fields_ = [
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("_sigev_rest", ctypes.c_byte * 48),
        ("_private", ctypes.c_byte * 32),
        ("offset", ctypes.c_int64),
        ("_reserved", ctypes.c_byte * 32),
    ]


class _Options(ctypes.Structure):
    """``struct aioinit`` of glibc, ``<aio.h>``."""

    _fields_ = [("threads", ctypes.c_int), ("num", ctypes.c_int), ("_unused", ctypes.c_int * 4)]
    _fields_ += [("idle_time", ctypes.c_int), ("_reserved", ctypes.c_int)]


class _Seconds(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Library:
    """The calls that are used. Short ones keep Python's lock, which costs less than to get it back."""

    def __init__(self, keeping: ctypes.PyDLL, releasing: ctypes.CDLL) -> None:
        self.read: Callable[[Any], int] = keeping.aio_read
        self.error: Callable[[Any], int] = keeping.aio_error
        self.result: Callable[[Any], int] = keeping.aio_return
        keeping.aio_return.restype = ctypes.c_ssize_t
        self.suspend: Callable[[Any, int, Any], int] = releasing.aio_suspend
        self._init: Callable[[Any], None] = keeping.aio_init
        self._threads = 0
        self.forked = False

    def threads(self, wanted: int) -> int:
        """How many threads glibc reads with at the most. The first to ask decides, for the whole process."""
        if not self._threads:
            self._init(ctypes.byref(_Options(threads=wanted, num=2 * wanted, idle_time=1)))
            self._threads = wanted
        return self._threads

    def in_child(self) -> None:
        """A fork leaves the threads out, which glibc does not notice."""
        self.forked = True


@cache
def _library() -> _Library | None:
    """glibc's; None on other machines."""
    name = "CS_GNU_LIBC_VERSION"  # other libraries have another struct aiocb
    try:
        if name not in os.confstr_names or not os.confstr(name) or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
        library = _Library(ctypes.PyDLL("librt.so.1", use_errno=True), ctypes.CDLL("librt.so.1", use_errno=True))
    except (OSError, AttributeError):
        return None
    os.register_at_fork(after_in_child=library.in_child)
    return library


class NativeReads:
    """By glibc's threads. Each slot has a file descriptor of its own, as reads of one go one after another.

    Descriptors that are given to `start` stay open until `close`.
    """

    spin = 0.0003

    def __init__(self, slots: int, threads: int) -> None:
        library = _library()
        if library is None:
            raise OSError(errno.ENOSYS, "this machine has no POSIX AIO of glibc")
        self.ahead = slots if library.threads(threads) <= threads else threads
        self._library = library
        self._controls = [_Control(sigev_notify=_SIGEV_NONE) for _ in range(slots)]
        self._references = [ctypes.byref(control) for control in self._controls]
        self._addresses = [ctypes.addressof(control) for control in self._controls]
        self._buffers: list[torch.Tensor | None] = [None] * slots  # they live as long as they are written to
        self._files: dict[int, int] = {}
        self._sources: dict[int, int] = {}  # of which they are copies

    def start(self, slot: int, fd: int, buffer: torch.Tensor, offset: int) -> None:
        control = self._controls[slot]
        if slot not in self._files:
            self._files[slot] = os.dup(fd)
        elif self._sources[slot] != fd:
            os.dup2(fd, self._files[slot], inheritable=False)
        self._sources[slot] = fd
        control.fildes, control.offset = self._files[slot], offset
        self._buffers[slot] = buffer
        control.buf, control.nbytes = buffer.data_ptr(), buffer.numel()
        if self._library.read(self._references[slot]) != 0:
            _raise(ctypes.get_errno())

    def done(self, slot: int) -> int | None:
        error = self._library.error(self._references[slot])
        if error == errno.EINPROGRESS:
            return None
        got = self._library.result(self._references[slot])
        if error:
            _raise(error)
        return got

    def wait(self, slots: Collection[int], seconds: float) -> None:
        some = (ctypes.c_void_p * len(slots))(*(self._addresses[slot] for slot in slots))
        limit = _Seconds(int(seconds), int(seconds % 1 * 1e9))
        self._library.suspend(some, len(slots), ctypes.byref(limit))

    def close(self) -> None:
        for slot in self._files:
            while self._library.error(self._references[slot]) == errno.EINPROGRESS:
                self.wait([slot], 1.0)
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _raise(error: int) -> None:
    raise OSError(error, os.strerror(error))


def reads_for(slots: int, threads: int) -> Reads:
    """The fastest kind that there is here, for as many slots, `threads` reads going on at a time."""
    library = _library()
    return (ThreadReads if library is None or library.forked else NativeReads)(slots, threads)
