"""How a load runs: base view, who decides about success, and what counts as a failure that wrote something."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.wrapped import Block, Wrapper, nothing_to_load
from vllm_lora_reload import AsleepError, seams, session
from vllm_lora_reload.coverage import FirstLoad
from vllm_lora_reload.lifecycle import State
from vllm_lora_reload.session import WorkerState
from vllm_lora_reload.settings import Settings
from vllm_lora_reload.tensors import storage_key

WEIGHT = ("up.base_layer.weight", 1)


class FakeLoRA:
    def __init__(self, *args: Any) -> None:
        self.args = args
        self.storages = {1, 2}
        self.saved = 0
        self.lost = False

    def save(self) -> None:
        self.saved += 1


class FakeUnregistered(FakeLoRA):
    def restore(self) -> None:
        self.saved -= 1

    def __init__(self, *args: Any, known: set[int], more: Any) -> None:
        super().__init__(*args)
        self.known = known


class FakeAdapters:
    def __init__(self, worker_manager: Any, manager: Any, lora: FakeLoRA) -> None:
        self.lora = lora
        self.log: list[str] = []

    def put_back(self) -> None:
        self.log.append("put back")
        self.lora.lost = False

    def drop_all(self) -> None:
        self.log.append("drop")

    def put_pending(self) -> None:
        self.log.append("put pending")

    def slept(self) -> None:
        self.unmapped = True

    def woke(self) -> None:
        self.unmapped = False

    def read_changed(self) -> None:
        self.log.append("read changed")


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> WorkerState:
    monkeypatch.setattr(session, "LoRAState", FakeLoRA)
    monkeypatch.setattr(session, "UnregisteredTensors", FakeUnregistered)
    monkeypatch.setattr(session, "Adapters", FakeAdapters)
    model = Block()
    manager = SimpleNamespace(_adapter_manager="manager")
    return WorkerState(model, manager, torch.device("cpu"), Settings(), nothing_to_load(model))


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each abort of a layerwise reload: whether the wrappers were in their places by then."""
    calls: list[bool] = []
    monkeypatch.setattr(seams, "abort_layerwise_reload", lambda model: calls.append(is_wrapped(model)))
    return calls


def is_wrapped(model: nn.Module) -> bool:
    return isinstance(model.up, Wrapper)


def take(state: WorkerState) -> None:
    """As a loader does with `WEIGHT`."""
    for _ in state.incoming([WEIGHT]):
        state.model.up.weight.data.copy_(torch.ones(3, 2))  # type: ignore[union-attr,operator]


def missing(state: WorkerState) -> WorkerState:
    state.lifecycle.slept(2)
    state.lifecycle.woke()
    assert state.lifecycle.state is State.MISSING
    return state


def test_ranks_of_one_host_share_it(state: WorkerState) -> None:
    """Their settings go to the ring as they are."""
    settings = Settings(ring_bytes=32 << 20, ring_threads=3, ring_chunk=1 << 20, ring_reader="direct")
    args = (state.model, SimpleNamespace(_adapter_manager=SimpleNamespace()), torch.device("cpu"))
    ring = WorkerState(*args, settings, ranks=4).ring
    assert (ring.threads, ring.chunk, ring.reader, ring._ranks) == (3, 1 << 20, "direct", 4)


def test_parts_are_made_of_the_model(state: WorkerState) -> None:
    lora: Any = state.lora
    unregistered: Any = state.unregistered
    assert lora.args == (state.model, "manager", torch.device("cpu"))
    assert unregistered.args == (state.model, torch.device("cpu")) and unregistered.known == {1, 2}


def test_save_keeps_both_parts(state: WorkerState) -> None:
    state.save(1)
    assert state.lora.saved == state.unregistered.saved == 0  # type: ignore[attr-defined]
    state.save(2)
    assert state.lora.saved == state.unregistered.saved == 1  # type: ignore[attr-defined]


def test_lora_state_is_reset_by_hand_always_and_by_a_load_only_if_it_was_lost(state: WorkerState) -> None:
    log: list[str] = state.adapters.log  # type: ignore[attr-defined]
    state.reset_lora()
    assert log == ["put back"]
    with state.loading():
        state.reset_lora()
    assert log == ["put back"]
    state.slept(2)
    state.lifecycle.woke()
    with state.loading():
        state.reset_lora()
        state.reset_lora()
    assert log == ["put back"] * 2


def test_setting_drop_drops_at_the_end_of_a_load_only(state: WorkerState) -> None:
    state.settings = Settings(adapters="drop")
    log: list[str] = state.adapters.log  # type: ignore[attr-defined]
    state.slept(2)
    state.woke(state.reset_lora)
    assert log == ["put back"]
    with state.loading():
        state.reset_lora()
    assert log == ["put back", "drop", "put back"]


@pytest.mark.parametrize(("level", "done"), [(1, ["put pending", "read changed"]), (2, ["put back", "read changed"])])
def test_wake_up_brings_back_what_the_level_took(state: WorkerState, level: int, done: list[str]) -> None:
    state.slept(level)
    state.woke(state.reset_lora)
    assert state.adapters.log == done  # type: ignore[attr-defined]


