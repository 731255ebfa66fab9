"""Which parameters count as loaded: by what was written, not by what was said."""

import pytest
import torch
from torch import nn

from vllm_lora_reload.coverage import Coverage, FirstLoad


class Model(nn.Module):
    """A fused layer of two shards, a norm, and a scale that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(4, 6, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.attn = nn.Module()
        self.attn.scale = nn.Parameter(torch.ones(1))

    def load(self, *what: str) -> None:
        parts = {"a": self.fused.weight[:2], "b": self.fused.weight[2:], "norm": self.norm.weight}
        for name in what:
            parts[name].copy_(torch.ones_like(parts[name]))


@pytest.fixture
def model() -> Model:
    return Model().requires_grad_(False)


def covered(model: Model, *first_load: str) -> Coverage:
    first = FirstLoad(model)
    with first.recording():
        model.load(*first_load)
    coverage = Coverage(model, first)
    coverage.lose()
    return coverage


def test_reference_is_what_the_first_load_wrote(model: Model) -> None:
    coverage = covered(model, "a", "b", "norm")
    assert coverage.missing() == ["fused.weight", "norm.weight"]
    assert coverage.total == 2
    assert coverage.unloaded == [model.attn.scale]


def test_ticks_off_across_loads(model: Model) -> None:
    coverage = covered(model, "a", "b", "norm")
    for what, missing in (
        ("b", ["fused.weight", "norm.weight"]),
        ("norm", ["fused.weight"]),
        ("b", ["fused.weight"]),
        ("a", []),
    ):
        with coverage.recording():
            model.load(what)
        assert coverage.missing() == missing


def test_padding_that_no_load_writes_is_not_waited_for(model: Model) -> None:
    coverage = covered(model, "a", "norm")
    with coverage.recording():
        model.load("a", "norm")
    assert coverage.missing() == []


def test_lost_again_means_all_again(model: Model) -> None:
    coverage = covered(model, "a", "b", "norm")
    with coverage.recording():
        model.load("a", "b")
    coverage.lose()
    with coverage.recording():
        model.load("norm")
    assert coverage.missing() == ["fused.weight"]


def test_replaced_parameter_is_not_waited_for(model: Model) -> None:
    """A load may put a new tensor in the place of one that was lost."""
    coverage = covered(model, "a", "b", "norm")
    lost = model.norm.weight
    with coverage.recording():
        model.norm.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert coverage.missing() == ["fused.weight"]
    assert lost is not model.norm.weight


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.fill_(1),
        lambda weight: torch._foreach_copy_([weight.data], [torch.ones(6, 4)]),
        lambda weight: weight.view(-1).index_copy_(0, torch.arange(24), torch.ones(24)),
        lambda weight: torch.add(torch.ones(6, 4), 1, out=weight.data),
    ],
    ids=["fill", "foreach", "index", "out"],
)
def test_every_way_of_writing_counts(model: Model, write: object) -> None:
    coverage = covered(model, "a", "b", "norm")
    with coverage.recording():
        write(model.fused.weight)  # type: ignore[operator]
    assert coverage.missing() == ["norm.weight"]


def test_reading_does_not_count(model: Model) -> None:
    coverage = covered(model, "a", "b", "norm")
    with coverage.recording():
        _ = model.fused.weight.clone() + model.fused.weight.sum()
    assert "fused.weight" in coverage.missing()


def test_layer_built_on_meta_is_waited_for_as_a_whole() -> None:
    """Online quantization makes the parameter while it loads."""
    model = Model().requires_grad_(False)
    model.fused = nn.Linear(4, 6, bias=False, device="meta")
    first = FirstLoad(model)
    with first.recording():
        model.fused.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
    coverage = Coverage(model, first)
    coverage.lose()
    assert coverage.missing() == ["fused.weight"]
    with coverage.recording():
        model.load("a")
    assert coverage.missing() == ["fused.weight"]
    with coverage.recording():
        model.load("b")
    assert coverage.missing() == []


@pytest.mark.parametrize("watched", [True, False])
def test_without_a_reference_nothing_is_followed(model: Model, watched: bool) -> None:
    """Dummy weights, or a loader that does not go through ``load_weights``."""
    coverage = Coverage(model, FirstLoad(model) if watched else None)
    coverage.lose()
    assert coverage.missing() == [] and coverage.unloaded == []
