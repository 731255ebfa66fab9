"""Digests of tensors, computed where the tensors are, at about the speed at which memory can be read.

They detect faults: a lost copy, a wrong address, a flipped bit. They are no defence against somebody who builds content
with a given digest, since all constants are public.

A digest is of bytes alone. They are padded by zeros to tiles of `ROWS` x `COLUMNS` little-endian signed 64-bit words,
and all arithmetic is modulo 2**64:

    lower[r] = mix(0, 2r) | 1
    upper[r] = (mix(0, 2r + 1) >> 32) | 1
    sum[t, c] = sum over r of (word[t, r, c] * lower[r] + (word[t, r, c] >> 32) * upper[r])
    digest = mix(sum over t and c of mix(sum[t, c], t * COLUMNS + c), number of bytes)

where >> keeps the sign, and `mix` is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014): started at the first argument, the value after as many steps as the second one says, and one more.

A column's sum is the multilinear hash of its 32-bit halves (Lemire and Kaser, "Strongly universal string hashing is
fast", 2014), but with odd 64-bit weights: ``lower`` for lower halves, ``lower * 2**32 + upper`` for upper ones. The
terms can be added in any order, and the only operations per word are multiplications and additions. What it misses:

- A change within one half: nothing, as an odd weight times a difference below 2**32 is never 0 modulo 2**64.
- Two flipped bits in one column: nothing. Two top bits would cancel if two weights were the same or opposite modulo
  2**33, as only 33 bits of a weight count there, but no two of these are.
- More changes in one column: were weights drawn at random, the chance that given changes cancel would be at most
  2**(b - 62), where 2**b is the highest power of two that divides what was added to each half. So 2**-31 if only top
  bits of halves changed, and 2**-62 if any change was odd.
- Content that is elsewhere: `mix` is one-to-one in its first argument, so a change in one column is not lost, and
  scatters all 64 bits with the column's place before columns are added, which leaves a chance of 2**-64.
- Zeros appended or cut off: nothing, while the number of tiles stays the same, and a chance of 2**-64 otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:
    triton = None

ROWS = 16
COLUMNS = 512
TILE_BYTES = ROWS * COLUMNS * 8
BLOCK_BYTES = TILE_BYTES * 64  # stays in a core's cache
WARPS = 8  # so each thread has 16 bytes of each row


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64-bit digests of the tensors' bytes, each ``0 <= digest < 2**64``.

    Tensors with the same bytes have the same digest, whatever their shape, dtype, device and address. On CUDA and ROCm
    devices the work is one kernel launch for all tensors, on the current stream, and the call waits for it.

    Args:
        tensors: contiguous, of any shape (also empty) and dtype, at any address, all on one device. Full speed needs
            addresses that are multiples of 16.

    Raises:
        ValueError: a tensor is not contiguous, or they are on several devices.
    """
    if not tensors:
        return []
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {number} of shape {list(tensor.shape)} is not contiguous")
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"the tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    on_gpu = triton is not None and tensors[0].device.type == "cuda"
    totals = _totals_triton(tensors) if on_gpu else _totals_torch(tensors)
    sizes = torch.tensor([tensor.nbytes for tensor in tensors], device="cpu")
    return [digest % 2**64 for digest in _mix(totals, sizes).tolist()]


