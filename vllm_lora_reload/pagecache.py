"""What of a file the kernel holds in memory, and how to bring the rest there."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .files import open_regular

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

_BLOCK = 4 << 20  # bytes that are brought in at a time
_SAMPLES = 64  # pages of a whole file that are looked at
_SAMPLES_OF_BLOCK = 4
_chance = random.SystemRandom()  # without a seed, which would be somebody's


class _Part(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


_RWF_NOWAIT = 8  # <linux/fs.h>


@cache
def _preadv2() -> Callable[[int, Any, int, int, int], int] | None:
    """libc's, None where it has none. ``os.preadv`` takes no flags in a Python that was built for an old glibc, as uv's
    and conda's are."""
    found = getattr(ctypes.PyDLL(None, use_errno=True), "preadv2", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
        found.restype = ctypes.c_ssize_t
    return found


def cached(fd: int, start: int, stop: int, samples: int = _SAMPLES_OF_BLOCK) -> float | None:
    """Part of the bytes from `start` to `stop` that is in the page cache, by a sample of pages.

    Asked by ``preadv2`` with RWF_NOWAIT, which has the kernel read the pages that it was asked about: each time others
    are taken, else a file that is not there would be there the second time. (``mincore`` has no such effect, but tells
    a process that may not write to the file that all is there.)

    Returns:
        None where that cannot be known, as on file systems with a cache of their own.
    """
    read = _preadv2()
    if read is None:
        return None
    byte = ctypes.create_string_buffer(1)
    part = ctypes.byref(_Part(ctypes.addressof(byte), 1))
    first, last = start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE)
    samples = max(1, min(samples, last - first))
    found = 0
    for number in range(samples):
        page = first + int((last - first) * (number + _chance.random()) / samples)
        if read(fd, part, 1, page * mmap.PAGESIZE, _RWF_NOWAIT) >= 0:
            found += 1
        elif ctypes.get_errno() != errno.EAGAIN:
            return None
    return found / samples


def cached_of_file(fd: int) -> float | None:
    """`cached` of a whole file."""
    return cached(fd, 0, os.fstat(fd).st_size, _SAMPLES)


def bring_in(paths: Sequence[Path], given_up: threading.Event, ranks: int = 1) -> None:
    """Read what is missing of files, until it is `given_up`.

    As many as fit into half of the free memory, of which each of `ranks` processes of this host takes its part.
    """
    block = bytearray(_BLOCK)
    path: Path | None = None
    try:
        room = available_memory() // 2 // ranks
        for path in paths:
            with open_regular(path) as file:
                fd = file.fileno()
                size = os.fstat(fd).st_size
                shares = {start: cached(fd, start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)}
                missing = [start for start, share in shares.items() if share != 1]
                if None in shares.values() or len(missing) * _BLOCK > room:
                    continue
                room -= len(missing) * _BLOCK
                for start in missing:
                    if given_up.is_set():
                        return
                    # At the second read Linux counts a page as active, under a lock that costs the many threads of a
                    # restore a third of their speed.
                    os.preadv(fd, [block], start)
                    os.preadv(fd, [block], start)
    except OSError as error:
        logger.warning("%s: %s; reading it when it is needed may be slow", path or "free memory", error)


def available_memory() -> int:
    """Bytes of host memory that this process can have without swapping, page cache included.

    ``MemAvailable``, or what its control group (version 2) leaves of its limit if that is less.
    """
    found = _fields(Path("/proc/meminfo"))["MemAvailable:"] << 10
    for folder in _groups():
        limit = (folder / "memory.max").read_text().strip() if (folder / "memory.max").exists() else "max"
        if limit != "max":
            current, stat = int((folder / "memory.current").read_text()), _fields(folder / "memory.stat")
            found = min(found, int(limit) - current + stat["file"] - stat["shmem"])  # that is in `file`, and stays
    return max(found, 0)


def _groups(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of this process's control group and those above it."""
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines:
        if line.startswith("0::"):
            group = mount / line[3:].lstrip("/")
            return [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return []


def _fields(file: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}
