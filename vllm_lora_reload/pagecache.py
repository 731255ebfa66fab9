"""What of a file the kernel holds in memory, and how to bring the rest there."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

_BLOCK = 4 << 20  # bytes that are brought in at a time
_SAMPLES = 64  # pages of a whole file that are looked at
_FEW = 4  # of a block


@cache
def _libc() -> Any:
    return ctypes.PyDLL(None, use_errno=True)


class PageCache:
    """Which pages of an open file are in memory, by ``mincore(2)``.

    ``preadv`` with RWF_NOWAIT tells as well, but has the kernel read the pages that it was asked about, so that the
    second time they are all there. Where nothing can be known, all is said to be there: Linux says so itself to a
    process that may not write to the file; other systems, and file systems that map no files, cannot be asked.
    """

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._map: mmap.mmap | None = None
        self._address = 0
        if self._size and hasattr(_libc(), "mincore"):
            try:
                self._map = mmap.mmap(fd, self._size, prot=mmap.PROT_READ)
            except OSError:
                return
            self._address = numpy.frombuffer(self._map, numpy.uint8).ctypes.data  # never read from

    def share(self, start: int = 0, stop: int | None = None, samples: int = _SAMPLES) -> float:
        """Part of the bytes from `start` to `stop` that is in memory, by a sample of pages; 1.0 where it is unknown."""
        stop = self._size if stop is None else min(stop, self._size)
        if self._map is None or stop <= start:
            return 1.0
        found, page = ctypes.c_ubyte(), mmap.PAGESIZE
        first, last = start // page, (stop - 1) // page
        places = sorted({first + (last - first) * number // max(1, samples - 1) for number in range(samples)})
        present = 0
        for place in places:
            if _libc().mincore(ctypes.c_void_p(self._address + place * page), ctypes.c_size_t(1), ctypes.byref(found)):
                return 1.0
            present += found.value & 1
        return present / len(places)

    def has(self, start: int, stop: int) -> bool:
        """Whether a block is in memory, by its first and last page and some between."""
        return self.share(start, stop, _FEW) == 1.0

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def bring_in(paths: Sequence[Path], given_up: threading.Event) -> None:
    """Read files from where something is missing, if that fits into half of the free memory, until it is `given_up`."""
    block = bytearray(_BLOCK)
    try:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                fd, size = file.fileno(), os.fstat(file.fileno()).st_size
                pages = PageCache(fd)
                try:
                    if size * (1 - pages.share()) > available_memory() // 2:
                        continue
                    blocks = range(0, size, _BLOCK)
                    missing = next((start for start in blocks if not pages.has(start, start + _BLOCK)), size)
                    for start in range(missing, size, _BLOCK):
                        if given_up.is_set():
                            return
                        # At the second read Linux counts a page as active, under a lock that costs the many threads
                        # of a restore a third of their speed.
                        os.preadv(fd, [block], start)
                        os.preadv(fd, [block], start)
                finally:
                    pages.close()
    except OSError as error:
        logger.warning("%s: %s; reading it when it is needed may be slow", path, error)


def available_memory() -> int:
    """Bytes of host memory that can be used without swapping, page cache included (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