def _mix(value: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """SplitMix64 of signed 64-bit integers, for torch and for kernels alike: the masks make shifts unsigned."""
    z = value + (steps + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@functools.cache
def weights() -> list[tuple[int, int]]:
    """``(lower, upper)`` of each row, odd, signed, of 64 and of 32 bits."""
    rows = torch.arange(ROWS, device="cpu")
    lower, upper = _mix(0, 2 * rows) | 1, (_mix(0, 2 * rows + 1) >> 32) | 1
    return list(zip(lower.tolist(), upper.tolist(), strict=True))


def _totals_torch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each tensor's sum over its columns, int64 ``[tensors]`` on the CPU. Goes in blocks, to need little memory."""
    device = tensors[0].device
    block = BLOCK_BYTES if device.type == "cpu" else TILE_BYTES * 1024  # keeps a device busy
    largest = max(tensor.nbytes for tensor in tensors)
    scratch = torch.empty(min(block, largest + -largest % TILE_BYTES), dtype=torch.uint8, device=device)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for total, tensor in zip(totals, tensors, strict=True):
        for start in range(0, tensor.nbytes, block):
            total += _total(_bytes(tensor)[start : start + block], start, scratch)
    return totals.cpu()


def _total(part: torch.Tensor, start: int, scratch: torch.Tensor) -> torch.Tensor:
    """What the bytes of a tensor from `start`, a multiple of `TILE_BYTES`, add to its sum; an int64 scalar."""
    padded = scratch[: len(part) + -len(part) % TILE_BYTES]
    padded[: len(part)] = part  # at an aligned address
    padded[len(part) :] = 0
    sums = _column_sums(padded.view(torch.int64).view(-1, ROWS, COLUMNS))
    places = torch.arange(sums.numel(), device=part.device) + start // TILE_BYTES * COLUMNS
    total: torch.Tensor = _mix(sums, places.view_as(sums)).sum()
    return total


def digest_of_blocks(blocks: Iterable[torch.Tensor]) -> int:
    """The digest of bytes that come one block after another.

    Args:
        blocks: uint8 ``[BLOCK_BYTES]`` on the CPU each, the last one ``[BLOCK_BYTES or less]``. One that was digested
            can be written to again.
    """
    scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    total, size = torch.zeros((), dtype=torch.int64, device="cpu"), 0
    for block in blocks:
        total += _total(block, size, scratch)
        size += len(block)
    return int(_mix(total, torch.tensor(size, device="cpu")).item()) % 2**64


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 ``[bytes]``. Unlike ``view``, takes every shape and dtype."""
    start = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory: torch.Tensor = empty.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
    return memory


def _column_sums(words: torch.Tensor) -> torch.Tensor:
    """Sums of columns, int64 ``[tiles, COLUMNS]``, of int64 ``[tiles, ROWS, COLUMNS]``."""
    sums = torch.zeros_like(words[:, 0])
    for row, (lower, upper) in enumerate(weights()):
        sums.add_(words[:, row], alpha=lower)
        sums.add_(words[:, row] >> 32, alpha=upper)
    return sums


def _totals_triton(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `_totals_torch`, by one launch."""
    sizes = [tensor.nbytes for tensor in tensors]
    first = [0, *itertools.accumulate(-(-size // TILE_BYTES) for size in sizes)]
    if first[-1] == 0:
        return torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
    rows = [(tensor.data_ptr(), size, at, 0) for tensor, size, at in zip(tensors, sizes, first[:-1], strict=True)]
    device = tensors[0].device
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _add_tile[(first[-1],)](table, len(tensors), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return table.cpu()[:, 3]


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    return triton.jit(**options) if triton is not None else lambda function: function


_mix_in_kernel = _jit()(_mix)


@_jit(do_not_specialize=["tensors"])
def _add_tile(table: tl.tensor, tensors: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """Add one tile's columns to its tensor's total.

    Args:
        table: int64 ``[tensors, 4]``: address, bytes, number of its first tile, total.
        tensors: how many.
    """
    TILE_BYTES: tl.constexpr = ROWS * COLUMNS * 8
    tile = tl.program_id(0)
    low = 0
    high = tensors - 1
    while low < high:  # the last tensor that does not start after the tile; an empty one starts where the next does
        middle = (low + high + 1) // 2
        after = tl.load(table + 4 * middle + 2) > tile
        low = tl.where(after, low, middle)
        high = tl.where(after, middle - 1, high)
    entry = table + 4 * low
    address = tl.load(entry)
    index = tile - tl.load(entry + 2)
    left = tl.load(entry + 1) - index * TILE_BYTES
    start = address + index * TILE_BYTES

    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.int64)
    if (address % 16 == 0) & (left >= TILE_BYTES):
        words_at = tl.multiple_of(start.to(tl.pointer_type(tl.int64)), 16) + columns
        for row in tl.static_range(ROWS):  # so weights are constants
            words = tl.load(words_at + row * COLUMNS, eviction_policy="evict_first")
            number = tl.full((), row, tl.int64)
            sums += words * (_mix_in_kernel(0, 2 * number) | 1)
            sums += (words >> 32) * ((_mix_in_kernel(0, 2 * number + 1) >> 32) | 1)
    else:
        bytes_at = start.to(tl.pointer_type(tl.uint8))
        for row in range(tl.cdiv(tl.minimum(left, TILE_BYTES), COLUMNS * 8)):  # further rows are zero
            offsets = (row * COLUMNS + columns) * 8
            words = tl.zeros([COLUMNS], tl.int64)
            for byte in tl.static_range(8):
                value = tl.load(bytes_at + offsets + byte, mask=offsets + byte < left, other=0)
                words |= value.to(tl.int64) << (8 * byte)
            number = tl.full((), row, tl.int64)
            sums += words * (_mix_in_kernel(0, 2 * number) | 1)
            sums += (words >> 32) * ((_mix_in_kernel(0, 2 * number + 1) >> 32) | 1)
    mixed = _mix_in_kernel(sums, index * COLUMNS + columns)
    tl.atomic_add(entry + 3, tl.sum(mixed), sem="relaxed")
