"""Plans of small loaders: what they copy themselves, what they leave to the loader, and when there is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support import odd_files
from tests.support.odd_files import in_time
from vllm_lora_reload import seams
from vllm_lora_reload.coverage import Coverage, FirstLoad, WriteRecorder
from vllm_lora_reload.replay import Checkpoint, LoadPlan, LoadRecorder, NoReplay, Replay, ReplayError
from vllm_lora_reload.ring import Ring

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Loader = Callable[["Model", str, torch.Tensor], Any]


class Model(nn.Module):
    """Tensors for `loader`, which gets them, a checkpoint name and the tensor."""

    def __init__(self, loader: Loader, at_end: Callable[[Model], Any] = lambda model: None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), 7.0), requires_grad=False)
        self.short = nn.Parameter(torch.full((6, 4), 7.0, dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.full((), 7.0), requires_grad=False)
        self.bias = nn.Parameter(torch.full((8,), 7.0), requires_grad=False)
        self.big = nn.Parameter(torch.full((32, 32), 7.0), requires_grad=False)
        self.tied = self.big
        self.register_buffer("statistic", torch.full((4,), 7.0))
        self.register_buffer("extra", torch.full((8,), 7.0))
        self.loader, self.at_end = loader, at_end
        self.kept: Any = None
        self.asked: list[str] = []

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.asked.append(name)
            if name == "big":  # so that little rest is the minority
                self.big.data.copy_(tensor)
            else:
                self.loader(self, name, tensor)
        self.at_end(self)

    def fill_with_garbage(self) -> Model:
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return self

    def bytes(self) -> dict[str, bytes]:
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        if isinstance(self.kept, torch.Tensor):
            tensors["kept"] = self.kept
        return {
            name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
        }


def stored(seed: int, **changed: torch.Tensor) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"a": draw(6, 4), "b": draw(6, 4), "top": draw(2, 4), "wide": draw(6, 16), "turned": draw(4, 6)}
    tensors |= {"half": draw(6, 4).bfloat16(), "double": draw(6, 4).double(), "row": draw(8), "one": draw(1)}
    return tensors | {"statistic": draw(4), "big": draw(32, 32)} | changed


def save(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / f"model-{shard}.safetensors", metadata={"format": "pt"})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
    """As vLLM does."""
    for file in files(folder):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - not a dict
                if not names or name in names:
                    yield name, content.get_tensor(name)


class Planned:
    """A model that was loaded once, and the plan of it."""

    def __init__(
        self, folder: Path, model: Model, process: Callable[[Model], Any] = lambda model: None, names: str = ""
    ) -> None:
        self.folder, self.model = folder, model
        self.names = [*names.split(), "big"] if names else []
        first = FirstLoad(model, LoadRecorder)
        assert isinstance(first.loaded_by, LoadRecorder)
        with first.recording():
            model.load_weights(first.loaded_by.given(read(folder, *self.names)))
        with first.processing():
            process(model)
        self.coverage = Coverage(model, first)
        self.plan = LoadPlan.of(first, self.coverage, CPU, lambda: files(folder))
        self.lose()

    def lose(self) -> None:
        self.coverage.lose()
        self.model.fill_with_garbage()

    def replay(self) -> dict[str, Any]:
        return self.run(self.plan.replay(files(self.folder)))

    def run(self, replay: Replay) -> dict[str, Any]:
        self.model.asked.clear()
        with self.coverage.recording():
            return replay.run(Ring(CPU, 4 << 20, threads=2), self.model.load_weights, self.coverage)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, stored(1))
    return tmp_path


# --- What a plan does ---------------------------------------------------------------------------------------------


def plain(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "top":
        model.weight.data[:2].copy_(tensor)
    elif name == "a":
        model.weight.data.narrow(0, 2, 4).copy_(tensor[2:])
    elif name == "statistic":
        model.statistic.copy_(tensor)


def columns(model: Model, name: str, tensor: torch.Tensor) -> None:
    """As tensor parallelism takes them, and side by side."""
    if name == "wide":
        model.weight.data[:, :3].copy_(tensor[:, 5:8])
        model.weight.data[:, 3:].copy_(tensor[:, 15:])


def columns_like_columns(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "a":
        model.weight.data[:, :3].copy_(tensor[:, 1:])


def reshaped(model: Model, name: str, tensor: torch.Tensor) -> None:
    """In this mode, operators that may copy or not are seen as they are."""
    if name == "a":
        with torch.inference_mode():
            model.weight.data.copy_(tensor.reshape(3, 8).reshape(6, 4))


def turned(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "turned":
        model.weight.data.copy_(tensor.t())
        model.short.data.t().copy_(tensor)


def converted(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "double":
        single = tensor.to(torch.float32)
        model.weight.data[:2].copy_(single[4:])
        model.weight.data[2:4].copy_(single[2:].clone()[1:3])
        model.weight.data[4:].copy_(tensor[:2])
    elif name == "a":
        model.short.data.copy_(tensor.to(torch.bfloat16))
    elif name == "row":
        model.bias.data[:4].copy_(tensor.clone()[4:])
        model.bias.data[4:].copy_(tensor[2:].clone()[1:5])


def reinterpreted(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "a":
        model.weight.data.view(torch.int32).copy_(tensor.view(torch.int32))


def broadcast(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "one":
        model.bias.data.copy_(tensor)
        model.scale.data.copy_(tensor[0])


def padded(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "top":
        model.weight.data[:2].copy_(tensor)
        model.weight.data[2:].fill_(0.5)
        model.short.data[3:] = 3
        model.short.data[:3].zero_()
    elif name == "row":
        model.bias.data.zero_()
        model.bias.data[:4].copy_(tensor[:4])


def zeros_made_up(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        model.bias.data[:4].copy_(tensor[:4])
        model.bias.data[4:].copy_(torch.zeros_like(tensor)[:4])


def twice(model: Model, name: str, tensor: torch.Tensor) -> None:
    """The second write of the same region counts."""
    if name in "ab":
        model.weight.data.copy_(tensor)


def kv_heads(model: Model, name: str, tensor: torch.Tensor) -> None:
    """One tensor goes to two places."""
    if name == "top":
        for start in (0, 2, 4):
            model.weight.data[start : start + 2].copy_(tensor)


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (plain, "a statistic top"),
        (columns, "wide"),
        (columns_like_columns, "a"),
        (reshaped, "a"),
        (turned, "turned"),
        (converted, "a double row"),
        (reinterpreted, "a"),
        (broadcast, "one"),
        (padded, "row top"),
        (zeros_made_up, "row"),
        (twice, "b"),
        (kv_heads, "top"),
    ],
)
def test_everything_is_copied(folder: Path, loader: Loader, names: str) -> None:
    planned = Planned(folder, Model(loader))
    assert planned.plan.reason is None
    assert planned.plan.names == {*names.split(), "big"}
    assert planned.plan.rest == []
    check(planned, loader)
    assert planned.model.asked == []


def check(planned: Planned, loader: Loader, **model: Any) -> None:
    """New values in the same names, in other files: as if loaded from them, twice."""
    for seed in (2, 3):
        save(planned.folder, stored(seed), shards=seed)
        fresh = Model(loader, **model).fill_with_garbage()
        fresh.load_weights(read(planned.folder, *planned.names))
        planned.lose()
        told = planned.replay()
        assert planned.coverage.missing() == []
        assert planned.model.bytes() == fresh.bytes()
        assert told["source"] == "checkpoint" and told["bytes"] >= 4096 and told["seconds"] > 0


# --- What is left to the loader -----------------------------------------------------------------------------------


def computed(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        model.bias.data.copy_(tensor + 1)
    elif name == "a":
        model.weight.data.copy_(tensor)


def computed_from_running(model: Model, name: str, tensor: torch.Tensor) -> None:
    """vLLM's ``composed_weight_loader``."""
    if name == "row":
        model.bias.data.copy_(tensor)
        model.bias.data.copy_(-model.bias.exp())
    else:
        computed(model, name, tensor)


