"""Which bytes of one storage were written: distinct ones, however often and through whatever views."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from operator import itemgetter

import torch

Grid = tuple[
    int, int, tuple[tuple[int, int], ...]
]  # where it starts, bytes of a row, and (rows, bytes apart) of each dim
_STOP = itemgetter(1)


class Extent:
    """Bytes of a storage, a number that is never too high.

    What lies in one piece is kept as intervals, and columns of a matrix (one shard of a fused layer that is stored
    transposed, say) as intervals of its row, so that shards side by side add up. Where columns of several matrices, or
    columns and pieces, cross each other, only what must be distinct is counted.
    """

    def __init__(self) -> None:
        self._pieces = _Intervals()
        self._grids: dict[Grid, _Intervals] = {}
        self._parts: dict[tuple[int, int], int] = {}
        self._size: int | None = 0

    def add(self, tensor: torch.Tensor, most: int | None = None) -> None:
        """Count the bytes of a view of the storage.

        Args:
            most: how many of them, if not all, and nobody knows which.
        """
        item = tensor.element_size()
        start = int(tensor.storage_offset()) * item
        rows, run = _rows_and_run(tensor.shape, tensor.stride(), item)
        if rows is None:
            return
        self._size = None
        stop = start + run + sum((count - 1) * apart for count, apart in rows)
        if most is not None and most < tensor.numel() * item:
            self._parts[start, stop] = max(most, self._parts.get((start, stop), 0))
        elif not rows:
            self._pieces.add(start, stop)
        else:
            pitch = rows[-1][1]
            column = start % pitch
            grid = (start - column, pitch, rows)
            columns = self._grids.setdefault(grid, _Intervals())
            columns.add(column, min(column + run, pitch))
            if columns.size == pitch:
                self._whole_rows(grid)

    def _whole_rows(self, grid: Grid) -> None:
        """All columns were written: it is a matrix with rows as long as they are apart, and may be all in one piece."""
        start, pitch, rows = grid
        del self._grids[grid]
        *outer, (count, _) = rows
        starts = [start]
        for more, apart in outer:
            starts = [at + number * apart for at in starts for number in range(more)]
        for at in starts:
            self._pieces.add(at, at + count * pitch)

    @property
    def size(self) -> int:
        """How many bytes were written, or fewer."""
        if self._size is None:
            self._size = self._pieces.size + self._beside()
        return self._size

    def _beside(self) -> int:
        """Bytes outside the pieces: the best choice of grids and parts that do not cross."""
        spans: list[tuple[int, int, int]] = []
        for (start, pitch, rows), columns in self._grids.items():
            cells = columns.size
            for count, _ in rows:
                cells *= count
            spans.append((start, start + pitch + sum((count - 1) * apart for count, apart in rows), cells))
        spans += [(start, stop, most) for (start, stop), most in self._parts.items()]
        spans.sort(key=_STOP)
        stops = [0]
        best = [0]
        for start, stop, cells in spans:
            value = max(0, cells - self._pieces.between(start, stop))
            before = best[bisect_right(stops, start) - 1]
            stops.append(stop)
            best.append(max(best[-1], before + value))
        return best[-1]


def _rows_and_run(
    shape: Iterable[int], strides: Iterable[int], item: int
) -> tuple[tuple[tuple[int, int], ...] | None, int]:
    """The dims (count, bytes apart), the widest first, of a view's runs of bytes, and a run's length; None if empty."""
    dims = [(size, stride * item) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(size == 0 for size, _ in dims):
        return None, 0
    run = item
    rows: list[tuple[int, int]] = []
    for size, apart in sorted(((size, apart) for size, apart in dims if apart), key=_STOP):
        if not rows and apart == run:
            run *= size
        elif rows and apart == rows[-1][0] * rows[-1][1]:
            rows[-1] = (rows[-1][0] * size, rows[-1][1])
        else:
            rows.append((size, apart))
    return tuple(reversed(rows)), run


class _Intervals:
    """A set of integers in disjoint intervals ``[start, stop)``."""

    def __init__(self) -> None:
        self._all: list[tuple[int, int]] = []
        self.size = 0

    def add(self, start: int, stop: int) -> None:
        first = bisect_left(self._all, start, key=_STOP)
        last = first
        merged = (start, stop)
        while last < len(self._all) and self._all[last][0] <= stop:
            old = self._all[last]
            self.size -= old[1] - old[0]
            merged = (min(merged[0], old[0]), max(merged[1], old[1]))
            last += 1
        del self._all[first:last]
        insort(self._all, merged)
        self.size += merged[1] - merged[0]

    def between(self, start: int, stop: int) -> int:
        """How many of them are in ``[start, stop)``."""
        total = 0
        for at in range(bisect_right(self._all, start, key=_STOP), len(self._all)):
            left, right = self._all[at]
            if left >= stop:
                break
            total += min(right, stop) - max(left, start)
        return total