def test_nothing_is_loaded_into_unmapped_memory(state: WorkerState) -> None:
    state.lifecycle.slept(1)
    with pytest.raises(AsleepError, match=r'sleeps at level 1: call wake_up\(\["weights"\]\) first'), state.loading():
        pytest.fail("the load began")
    assert is_wrapped(state.model)


def test_incoming_weights_have_checkpoint_names_and_are_taken_one_by_one(state: WorkerState) -> None:
    taken: list[int] = []

    def weights() -> Iterator[tuple[str, int]]:
        for number in (1, 2):
            taken.append(number)
            yield "up.base_layer.weight", number

    incoming = state.incoming(weights())
    assert taken == []
    assert next(incoming) == ("up.weight", 1) and taken == [1]
    assert list(incoming) == [("up.weight", 2)]


def test_base_view_holds_inside_only(state: WorkerState) -> None:
    assert is_wrapped(state.model)
    with state.loading():
        assert not is_wrapped(state.model)
        with state.loading():
            assert not is_wrapped(state.model)
        assert not is_wrapped(state.model)
    assert is_wrapped(state.model)


def test_parameters_that_require_gradients_can_be_written(state: WorkerState) -> None:
    weight = state.model.up.base_layer.weight  # type: ignore[union-attr]
    assert weight.requires_grad
    with state.loading():
        weight.copy_(torch.full((3, 2), 5.0))  # type: ignore[operator]
    assert torch.is_grad_enabled() and (weight == 5).all()  # type: ignore[union-attr]


def test_success_completes(state: WorkerState) -> None:
    with missing(state).loading():
        assert state.lifecycle.state is State.MISSING
    assert state.lifecycle.state is State.COMPLETE


def test_success_of_a_part_completes_nothing(state: WorkerState) -> None:
    with missing(state).loading(completes=False):
        pass
    assert state.lifecycle.state is State.MISSING


@pytest.mark.parametrize(("outer", "after"), [(True, State.COMPLETE), (False, State.MISSING)])
def test_outermost_block_decides_about_success(state: WorkerState, outer: bool, after: State) -> None:
    with missing(state).loading(completes=outer):
        for inner in (True, False):
            with state.loading(completes=inner):
                pass
            assert state.lifecycle.state is State.MISSING
    assert state.lifecycle.state is after


@pytest.mark.parametrize("error", [RuntimeError("no such file"), KeyboardInterrupt()])
def test_failure_before_the_first_tensor_leaves_the_state(
    state: WorkerState, aborted: list[bool], error: BaseException
) -> None:
    with pytest.raises(type(error)), state.loading():
        state.incoming([WEIGHT])  # made, but nothing taken from it
        raise error
    assert state.lifecycle.state is State.COMPLETE
    assert aborted == [True] and is_wrapped(state.model)


def test_failure_after_a_tensor_that_was_refused_leaves_the_state(state: WorkerState, aborted: list[bool]) -> None:
    """A redundant tied weight after all others, say: the model has not changed."""
    with pytest.raises(ValueError), state.loading():
        next(state.incoming([WEIGHT]))
        torch.zeros(3).fill_(1)  # what loaders compute is not the model's
        raise ValueError("no such parameter")
    assert state.lifecycle.state is State.COMPLETE


def test_a_tensor_that_was_replaced_was_changed(state: WorkerState, aborted: list[bool]) -> None:
    with pytest.raises(ValueError), state.loading():
        state.model.norm.weight = nn.Parameter(torch.zeros(3))  # type: ignore[union-attr]
        raise ValueError
    assert state.lifecycle.state is State.MISSING


def test_weights_written_unseen_count(state: WorkerState, aborted: list[bool]) -> None:
    with pytest.raises(ValueError), state.loading():
        state.bypassed()
        raise ValueError
    assert state.lifecycle.state is State.MISSING
    with pytest.raises(ValueError), missing(state).loading():
        raise ValueError
    assert state.coverage.missing() == []


@pytest.mark.parametrize("error", [RuntimeError("wrong shape"), KeyboardInterrupt()])
def test_failure_after_the_first_tensor_means_missing(
    state: WorkerState, aborted: list[bool], error: BaseException
) -> None:
    with pytest.raises(type(error)), state.loading():
        take(state)
        raise error
    assert state.lifecycle.state is State.MISSING
    message = state.lifecycle.error()
    assert message is not None and f"{type(error).__name__}: {error}" in message
    assert aborted == [True] and is_wrapped(state.model)


def test_early_failure_while_missing_stays_missing_and_says_why(state: WorkerState, aborted: list[bool]) -> None:
    with pytest.raises(OSError), missing(state).loading():
        raise OSError("no such file")
    message = state.lifecycle.error()
    assert message is not None and "OSError: no such file" in message