def changed_before(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        part = tensor[2:]
        part.mul_(3)
        model.bias.data.copy_(tensor)
    else:
        computed(model, name, tensor)


def rounded_twice(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        model.bias.data.copy_(tensor.to(torch.bfloat16))
    else:
        computed(model, name, tensor)


def turned_copy(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "turned":
        model.weight.data.copy_(tensor.t().contiguous())


def columns_of_two_sizes(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "a":
        model.weight.data[:, :2].copy_(tensor[:, :2])
        model.weight.data.view(torch.int16)[:, 4:].copy_(tensor.view(torch.int16)[:, 4:])


def rounded_and_reinterpreted(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "turned":
        model.short.data.copy_(tensor.to(torch.bfloat16).view(torch.int16).view(6, 4))
    elif name == "a":
        computed(model, name, tensor)


def as_number(model: Model, name: str, tensor: torch.Tensor) -> None:
    """vLLM's ``default_weight_loader`` of scalars."""
    if name == "one":
        model.scale.data.fill_(tensor.item())
    elif name == "a":
        computed(model, name, tensor)


def as_filler(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "one":
        model.bias.data.fill_(tensor[0])
    elif name == "a":
        computed(model, name, tensor)


def staged(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        stage = torch.zeros(8)
        stage[:4].copy_(tensor[4:])
        model.bias.data.copy_(stage)
    elif name == "a":
        computed(model, name, tensor)


def joined(model: Model, name: str, tensor: torch.Tensor) -> None:
    """Waits for both of its shards."""
    if name in ("one", "statistic"):
        model.waiting = getattr(model, "waiting", {}) | {name: tensor}
        if len(model.waiting) == 2:
            both = torch.cat([model.waiting["one"], model.waiting["statistic"]])
            model.bias.data[:5].copy_(both)
            model.waiting = {}
    elif name == "a":
        computed(model, name, tensor)


def kept(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        model.kept = tensor
    elif name == "a":
        computed(model, name, tensor)


def overlapping(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name in ("a", "top"):
        model.weight.data[: len(tensor)].copy_(tensor)


def overlapping_columns(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "top":
        model.weight.data[:, 1:3].copy_(tensor.view(-1)[:2].expand(6, 2))
        model.weight.data[:, 2:4].copy_(tensor.view(-1)[4:6].expand(6, 2))


def hidden(model: Model, name: str, tensor: torch.Tensor) -> None:
    """`a` has to be loaded for the bias, and must not hide `b` for that."""
    twice(model, name, tensor)
    if name == "a":
        model.bias.data[:4].copy_(tensor[0] + 1)


@pytest.mark.parametrize(
    ("loader", "names", "rest"),
    [
        (computed, "a", "row"),
        (computed_from_running, "a", "row"),
        (changed_before, "a", "row"),
        (rounded_twice, "a", "row"),
        (rounded_and_reinterpreted, "a", "turned"),
        (turned_copy, "", "turned"),
        (columns_of_two_sizes, "", "a"),
        (as_number, "a", "one"),
        (as_filler, "a", "one"),
        (staged, "a", "row"),
        (joined, "a", "one statistic"),
        (kept, "a", "row"),
        (overlapping, "", "a top"),
        (overlapping_columns, "", "top"),
        (hidden, "", "a b"),
    ],
)
def test_rest_goes_through_the_loader(folder: Path, loader: Loader, names: str, rest: str) -> None:
    planned = Planned(folder, Model(loader))
    assert planned.plan.reason is None
    assert planned.plan.names == {*names.split(), "big"}
    assert planned.plan.rest == rest.split()
    check(planned, loader)
    assert sorted(planned.model.asked) == rest.split()


def test_tensors_in_one_piece_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some loaders read a file at once."""

    def read_at_once(folder: Path, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        for file in files(folder):
            content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
            for name, at in Checkpoint([file]).tensors.items():
                if not names or name in names:
                    yield name, content[at.offset :][: at.nbytes].view(at.dtype).view(at.shape)

    def late(model: Model, name: str, tensor: torch.Tensor) -> None:
        """Uses a tensor when the next ones are there."""
        model.waiting = [*getattr(model, "waiting", []), (name, tensor)][-3:]
        plain(model, *model.waiting[0])

    save(tmp_path, stored(1, zzz=torch.zeros(1), zzzz=torch.zeros(1)))
    monkeypatch.setitem(globals(), "read", read_at_once)
    model = Model(late, lambda model: setattr(model, "waiting", []))
    planned = Planned(tmp_path, model)
    assert planned.plan.reason is None
    assert planned.plan.names == {"a", "statistic", "top", "big"}
    planned.replay()
    assert planned.coverage.missing() == []
    assert torch.equal(model.weight[:2], stored(1)["top"])
    assert torch.equal(model.statistic, stored(1)["statistic"])


def test_what_the_loader_derives_at_its_end(folder: Path) -> None:
    def derive(model: Model) -> None:
        model.kept = model.statistic * 2

    planned = Planned(folder, Model(plain, derive))
    assert planned.plan.rest == ["statistic"]
    check(planned, plain, at_end=derive)


# --- No plan ------------------------------------------------------------------------------------------------------


def added(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "a":
        model.weight.data.zero_().add_(tensor)


def counted(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "a":
        model.weight.data.copy_(torch.arange(24.0).view(6, 4))


def constant_changed(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "row":
        ones = torch.zeros(8).add_(1)
        model.bias.data.copy_(ones)


def constant_over_rest(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "a":
        model.weight.data.copy_(tensor + 1)
    elif name == "b":
        model.weight.data[:1].zero_()


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (added, "loaded tensors are changed in place, by aten.add_"),
        (counted, "values that are not in the checkpoint"),
        (constant_changed, "values that are not in the checkpoint"),
        (constant_over_rest, "weight gets a constant where something else was loaded"),
    ],
)
def test_no_plan_for_a_loader(folder: Path, loader: Loader, reason: str) -> None:
    plan = Planned(folder, Model(loader)).plan
    assert not plan.usable
    assert plan.reason is not None and reason in plan.reason
    with pytest.raises(NoReplay, match=re.escape(reason)):
        plan.replay(files(folder))


def derive(model: Model) -> None:
    model.kept = model.weight * 2


def repack(model: Model) -> None:
    model.weight = nn.Parameter(torch.empty(24), requires_grad=False)


def swap_storage(model: Model) -> None:
    model.weight.data = torch.zeros(6, 4)


def overwrite(model: Model) -> None:
    model.weight.data.copy_(torch.arange(24.0).view(6, 4))


def exchange(model: Model) -> None:
    model.weight.data[:1].copy_(model.weight[1:2])


def shuffle(model: Model) -> None:
    model.weight.data.view(-1)[:4].neg_()


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (derive, "weight is read by aten.mul.Tensor after it was loaded"),
        (repack, "weight was replaced after it was loaded"),
        (swap_storage, "weight was replaced after it was loaded"),
        (overwrite, "weight is changed by aten.copy_.default after it was loaded"),
        (exchange, "weight is read by aten.copy_.default after it was loaded"),
        (shuffle, "weight is changed by aten.neg_.default after it was loaded"),
    ],
)
def test_no_plan_where_something_is_processed(folder: Path, process: Callable[[Model], Any], reason: str) -> None:
    assert Planned(folder, Model(plain), process).plan.reason == reason


def test_views_and_constants_are_no_processing(folder: Path) -> None:
    def process(model: Model) -> None:
        model.kept = model.weight.t().view(2, 2, 6)
        model.other = torch.zeros_like(model.weight)
        model.weight = nn.Parameter(model.weight.data, requires_grad=False)
        model.weight.copy_(model.weight.data)
        model.statistic.fill_(1)
        model.extra.copy_(torch.arange(8.0) + model.extra)  # not loaded

    planned = Planned(folder, Model(plain), process)
    assert planned.plan.reason is None
    planned.replay()
    assert planned.model.statistic.tolist() == [1] * 4
    assert torch.equal(planned.model.weight[:2], dict(read(folder))["top"])


def test_no_plan_for_mostly_rest(folder: Path) -> None:
    class Computing(Model):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                if name == "big":
                    self.big.data.copy_(tensor * 2)
                else:
                    plain(self, name, tensor)

    reason = Planned(folder, Computing(plain)).plan.reason
    assert reason == "the loader computes with most of the weights (big, ...)"


def test_no_plan_for_what_was_not_watched(folder: Path) -> None:
    model = Model(plain)
    for first in (None, FirstLoad(model), FirstLoad(model, LoadRecorder)):
        plan = LoadPlan.of(first, Coverage(model, first), CPU, lambda: files(folder))
        assert plan.reason == "the load at start-up could not be watched"
    first = FirstLoad(model, LoadRecorder)
    assert isinstance(first.loaded_by, LoadRecorder)
    with first.recording():
        model.load_weights(first.loaded_by.given(read(folder)))
    plan = LoadPlan.of(first, Coverage(model, first), CPU, lambda: files(folder))
    assert plan.reason == "the step after the load at start-up could not be watched"


def test_no_plan_for_parameters_that_the_load_makes(folder: Path) -> None:
    def make(model: Model, name: str, tensor: torch.Tensor) -> None:
        plain(model, name, tensor)
        if name == "row":
            model.bias = nn.Parameter(tensor * 2, requires_grad=False)

    assert Planned(folder, Model(make)).plan.reason == "bias is made from what is loaded"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda pairs: [*pairs, pairs[0]], "a was given to the loader twice"),
        (lambda pairs: [(f"x.{name}", tensor) for name, tensor in pairs], "x.a as it was loaded is not in"),
        (lambda pairs: [(name, tensor.double()) for name, tensor in pairs], "a as it was loaded is not in"),
        (lambda pairs: [(name, tensor.t() if name == "a" else tensor) for name, tensor in pairs], "contiguous"),
    ],
)
def test_no_plan_for_tensors_that_are_not_those_of_the_files(
    folder: Path, given: Callable[[Any], Any], reason: str
) -> None:
    def pairs() -> Any:
        return iter(given([pair for pair in read(folder) if pair[0] in ("a", "big")]))

    model = Model(lambda model, name, tensor: None)
    model.load_weights = lambda weights: [model.big.data.copy_(t) for n, t in weights if n.endswith("big")]  # type: ignore[method-assign]
    first = FirstLoad(model, LoadRecorder)
    assert isinstance(first.loaded_by, LoadRecorder)
    with first.recording():
        model.load_weights(first.loaded_by.given(pairs()))
    with first.processing():
        pass
    plan = LoadPlan.of(first, Coverage(model, first), CPU, lambda: files(folder))
    assert plan.reason is not None and reason in plan.reason


def test_other_reasons(folder: Path) -> None:
    def none() -> list[Path]:
        raise NoReplay("the checkpoint has no safetensors files")

    def broken() -> list[Path]:
        raise RuntimeError("disk")

    model = Model(plain)
    first = FirstLoad(model, LoadRecorder)
    assert isinstance(first.loaded_by, LoadRecorder)
    with first.recording():
        model.load_weights(first.loaded_by.given(read(folder)))
    with first.processing():
        pass
    coverage = Coverage(model, first)
    assert LoadPlan.of(first, coverage, CPU, none).reason == "the checkpoint has no safetensors files"
    assert LoadPlan.of(first, coverage, CPU, broken).reason == "RuntimeError: disk"
    reason = LoadPlan.of(first, coverage, torch.device("cuda"), lambda: files(folder)).reason
    assert reason is not None and reason.endswith("is not on cuda")
    assert LoadPlan.of(first, coverage, CPU, lambda: files(folder)).usable


def test_a_recorder_that_fails_leaves_the_load_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("exotic")

    monkeypatch.setattr(LoadRecorder, "_follow_copy", fail)
    planned = Planned(folder, Model(plain))
    assert planned.plan.reason == "aten.copy_.default could not be followed: RuntimeError: exotic"
    assert planned.coverage.total == 2


# --- A replay that cannot be, or breaks off -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda tensors: tensors | {"more": torch.ones(1)}, "more"),
        (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "a"}, "a"),
        (lambda tensors: tensors | {"a": tensors["a"][:-1]}, "a"),
        (lambda tensors: tensors | {"a": tensors["a"].t()}, "a"),
        (lambda tensors: tensors | {"a": tensors["a"].half(), "b": tensors["b"].int()}, "a, b"),
    ],
)
def test_another_layout(folder: Path, change: Callable[[Tensors], Tensors], names: str) -> None:
    planned = Planned(folder, Model(plain))
    save(folder, change(stored(2)))
    with pytest.raises(NoReplay, match=f"not laid out as at start-up: {names}$"):
        planned.replay()
    assert planned.model.asked and planned.model.weight.isnan().all()


def test_running_tensor_replaced_since(folder: Path) -> None:
    planned = Planned(folder, Model(plain))
    planned.model.weight.data = torch.zeros(6, 4)
    with pytest.raises(NoReplay, match="weight was replaced"):
        planned.replay()
    planned.model.weight = None
    with pytest.raises(NoReplay, match="weight was replaced"):
        planned.replay()


def test_file_cut_after_its_header_was_read(folder: Path) -> None:
    planned = Planned(folder, Model(plain))
    replay = planned.plan.replay(files(folder))
    os.truncate(files(folder)[0], files(folder)[0].stat().st_size // 2)
    with pytest.raises(ReplayError, match="ends at byte"):
        planned.run(replay)
    assert planned.coverage.missing()


def test_file_replaced_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(folder, Model(plain))
    replay = planned.plan.replay(files(folder))
    read = Ring.read

    def replace(self: Ring, wanted: Any) -> None:
        save(folder, stored(5))
        read(self, wanted)

    monkeypatch.setattr(Ring, "read", replace)
    with pytest.raises(ReplayError, match="was changed while it was read"):
        planned.run(replay)


def test_loader_of_the_rest_fails(folder: Path) -> None:
    planned = Planned(folder, Model(computed))
    planned.model.loader = lambda model, name, tensor: 1 / 0
    with pytest.raises(ReplayError, match="ZeroDivisionError"):
        planned.replay()


def test_coverage_counts_what_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(folder, Model(plain))
    replay = planned.plan.replay(files(folder))
    for pieces in replay.pieces.values():
        pieces[:] = [piece for piece in pieces if piece.target.shape[0] != 2]
    planned.run(replay)
    assert planned.coverage.missing() == ["weight"]
    planned.replay()
    assert planned.coverage.missing() == []


def test_on_tensors_that_were_not_lost(folder: Path) -> None:
    planned = Planned(folder, Model(plain))
    planned.replay()
    save(folder, stored(4))
    planned.replay()
    assert planned.coverage.missing() == []
    assert torch.equal(planned.model.big, stored(4)["big"])


# --- Headers ------------------------------------------------------------------------------------------------------


def test_headers(folder: Path) -> None:
    tensors = stored(2, none=torch.zeros(0, 3), scalar=torch.tensor(2, dtype=torch.uint8))
    save(folder, tensors, shards=3)
    checkpoint = Checkpoint(files(folder))
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, stored_at in checkpoint.tensors.items():
        content = stored_at.file.read_bytes()[stored_at.offset :][: stored_at.nbytes]
        assert content == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (stored_at.dtype, stored_at.shape) == (tensors[name].dtype, tuple(tensors[name].shape))


def test_name_in_two_files(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "more.safetensors")
    with pytest.raises(NoReplay, match=r"a is in .*model-0.safetensors and again in .*more.safetensors"):
        Checkpoint(files(folder))


def test_file_is_gone(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Checkpoint([folder / "absent.safetensors"])


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, whole)
    content = whole.read_bytes()
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(NoReplay):
            Checkpoint([cut])


def raw(header: Any, data: int = 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


GOOD: dict[str, Any] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        raw({"a": GOOD}, length=2**64 - 1),
        raw({"a": GOOD}, length=200_000_000),
        raw(b"{"),
        raw(b"\xff\xff"),
        raw([]),
        raw({"a": 1}),
        raw({"a": GOOD | {"dtype": "F99"}}),
        raw({"a": GOOD | {"shape": [5]}}),
        raw({"a": GOOD | {"shape": [-2, -2]}}),
        raw({"a": GOOD | {"shape": ["4"]}}),
        raw({"a": GOOD | {"shape": None}}),
        raw({"a": GOOD | {"data_offsets": [-16, 0]}}),
        raw({"a": GOOD | {"data_offsets": [16, 0]}}),
        raw({"a": GOOD | {"data_offsets": [0.0, 16.0]}}),
        raw({"a": GOOD | {"data_offsets": [16]}}),
        raw({"a": {"dtype": "F32", "shape": [4]}}),
        raw({"a": GOOD}, data=15),
        raw({"a": GOOD}, data=17),  # appended
        raw({"a": GOOD | {"data_offsets": [2, 18]}}, data=18),  # shifted
        raw({"a": GOOD | {"data_offsets": [0, 18]}}, data=18),
        raw({"a": GOOD, "b": GOOD | {"data_offsets": [18, 34]}}, data=34),  # a hole
        raw({"a": GOOD, "b": GOOD}),  # one upon the other
        raw({"a": GOOD, "b": GOOD | {"data_offsets": [8, 24]}}, data=24),
        raw({"a": GOOD | {"shape": [2**40, 2**40]}}),
        raw({"a": GOOD | {"shape": [10**400]}}),
        raw({"a": GOOD | {"shape": [4.0]}}),
        raw({"a": GOOD | {"shape": [True, 4]}}),
        raw({"a": GOOD | {"data_offsets": [False, 16]}}),
        raw({"a": GOOD | {"data_offsets": [float("nan"), 16]}}),
        raw({"a": GOOD | {"data_offsets": [0, 16, 16]}}),
        raw({"a": GOOD, "__metadata__": {"format": 1}}),
        raw({"a": GOOD, "__metadata__": []}),
        raw(b"[" * 200_000),
        raw(b'{"a":' * 200_000),
        raw(b'{"a\xff": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        raw(b'{"\\ud800": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        raw(b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        raw(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}} x'),
        raw(b"\xef\xbb\xbf" + json.dumps({"a": GOOD}).encode()),
    ],
)
def test_damaged_header(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"__metadata__": {"format": "pt"}, "a": GOOD}))
    assert Checkpoint([file]).tensors["a"].nbytes == 16
    file.write_bytes(content)
    with pytest.raises(NoReplay, match=re.escape(str(file))):
        Checkpoint([file])


def test_of_two_with_one_name_the_one_that_the_library_takes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    one, other = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}', json.dumps(GOOD)
    file.write_bytes(raw(f'{{"a": {one}, "a": {other}}}'.encode()))
    assert Checkpoint([file]).tensors["a"].shape == tuple(load_file(file)["a"].shape) == (4,)
    file.write_bytes(raw(f'{{"a": {other}, "a": {one}}}'.encode()))
    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(NoReplay):
        Checkpoint([file])


@pytest.mark.parametrize("harm", [odd_files.fifo, odd_files.folder])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    harm(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        in_time(lambda: Checkpoint([tmp_path / "model.safetensors"]))


def test_a_hub_links_to_its_files(folder: Path) -> None:
    (folder / "linked.safetensors").symlink_to(files(folder)[0])
    (stored_at,) = {each.file for each in Checkpoint([folder / "linked.safetensors"]).tensors.values()}
    assert stored_at == folder / "linked.safetensors"


def test_a_file_that_claims_to_be_huge(tmp_path: Path) -> None:
    """Nothing of its size is taken, not even as an address."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"a": GOOD}))
    os.truncate(file, 1 << 43)
    with pytest.raises(NoReplay, match="damaged header"):
        Checkpoint([file])


def test_rewritten_in_place_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its time put back."""
    planned = Planned(folder, Model(plain))
    replay = planned.plan.replay(files(folder))
    read, (file,) = Ring.read, files(folder)

    def rewrite(self: Ring, wanted: Any) -> None:
        status = file.stat()
        time.sleep(0.02)
        with file.open("r+b") as opened:
            opened.write(file.read_bytes())
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        read(self, wanted)

    monkeypatch.setattr(Ring, "read", rewrite)
    with pytest.raises(ReplayError, match="was changed while it was read"):
        planned.run(replay)


def test_recorder_counts_as_any_other(folder: Path) -> None:
    """What a load has written is the same with both recorders."""
    written = []
    for recorder in (WriteRecorder, LoadRecorder):
        model = Model(padded)
        first = FirstLoad(model, recorder)
        with first.recording():
            model.load_weights(read(folder))
        written.append(sorted(first.written.values()))
    assert written[0] == written[1] != []


# --- Which files --------------------------------------------------------------------------------------------------


def make_runner(model: Any, load_format: str = "auto", **config: Any) -> Any:
    from vllm.config.load import LoadConfig

    load_config = LoadConfig(load_format=load_format, download_dir=config.pop("download_dir", None))
    return SimpleNamespace(
        load_config=load_config, model_config=SimpleNamespace(model=str(model), revision=None, **config)
    )


def names_of(runner: Any, **model: Any) -> list[str]:
    return sorted(file.name for file in seams.checkpoint_files(runner, cast(Any, SimpleNamespace(**model))))


def test_files_of_a_folder(folder: Path) -> None:
    save(folder, stored(1), shards=3)
    every = [f"model-{number}.safetensors" for number in range(3)]
    assert names_of(make_runner(folder)) == every
    index = {"weight_map": {"a": every[0], "b": every[2]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names_of(make_runner(folder)) == [every[0], every[2]]
    (folder / every[2]).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(every[2])):
        names_of(make_runner(folder))


def test_files_of_the_hub(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those that were downloaded."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--some--one"
    shutil.copytree(folder, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    runner = make_runner("some/one", download_dir=str(cache))
    (file,) = seams.checkpoint_files(runner, cast(Any, None))
    assert file == repository / "snapshots" / "abc" / "model-0.safetensors"
    with pytest.raises(Exception, match="local"):
        names_of(make_runner("some/other", download_dir=str(cache)))


@pytest.mark.parametrize(
    ("config", "model", "reason"),
    [
        ({"load_format": "fastsafetensors"}, {}, "load_format 'fastsafetensors'"),
        ({"load_format": "sharded_state"}, {}, "load_format 'sharded_state'"),
        ({"load_format": "hf", "model_weights": "s3://bucket"}, {}, "own folder"),
        ({"load_format": "safetensors"}, {"secondary_weights": [1]}, "own folder"),
    ],
)
def test_files_of_other_kinds(folder: Path, config: Any, model: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        names_of(make_runner(folder, **config), **model)


def test_files_of_another_loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Decrypting(DefaultModelLoader):
        pass

    monkeypatch.setattr(model_loader, "get_model_loader", Decrypting)
    with pytest.raises(ValueError, match="load_format 'auto'"):
        names_of(make_runner(folder))


def test_no_safetensors(folder: Path) -> None:
    files(folder)[0].rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors files"):
        names_of(make_runner(folder))
