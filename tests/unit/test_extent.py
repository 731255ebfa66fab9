"""Distinct bytes of a storage that were written, against a mask of every byte."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lora_reload.extent import Extent

Cut = tuple[int, int, int]


def written(*views: torch.Tensor) -> int:
    extent = Extent()
    for view in views:
        extent.add(view)
    return extent.size


def truth(storage: torch.Tensor, *views: torch.Tensor) -> int:
    """Of float32 views."""
    mask = torch.zeros(storage.numel(), dtype=torch.bool)
    for view in views:
        mask.as_strided(view.shape, view.stride(), int(view.storage_offset())).fill_(True)
    return int(mask.sum()) * 4


WEIGHT = torch.zeros(6, 8)
STACK = torch.zeros(4, 6, 8)
EXACT: dict[str, list[torch.Tensor]] = {
    "the whole and a shard": [WEIGHT, WEIGHT[:2]],
    "shards of rows": [WEIGHT[:2], WEIGHT[2:3], WEIGHT[3:]],
    "shards of rows that overlap": [WEIGHT[:4], WEIGHT[2:]],
    "rows that leave one out": [WEIGHT[:2], WEIGHT[3:], WEIGHT[4:5]],
    "shards of columns": [WEIGHT[:, :2], WEIGHT[:, 5:], WEIGHT[:, 2:5]],
    "shards of columns that overlap": [WEIGHT[:, :3], WEIGHT[:, 2:5], WEIGHT[:, 2:4]],
    "all columns, and once more": [WEIGHT[:, :4], WEIGHT[:, 4:], WEIGHT[:, 1:3], WEIGHT[2]],
    "transposed": [WEIGHT.t(), WEIGHT.t()[:, :3]],
    "every second element": [WEIGHT.view(-1)[::2], WEIGHT.view(-1)[1::2]],
    "one column": [WEIGHT[:, 3], WEIGHT[:, 3:4]],
    "experts one after another": [*STACK, STACK[1]],
    "columns of experts": [part for expert in STACK for part in (expert[:, :3], expert[:, 3:])],
    "columns of some experts": [STACK[0][:, :3], STACK[2][:, 3:], STACK[2][:, 2:5]],
    "columns of all experts at once": [STACK[:, :, :3], STACK[:, :, 3:6]],
    "rows of all experts at once": [STACK[:, :2], STACK[:, 4:], STACK[:, 3:5]],
    "repeated": [WEIGHT[:1].expand(4, 8)],
    "nothing": [WEIGHT[:0], WEIGHT[:, :0]],
    "a number": [torch.zeros(())],
}


@pytest.mark.parametrize("views", EXACT.values(), ids=EXACT)
def test_exact(views: list[torch.Tensor]) -> None:
    storage = views[0].as_strided((views[0].untyped_storage().nbytes() // 4,), (1,), 0)
    assert written(*views) == truth(storage, *views)


def cut(tensor: torch.Tensor, cuts: list[Cut]) -> torch.Tensor:
    for dim, (start, stop, step) in enumerate(cuts):
        tensor = tensor[(slice(None),) * dim + (slice(start, stop, step),)]
    return tensor


CUT: st.SearchStrategy[Cut] = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 3))
SHAPES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda flat: flat.view(6, 6, 6),
    lambda flat: flat.view(6, 6, 6).permute(2, 0, 1),
    lambda flat: flat.view(6, 36),
    lambda flat: flat,
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.lists(CUT, max_size=3)), max_size=8))
def test_never_more_than_there_is_and_never_less_than_before(
    writes: list[tuple[Callable[[torch.Tensor], torch.Tensor], list[Cut]]],
) -> None:
    flat = torch.zeros(216)
    extent, views, before = Extent(), [], 0
    for shape, cuts in writes:
        shaped = shape(flat)
        views.append(cut(shaped, cuts[: shaped.ndim]))
        extent.add(views[-1])
        assert before <= extent.size <= truth(flat, *views)
        assert extent.size >= truth(flat, views[-1])
        before = extent.size


def test_a_part_that_nobody_knows_counts_once() -> None:
    extent = Extent()
    extent.add(WEIGHT, most=50)
    extent.add(WEIGHT, most=40)
    assert extent.size == 50
    extent.add(WEIGHT[:1])
    assert extent.size == 50, "these 32 bytes may be among the 50"
    extent.add(WEIGHT)
    assert extent.size == 192
