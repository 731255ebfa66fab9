"""Which parameters count as loaded: by what was written, not by what was said."""

from typing import Any

import pytest
import torch
from torch import nn

from vllm_lora_reload.coverage import Coverage, FirstLoad, identity


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
        lambda weight: weight.data.fill_(torch.tensor(3.0)),
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


@pytest.mark.parametrize(
    "fill",
    [
        lambda weight: weight.data.zero_(),
        lambda weight: weight.data.fill_(0),
        lambda weight: weight.data.fill_(torch.tensor(0.0)),
        lambda weight: weight.data.__setitem__(slice(None), 0),
        lambda weight: torch._foreach_zero_([weight.data]),
        lambda weight: weight.data.masked_fill_(torch.ones(6, 4, dtype=torch.bool), 0),
    ],
    ids=["zero", "number", "tensor", "item", "foreach", "masked"],
)
def test_a_constant_is_no_load(model: Model, fill: Any) -> None:
    """Some loaders zero a fused layer before they write its shards."""
    coverage = covered(model, "a", "b", "norm")
    with coverage.recording():
        fill(model.fused.weight)
        model.load("a", "norm")
    assert coverage.missing() == ["fused.weight"]
    with coverage.recording():
        model.load("b")
    assert coverage.missing() == []


def test_a_number_that_a_loader_takes_from_a_tensor_is_one(model: Model) -> None:
    first = FirstLoad(model)
    with first.recording():
        model.attn.scale.data.fill_(3.0)
    coverage = Coverage(model, first)
    coverage.lose()
    assert coverage.missing() == ["attn.scale"]
    with coverage.recording():
        model.attn.scale.data.fill_(0.0)
    assert coverage.missing() == []


def test_shards_that_overlap_count_once(model: Model) -> None:
    coverage = covered(model, "a", "b", "norm")
    weight = model.fused.weight.data
    with coverage.recording():
        for part in (weight[:4], weight[1:5], weight[:, :2], weight[2:4, 1:3]):
            part.copy_(torch.ones_like(part))
    assert "fused.weight" in coverage.missing()
    with coverage.recording():
        weight[5:].copy_(torch.ones(1, 4))
    assert "fused.weight" not in coverage.missing()


def test_what_holds_a_constant_alone_is_kept_over_the_sleep(model: Model) -> None:
    first = FirstLoad(model)
    with first.recording():
        model.load("a", "b")
        model.norm.weight.data.fill_(2)
    coverage = Coverage(model, first)
    assert coverage.needed.keys() == {identity(model.fused.weight)}
    assert any(tensor is model.norm.weight for tensor in coverage.unloaded)


def test_views_of_one_region_count_once(model: Model) -> None:
    """A scale is written as a scalar by one loader and as a vector of one by another."""
    coverage = covered(model, "a", "b", "norm")
    part = model.fused.weight[:2]
    with coverage.recording():
        for view in (part, part.view(-1), part.view(2, 2, 2), part.unsqueeze(1), part[None]):
            view.mul_(1)
        model.fused.weight[3].mul_(1)
        model.fused.weight[3:4].mul_(1)
    assert "fused.weight" in coverage.missing()
    with coverage.recording():
        model.fused.weight[2:, ::2].mul_(1)
        model.fused.weight[2:, 1::2].mul_(1)
    assert "fused.weight" not in coverage.missing()


def test_first_load_that_wrote_some_twice_asks_for_no_more_than_there_is(model: Model) -> None:
    first = FirstLoad(model)
    with first.recording():
        model.fused.weight.fill_(0)
        model.load("a", "b", "norm")
    coverage = Coverage(model, first)
    coverage.lose()
    with coverage.recording():
        model.fused.weight.copy_(torch.ones(6, 4))
    assert coverage.missing() == ["norm.weight"]


def test_address_of_a_freed_tensor_means_nothing() -> None:
    """Quantization frees what was loaded; what it makes may lie at the same address."""
    layer: Any = nn.Module()
    memory = bytearray(64)
    layer.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32)[:4], requires_grad=False)
    layer.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    first = FirstLoad(layer)
    with first.recording():
        layer.scale.fill_(2)
    with first.processing():
        address = layer.weight.data_ptr()
        del layer.weight
        layer.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32)[:2], requires_grad=False)
    assert layer.weight.data_ptr() == address
    coverage = Coverage(layer, first)
    coverage.lose()
    assert sorted(coverage.missing()) == ["scale", "weight"], "made in processing, so a reload has to make it again"
    assert coverage.unloaded == []


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
    assert not first.known, "with dummy weights it stays so"
    with first.recording():
        model.fused.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        model.load("norm")
    coverage = Coverage(model, first)
    coverage.lose()
    assert coverage.missing() == ["fused.weight", "norm.weight"]
    with coverage.recording():
        model.load("a", "norm")
    assert coverage.missing() == ["fused.weight"]
    with coverage.recording():
        model.load("b")
    assert coverage.missing() == []