def test_earlier_loads_do_not_count(state: WorkerState, aborted: list[bool]) -> None:
    with state.loading():
        take(state)
    with pytest.raises(RuntimeError), state.loading():
        raise RuntimeError
    assert state.lifecycle.state is State.COMPLETE


def test_tensors_given_to_an_inner_block_count(state: WorkerState, aborted: list[bool]) -> None:
    with pytest.raises(RuntimeError), state.loading():
        with state.loading():
            take(state)
        raise RuntimeError
    assert state.lifecycle.state is State.MISSING


def test_inner_failure_ends_the_whole_load_once(state: WorkerState, aborted: list[bool]) -> None:
    with pytest.raises(RuntimeError), state.loading(), state.loading():
        take(state)
        raise RuntimeError
    assert aborted == [True] and state.lifecycle.state is State.MISSING


def test_inner_failure_that_is_handled_decides_nothing(state: WorkerState, aborted: list[bool]) -> None:
    with missing(state).loading():
        with pytest.raises(RuntimeError), state.loading():
            take(state)
            raise RuntimeError
        assert not is_wrapped(state.model)
    assert aborted == [] and state.lifecycle.state is State.COMPLETE


def test_success_aborts_nothing(state: WorkerState, aborted: list[bool]) -> None:
    with state.loading():
        pass
    assert aborted == []


def test_good_load_after_a_failure_completes(state: WorkerState, aborted: list[bool]) -> None:
    with pytest.raises(RuntimeError), state.loading(), state.loading():
        take(state)
        raise RuntimeError
    with state.loading():
        pass
    assert state.lifecycle.state is State.COMPLETE and state.lifecycle.error() is None


def test_base_tensors_are_listed_while_the_model_serves(state: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread: names are as without LoRA, but no wrapper leaves its place for it."""
    extra = torch.ones(3)
    monkeypatch.setattr(state.unregistered, "named", lambda: [("up.extra", extra)], raising=False)
    monkeypatch.setattr(session, "base_view", None)
    listed = {name: storage.loaded for storage in state.base_storages() for name in storage.tensors}
    assert listed["up.weight"] is True and listed["up.extra"] is False
    assert not [name for name in listed if "base_layer" in name]
    assert is_wrapped(state.model)


def test_lora_state_is_no_base_tensor(state: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.unregistered, "named", list, raising=False)
    weight = state.model.up.base_layer.weight
    state.lora.storages = {storage_key(weight)}
    assert "up.weight" not in [storage.name for storage in state.base_storages()]


class Packed(nn.Module):
    """A fused layer whose checkpoint has a shape beside each of its two shards, the second one shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.shape = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        vars(self.weight)["weight_loader"] = self.load_shard
        vars(self.shape)["weight_loader"] = self.load_shard

    def load_shard(self, param: torch.Tensor, loaded: torch.Tensor, shard: int) -> None:
        (param.data if param.ndim == 1 else param.data[:4] if shard == 0 else param.data[4:]).copy_(loaded)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter, shard = name.split(".")
            parameters[parameter].weight_loader(parameters[parameter], tensor, int(shard))


@pytest.mark.parametrize("order", ["0 then 1", "1 then 0"])
@pytest.mark.parametrize("begun", ["in the load", "before"])
def test_layerwise_reload_takes_the_last_of_a_tensor_that_comes_with_every_shard(
    monkeypatch: pytest.MonkeyPatch, begun: str, order: str
) -> None:
    """As the first load does: vLLM drops what comes when a layer has as many elements as it holds."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    model = Packed()
    shards = [(f"{name}.{n}", t) for n in (0, 1) for name, t in (
        ("weight", torch.full((4, 4) if n == 0 else (2, 4), 1.0 + n)), ("shape", torch.tensor([4 - 2 * n, 4]))
    )]  # fmt: skip
    shards = shards if order == "0 then 1" else [*shards[2:], *shards[:2]]
    record_metadata_for_reloading(model)
    first = FirstLoad(model)
    with first.recording():
        model.load_weights(shards)
    with first.processing():
        pass
    loaded = model.shape.tolist()
    assert loaded == ([2, 4] if order == "0 then 1" else [4, 4])
    for part in ("LoRAState", "UnregisteredTensors", "Adapters"):
        monkeypatch.setattr(
            session, part, {"LoRAState": FakeLoRA, "Adapters": FakeAdapters}.get(part, FakeUnregistered)
        )
    manager = SimpleNamespace(_adapter_manager="manager")
    state = WorkerState(model, manager, torch.device("cpu"), Settings(), first)
    for parameter in model.parameters():
        parameter.fill_(-1)
    state.coverage.lose()
    missing(state)
    if begun == "before":
        with state.starting_transfer():
            initialize_layerwise_reload(model)
    with state.loading(anew=True):
        if begun == "in the load":
            initialize_layerwise_reload(model)
        model.load_weights(shards)
        finalize_layerwise_reload(model, None)
    assert state.lifecycle.state is State.COMPLETE
    assert model.shape.tolist() == loaded
    assert model.weight[:, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert getattr(model.weight, "weight_loader").__name__ == "load_shard"  # noqa: B009
