"""Digests on the device: the compiled kernel, and what stands in for it where there is no Triton."""

import importlib.util

import pytest
import torch

from vllm_lora_reload import checksum
from vllm_lora_reload.checksum import TILE_BYTES, digests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GIB = 1 << 30


def on_gpu(tensors: list[torch.Tensor], device: str = "cuda") -> list[torch.Tensor]:
    """Copies at the same distance from an address that is a multiple of 16."""
    copies = []
    for number, tensor in enumerate(tensors):
        shift = (number % 5) * tensor.element_size()  # 0: the wide loads
        copies.append(torch.empty(shift + tensor.numel(), dtype=tensor.dtype, device=device)[shift:].view_as(tensor))
        copies[-1].copy_(tensor)
    return copies


def content(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def many() -> list[torch.Tensor]:
    """Each size at five alignments."""
    sizes = [
        0,
        1,
        7,
        8,
        9,
        4095,
        5000,
        TILE_BYTES - 1,
        TILE_BYTES,
        TILE_BYTES + 1,
        3 * TILE_BYTES,
        100 * TILE_BYTES + 5,
    ]
    found = [content(size) for size in sizes for _ in range(5)]
    found += [content(1 << 16).view(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64) for _ in "12345"]
    return [*found, *(content(n % 700) for n in range(3000)), torch.tensor(1.5), torch.empty(2, 0)]


def test_kernel_gives_the_same_numbers() -> None:
    assert importlib.util.find_spec("triton")
    expected = digests(many())
    tensors = on_gpu(many())
    assert digests(tensors) == expected
    assert [digests([tensor])[0] for tensor in tensors[:80]] == expected[:80]


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "triton", None)
    assert digests(on_gpu(many())) == digests(many())


def test_same_every_time() -> None:
    tensors = [torch.randint(0, 1 << 31, (n << 20,), device="cuda") for n in (1, 3, 17)]
    assert len({tuple(digests(tensors)) for _ in range(3)}) == 1


def test_after_work_that_is_not_done_yet() -> None:
    large, small = torch.zeros(GIB // 4, device="cuda"), content(1 << 20)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            large += 1
        assert digests([large, small.cuda()]) == digests([torch.full((GIB // 4,), 20.0), small])


def test_more_than_4_gib() -> None:
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB of free GPU memory")
    large = torch.zeros(5 * GIB + 3, dtype=torch.uint8, device="cuda")
    large[:: 1 << 20] = 7
    before = digests([large])
    assert before[0] == checksum_without_kernel(large)
    large[-1] ^= 1
    assert digests([large]) != before


def checksum_without_kernel(tensor: torch.Tensor) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "triton", None)
        return digests([tensor])[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one() -> None:
    assert digests(on_gpu(many(), "cuda:1")) == digests(many())
    with pytest.raises(ValueError, match="several devices"):
        digests([torch.zeros(1, device="cuda:0"), torch.zeros(1, device="cuda:1")])