@pytest.mark.parametrize("shards", [("a",), ("a", "b")])
def test_layer_built_on_meta_is_not_there_with_one_shard(shards: tuple[str, ...]) -> None:
    """A layerwise reload makes it anew, with unset memory, and copies all of that over what runs."""
    model = Model().requires_grad_(False)
    model.fused = nn.Linear(4, 6, bias=False, device="meta")
    first = FirstLoad(model)
    with first.recording():
        model.fused.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        model.load("norm")
    coverage = Coverage(model, first)
    coverage.lose()
    running = model.fused.weight
    with coverage.recording(anew=True):
        model.fused.weight = nn.Parameter(torch.empty(6, 4), requires_grad=False)
        coverage.carry_over(model.fused, {"weight": running})
        model.load(*shards, "norm")
        running.data.copy_(model.fused.weight)
        model.fused.weight = running
    assert coverage.missing() == ([] if shards == ("a", "b") else ["fused.weight"])


class Derives(nn.Module):
    """A layer with all kinds of tensors: loaded, left as built, and derived in place after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = nn.Parameter(torch.ones(2), requires_grad=False)
        self.built = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)
        self.derived = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
        self.register_buffer("loaded_buffer", torch.full((2,), 4.0))
        self.register_buffer("built_buffer", torch.full((2,), 5.0))
        self.register_buffer("derived_buffer", torch.full((2,), 6.0))
        self.register_buffer("absent", None)


def started() -> tuple[nn.Module, Coverage]:
    model = nn.Sequential(Derives(), Derives())
    first = FirstLoad(model)
    layer: Any = model[0]
    with first.recording():
        layer.loaded.copy_(torch.full((2,), 10.0))
        layer.loaded_buffer.copy_(torch.full((2,), 10.0))
    with first.processing():
        layer.loaded.mul_(2)
        layer.derived.copy_(layer.loaded)
        layer.derived_buffer.copy_(layer.loaded)
    return model, Coverage(model, first)


def test_what_processing_derives_is_waited_for_and_what_nobody_writes_is_not() -> None:
    model, coverage = started()
    coverage.lose()
    assert coverage.missing() == ["0.loaded", "0.derived"]
    layers: Any = model
    kept = [layers[0].built, layers[1].loaded, layers[1].built, layers[1].derived]
    assert [id(tensor) for tensor in coverage.unloaded] == [id(tensor) for tensor in kept]


def test_layer_made_anew_gets_what_no_load_writes() -> None:
    """vLLM's layerwise reload copies every tensor of a layer over the running ones, unset memory too."""
    model, coverage = started()
    running = {name: tensor.clone() for name, tensor in (*model[0].named_parameters(), *model[0].named_buffers())}
    layer: Any = model[0]
    for name in running:
        getattr(layer, name).fill_(-1)
    running["built_buffer"] = layer.built_buffer  # never left its place
    coverage.carry_over(layer, running)
    values = {name: float(getattr(layer, name)[0]) for name in running}
    assert values == dict(loaded=-1, built=2, derived=-1, loaded_buffer=10, built_buffer=-1, derived_buffer=-1)
    coverage.carry_over(nn.Linear(1, 1), {})  # a layer that the first load did not touch


