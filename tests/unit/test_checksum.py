"""Digests: the definition, what changes them, and the kernel in Triton's interpreter.

Run as a program, prints the kernel's digests of `launches`: the interpreter has to be chosen before Triton is imported.
"""

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lora_reload import checksum
from vllm_lora_reload.checksum import COLUMNS, ROWS, TILE_BYTES, digests, weights

ROOT = Path(__file__).parents[2]
MASK = 2**64 - 1
BLOCK = 64 * TILE_BYTES
FROZEN = ["e220a8397b1dcdaf", "71d7ccc39f8463b3", "f9e84ff6c0b4c23e", "d6e34d98880c04e1"]


def content(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(tensor: torch.Tensor) -> int:
    return digests([tensor])[0]


def tensors() -> list[torch.Tensor]:
    """Every path of the kernel, in one launch."""
    data = content(4 * TILE_BYTES + 64)
    start = -data.data_ptr() % 16
    parts = [(0, 0), (0, 1), (1, 7), (3, 8), (0, 9), (2, 4097), (0, 5000), (0, 0), (0, 0)]
    parts += [(0, TILE_BYTES + extra) for extra in (-8, -1, 0, 1, 16)]
    parts += [(16, 3 * TILE_BYTES), (8, TILE_BYTES), (7, 2 * TILE_BYTES + 5), (0, 2 * TILE_BYTES + 16)]
    found = [data[start + at : start + at + size] for at, size in parts]
    found += [torch.tensor(1.5), torch.tensor([True]), torch.tensor([1 - 2j]), content(64).view(torch.bfloat16)]
    found += [torch.full((3, 5), -1, dtype=torch.int16), content(48).view(torch.float8_e4m3fn).view(4, 12)]
    return [*found, torch.empty(2, 0)]


def launches() -> list[list[torch.Tensor]]:
    return [tensors(), [content(TILE_BYTES + 9)], [torch.empty(0)]]


def mix(value: int, steps: int) -> int:
    """The textbook's SplitMix64, in unsigned numbers."""
    z = (value + (steps + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_definition(data: bytes) -> int:
    padded = data + bytes(-len(data) % TILE_BYTES)
    words = struct.unpack(f"<{len(padded) // 8}q", padded)
    lower = [mix(0, 2 * row) | 1 for row in range(ROWS)]
    upper = [(mix(0, 2 * row + 1) - (mix(0, 2 * row + 1) >> 63 << 64) >> 32) | 1 for row in range(ROWS)]
    total = 0
    for tile in range(len(words) // (ROWS * COLUMNS)):
        for column in range(COLUMNS):
            ours = words[tile * ROWS * COLUMNS + column :: COLUMNS]
            terms = (w * low + (w >> 32) * up for w, low, up in zip(ours, lower, upper, strict=False))
            total += mix(sum(terms), tile * COLUMNS + column)
    return mix(total, len(data))


@pytest.mark.parametrize("size", [0, 1, 8, 4095, TILE_BYTES - 1, TILE_BYTES, 2 * TILE_BYTES + 3])
def test_definition(size: int) -> None:
    data = content(size)
    assert digest(data) == by_definition(bytes(data.tolist()))


def test_blocks_of_a_large_tensor() -> None:
    """Also that one tensor's rest in the scratch memory does not reach the next one's digest."""
    large, small = content(BLOCK + TILE_BYTES + 5), content(11)
    assert digests([large, small]) == [by_definition(bytes(each.tolist())) for each in (large, small)]


def test_frozen() -> None:
    """Digests are kept in files: other numbers need another version of the files."""
    ramp = torch.arange(2 * TILE_BYTES + 1).to(torch.uint8)
    found = digests([ramp[:0], torch.zeros(1), torch.arange(1000.0), ramp])
    assert [f"{each:016x}" for each in found] == FROZEN


def test_only_bytes_count() -> None:
    data = content(4096)
    elsewhere = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    same = [data.view(torch.float32), data.view(torch.bfloat16).view(2, 8, 128), data.view(torch.bool), elsewhere]
    same.append(torch.cat([torch.zeros(3), data.view(torch.float32)])[3:])
    assert {digest(data)} == set(digests([*same, torch.nn.Parameter(data.view(torch.int64), requires_grad=False)]))
    assert digests([torch.tensor(1.5), torch.tensor([[1.5]])]) == [digest(torch.tensor(1.5))] * 2


def test_all_are_in_order() -> None:
    some = [content(size, seed=size) for size in (0, 5, 70000, 1, 5)]
    assert digests(some) == [digest(each) for each in some]
    assert digests(some[::-1]) == digests(some)[::-1]
    assert digests([]) == []


def test_default_device_does_not_matter() -> None:
    data = [content(100), content(0)]
    expected = digests(data)
    weights.cache_clear()
    with torch.device("meta"):
        assert digests(data) == expected


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 of shape \[3, 2\] is not contiguous"):
        digests([torch.zeros(1), torch.zeros(2, 3).t()])
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        digests([torch.zeros(1), torch.zeros(1, device="meta")])


def test_weights() -> None:
    """What the module says of two flipped bits."""
    of_halves = [weight for lower, upper in weights() for weight in (lower, lower * 2**32 + upper)]
    assert all(weight % 2 for weight in of_halves)
    assert len({signed % 2**33 for weight in of_halves for signed in (weight, -weight)}) == 4 * ROWS


SIZES = st.integers(1, 3 * TILE_BYTES)


@settings(deadline=None)
@given(SIZES, st.data())
def test_a_flipped_bit(size: int, draw: st.DataObject) -> None:
    data = content(size)
    before = digest(data)
    data[draw.draw(st.integers(0, size - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert digest(data) != before


@settings(deadline=None)
@given(st.lists(st.integers(0, ROWS * 2 - 1), min_size=2, max_size=2, unique=True), st.integers(0, 31), st.booleans())
def test_two_flipped_bits_in_a_column(halves: list[int], bit: int, zeros: bool) -> None:
    data = content(TILE_BYTES) * (not zeros)
    before = digest(data)
    for half in halves:
        data[half // 2 * COLUMNS * 8 + half % 2 * 4 + bit // 8] ^= 1 << bit % 8
    assert digest(data) != before


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_all_signs_flipped(dtype: torch.dtype, zeros: bool) -> None:
    data = (content(3 * TILE_BYTES) * (not zeros)).view(dtype)
    assert digest(-data) != digest(data)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 4096, TILE_BYTES]), st.data())
def test_swapped(unit: int, draw: st.DataObject) -> None:
    data = content(4 * TILE_BYTES)
    before = digest(data)
    first, second = draw.draw(
        st.lists(st.integers(0, len(data) // unit - 1), min_size=2, max_size=2, unique=True).filter(
            lambda at: not torch.equal(*(data.view(-1, unit)[each] for each in at))
        )
    )
    data.view(-1, unit)[[first, second]] = data.view(-1, unit)[[second, first]]
    assert digest(data) != before


@settings(deadline=None)
@given(SIZES.filter(lambda size: size > 8), st.data())
def test_moved(size: int, draw: st.DataObject) -> None:
    data = content(size)
    by = draw.draw(st.integers(1, size - 1))
    assert digest(data.roll(by)) != digest(data)


@settings(deadline=None)
@given(SIZES, SIZES, st.booleans())
def test_length_and_a_zeroed_tail(size: int, less: int, zeros: bool) -> None:
    data = content(size + less) * (not zeros)
    tail_lost = data.clone()
    tail_lost[size:] = 0
    cut = digest(data[:size])
    assert cut != digest(tail_lost)
    assert cut != digest(data)
    assert zeros or not data[size:].any() or digest(tail_lost) != digest(data)


def test_kernel_gives_the_same_numbers() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == [digests(some) for some in launches()]


COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from vllm_lora_reload import checksum
signature = {"table": "*i64", "tensors": "i32", "ROWS": "constexpr", "COLUMNS": "constexpr"}
constants = {(2,): checksum.ROWS, (3,): checksum.COLUMNS}
source = ASTSource(checksum._add_tile, signature, constants, {(0,): [["tt.divisibility", 16]]})
targets = [GPUTarget("cuda", capability, 32) for capability in (80, 90)]
print(json.dumps([compile(source, target, {"num_warps": checksum.WARPS}).asm["ptx"] for target in targets]))
"""


def test_kernel_compiles_to_wide_loads(tmp_path: Path) -> None:
    """For Ampere and Hopper. Needs no GPU; the interpreter takes much that the compiler does not."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, stdout=subprocess.PIPE, text=True, check=True)
    for ptx in json.loads(done.stdout):
        assert len(re.findall(r"ld\.global\S*\.(?:v2\.b64|v4\.b32)", ptx)) == ROWS


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without_triton", checksum.__file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.triton is None
    assert module.digests(tensors()) == digests(tensors())


if __name__ == "__main__":
    checksum._totals_torch = checksum._totals_triton
    print(json.dumps([digests(some) for some in launches()]))


@pytest.mark.parametrize(
    "size", [0, 1, 5000, checksum.BLOCK_BYTES, checksum.BLOCK_BYTES + 1, 3 * checksum.BLOCK_BYTES - 7]
)
def test_block_after_block(size: int) -> None:
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert [checksum.digest_of_blocks(content.split(checksum.BLOCK_BYTES))] == checksum.digests([content])