class Repacks:
    """A quantization method that rewrites the whole weight in place, whatever was loaded into it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.copy_(layer.weight.flip(0))


@pytest.mark.parametrize("lost", [True, False], ids=["after a loss", "awake"])
@pytest.mark.parametrize("parts", [("a", "b"), ("a",), ()])
def test_layer_made_anew_and_repacked(model: Model, parts: tuple[str, ...], lost: bool) -> None:
    """What a load leaves out of it is missing, though the whole layer is copied over the running one."""
    layer: Any = model.fused
    layer.quant_method = Repacks()
    first = FirstLoad(model)
    with first.recording():
        model.load("a", "b", "norm")
    running = layer.weight
    layer.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)  # kernels want it transposed
    kernel = layer.weight
    coverage = Coverage(model, first)
    if lost:
        coverage.lose()
    with coverage.recording(anew=True):
        layer.weight = nn.Parameter(torch.empty(6, 4), requires_grad=False)
        coverage.carry_over(layer, {"weight": kernel})
        model.load(*parts)
        layer.quant_method.process_weights_after_loading(layer)
        kernel.copy_(layer.weight.t())
        layer.weight = kernel
    assert ("fused.weight" in coverage.missing()) is (parts != ("a", "b"))
    assert ("norm.weight" in coverage.missing()) is lost
    assert "process_weights_after_loading" not in vars(layer.quant_method)
    del running


def test_running_value_that_was_processed_in_place_makes_up_for_nothing(model: Model) -> None:
    """It has the shape and type of what is loaded, but would be processed twice."""
    first = FirstLoad(model)
    with first.recording():
        model.load("a", "b", "norm")
    with first.processing():
        model.norm.weight.mul_(2)
    coverage = Coverage(model, first)
    running = model.norm.weight
    with coverage.recording(anew=True):
        model.norm.weight = nn.Parameter(torch.empty(4), requires_grad=False)
        coverage.carry_over(model.norm, {"weight": running})
        running.copy_(model.norm.weight)
        model.norm.weight = running
    assert coverage.missing() == ["norm.weight"]


def test_layer_made_anew_without_processing(model: Model) -> None:
    first = FirstLoad(model)
    with first.recording():
        model.load("a", "b", "norm")
    with first.processing():
        pass
    coverage = Coverage(model, first)
    running = model.norm.weight
    with coverage.recording(anew=True):
        model.norm.weight = nn.Parameter(torch.empty(4), requires_grad=False)
        coverage.carry_over(model.norm, {"weight": running})
        assert torch.equal(model.norm.weight, running), "nothing was lost, so what the load leaves out stays"
        running.copy_(model.norm.weight)
        model.norm.weight = running
    assert coverage.missing() == []


@pytest.fixture(params=[True, False], ids=["dummy weights", "not watched at all"])
def unwatched(request: pytest.FixtureRequest, model: Model) -> Coverage:
    """Dummy weights, or a loader that does not go through ``load_weights``."""
    coverage = Coverage(model, FirstLoad(model) if request.param else None)
    coverage.lose()
    return coverage


def test_without_a_reference_everything_is_waited_for(model: Model, unwatched: Coverage) -> None:
    assert unwatched.missing() == ["fused.weight", "norm.weight", "attn.scale"] and unwatched.unloaded == []
    for what, missing in (("a", 3), ("norm", 2), ("a", 2), ("b", 1)):
        with unwatched.recording():
            model.load(what)
        assert len(unwatched.missing()) == missing
    with unwatched.recording():
        model.attn.scale.copy_(torch.ones(1))
    assert unwatched.missing() == []


@pytest.mark.parametrize("whole", [True, False])
def test_without_a_reference_padding_counts_after_the_rest(model: Model, unwatched: Coverage, whole: bool) -> None:
    """As embeddings are loaded. What is zeroed before is not loaded."""
    weight = model.fused.weight.data
    with unwatched.recording():
        if whole:
            weight[:4].copy_(torch.ones(4, 4))
            weight[4:].fill_(0)
        else:
            weight.fill_(0)
            weight[:4].copy_(torch.ones(4, 4))
    assert ("fused.weight" in unwatched.missing()) is not whole


def test_without_a_reference_a_rank_of_padding_alone_is_loaded(model: Model, unwatched: Coverage) -> None:
    weight = model.fused.weight.data
    with unwatched.recording():
        weight[:0].copy_(torch.ones(0, 4))
        weight[0:].fill_(0)
    assert "fused.weight" not in unwatched.missing()


@pytest.mark.parametrize("parts", [("a", "b"), ("a",)])
def test_without_a_reference_a_layer_made_anew_is_judged_too(
    model: Model, unwatched: Coverage, parts: tuple[str, ...]
) -> None:
    layer: Any = model.fused
    kernel = layer.weight
    with unwatched.recording(anew=True):
        layer.weight = nn.Parameter(torch.empty(6, 4), requires_grad=False)
        unwatched.carry_over(layer, {"weight": kernel})
        model.load(*parts)
        kernel.copy_(layer.weight)
        layer.weight = kernel
    assert ("fused.weight" in unwatched.missing()) is (parts == ("a",))
