"""Cycles, ways in, other input and negative controls on a real engine in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import make_adapter, make_checkpoint
from tests.support.engine import Engine
from tests.support.pool import PoolLoss
from vllm_lora_reload import WeightsMissingError

pytestmark = pytest.mark.engine


def test_answers_depend_on_the_adapter(engine: Engine) -> None:
    assert len({json.dumps(answer) for answer in engine.before.values()}) == 3
    assert len(engine.digests) > 60


def test_sleep_really_loses_the_pool(engine: Engine) -> None:
    """The simulation itself: asleep, every tensor of the pool differs, buffers too."""
    engine.llm.sleep(level=2)
    lost = set(engine.differing())
    engine.llm.wake_up()
    in_pool = {name for name, tensor in engine.worker._named_tensors().items() if engine.worker.in_pool(tensor)}
    assert lost == in_pool & set(engine.digests)
    assert len(lost) > 60


@pytest.mark.parametrize("by", ["replay", "loader"])
def test_three_cycles(engine: Engine, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint: by the plan of the first load, and by vLLM's own loader."""
    if by == "loader":
        monkeypatch.setattr(engine.worker.lora_reload, "plan", None)
    for _ in range(3):
        engine.lose_weights()
        engine.reload()
        assert engine.differing() == []
        assert engine.ask() == engine.before
        assert bool(engine.worker.lora_reload.last_restore) is (by == "replay")


@pytest.mark.parametrize("by", ["replay", "loader"])
def test_reload_while_awake(engine: Engine, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "loader":
        monkeypatch.setattr(engine.worker.lora_reload, "plan", None)
    engine.reload()
    engine.assert_whole()


def test_level_1_changes_nothing(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    engine.assert_whole()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_breaks_off(level: int, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a trainer has taken what was freed: vLLM complains with an assertion, when all is unmapped."""
    real = PoolLoss.sleep

    def sleep(self: Any, level: int = 1) -> None:
        real(self, level)
        raise AssertionError("Memory usage increased after sleeping.")

    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(PoolLoss, "sleep", sleep)
        engine.llm.sleep(level=level)
    for _ in range(2):
        with pytest.raises(WeightsMissingError, match=r"broke off.*increased after sleeping.*rpc\(\"wake_up\"\)"):
            engine.ask("adapter 1")
        engine.llm.wake_up()  # the executor does not know that it sleeps
    engine.llm.collective_rpc("wake_up")
    engine.llm.wake_up()
    if level == 2:
        with pytest.raises(WeightsMissingError, match="reload_weights"):
            engine.ask("adapter 1")
        engine.reload()
    engine.assert_whole()


def test_adapters_serve_without_their_files(engine: Engine) -> None:
    """A reload reads no adapter from disk: trainers write them to temporary folders."""
    folders = [engine.folder / f"adapter{number}" for number in (1, 2)]
    for folder in folders:
        folder.rename(folder.with_suffix(".away"))
    try:
        engine.lose_weights()
        engine.reload()
        assert engine.ask() == engine.before
    finally:
        for folder in folders:
            folder.with_suffix(".away").rename(folder)


def test_stacks_are_cut_at_slots(engine: Engine) -> None:
    """Embeddings have other views of theirs, which begin with the vocabulary of all slots."""
    lora = engine.worker.lora_reload.lora
    slots = len(engine.runner.lora_manager._adapter_manager.lora_index_to_id)
    assert {len(stack) for stack in lora._slots} == {slots}
    assert [stack.nbytes for stack in lora._slots] == [whole.nbytes for whole in lora.stacks]


def test_pins_order_and_slots_survive(engine: Engine) -> None:
    manager = engine.runner.lora_manager._adapter_manager

    def bookkeeping() -> Any:
        active, registered = manager._active_adapters, manager._registered_adapters
        return (
            list(manager.lora_index_to_id),
            [(list(cache.order), set(cache.pinned_items)) for cache in (active, registered)],
            engine.runner.list_loras(),
        )

    engine.llm.llm_engine.pin_lora(2)
    pinned = bookkeeping()
    engine.lose_weights()
    engine.reload()
    assert bookkeeping() == pinned
    for cache in (manager._active_adapters, manager._registered_adapters):
        cache._unpin(2)


def base_layer_names(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint under the names that a caller sees who walks the wrapped model or a PEFT model."""
    for name, tensor in engine.checkpoint_tensors().items():
        module, _, attribute = name.rpartition(".")
        yield (f"{module}.base_layer.{attribute}" if "proj" in name or "embed" in name else name), tensor


def test_reload_from_iterator_with_base_layer_names(engine: Engine) -> None:
    engine.lose_weights()
    names = [name for name, _ in base_layer_names(engine)]
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in names
    engine.reload(weights_iterator=base_layer_names(engine))
    engine.assert_whole()


def test_reload_in_kernel_format(engine: Engine) -> None:
    """Names as in the wrapped model, tensors as the running model holds them."""
    state = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    assert any(".base_layer." in name for name in state)
    engine.lose_weights()
    engine.reload(weights_iterator=iter(state.items()), is_checkpoint_format=False)
    engine.assert_whole()


@pytest.mark.parametrize("names", ["checkpoint", "base_layer"])
def test_direct_load_one_tensor_a_call(engine: Engine, names: str) -> None:
    """As TRL and OpenRLHF do it."""
    engine.llm.sleep(level=2)
    engine.llm.wake_up(["weights"])
    pairs = engine.checkpoint_tensors().items() if names == "checkpoint" else base_layer_names(engine)
    for pair in pairs:
        engine.model.load_weights([pair])
    engine.llm.wake_up(["kv_cache"])
    engine.assert_whole()


def test_wrapper_loads_fused_shards(engine: Engine) -> None:
    """A wrapper of a fused layer delegates to the layer's own loader, where the release has one."""
    wrapper = engine.model.model.layers[0].self_attn.qkv_proj
    if not hasattr(wrapper.base_layer, "load_weights"):
        pytest.skip("fused layers have no load_weights of their own in this release")
    before = wrapper.base_layer.weight.clone()
    wrapper.base_layer.weight.data.fill_(0)
    shards = []
    for shard in "qkv":
        tensor = engine.checkpoint_tensors()[f"model.layers.0.self_attn.{shard}_proj.weight"]
        tensor.shard_id = shard
        shards.append(("weight", tensor))
    assert list(wrapper.load_weights(shards)) == ["weight"] * 3
    assert torch.equal(wrapper.base_layer.weight, before)


def test_module_tree_is_vllms_own(engine: Engine) -> None:
    """Outside a load, names and methods are as vLLM left them."""
    for module in engine.model.modules():
        for method in ("named_modules", "named_parameters", "state_dict", "get_parameter"):
            assert getattr(type(module), method) is getattr(nn.Module, method)
    for name, parameter in engine.model.named_parameters():
        assert engine.model.get_parameter(name) is parameter
    names = [name for name, _ in engine.model.named_parameters()]
    engine.reload()
    assert [name for name, _ in engine.model.named_parameters()] == names


def test_requests_are_refused_until_the_weights_are_back(engine: Engine) -> None:
    engine.lose_weights()
    for _ in range(2):
        with pytest.raises(WeightsMissingError, match=r"sleep\(level=2\) discarded them.*reload_weights"):
            engine.ask("base")
    assert engine.llm.collective_rpc("lora_reload_status")[0]["state"] == "missing"
    engine.reload()
    assert engine.ask() == engine.before


def state(engine: Engine) -> str | None:
    return engine.llm.collective_rpc("lora_reload_status")[0]["state"]


def test_missing_tensors_are_known_by_name(engine: Engine) -> None:
    """One tensor a call, last layer first: refused until the very last one, and told what is missing."""
    engine.lose_weights()
    pairs = list(reversed(engine.checkpoint_tensors().items()))
    for pair in pairs[:-1]:
        engine.model.load_weights([pair])
        assert state(engine) == "missing"
    with pytest.raises(WeightsMissingError, match=r"1 of 15 tensors \(lm_head.weight\)"):
        engine.ask("base")
    engine.model.load_weights(pairs[-1:])
    assert state(engine) == "complete"
    engine.assert_whole()


def test_a_shard_of_a_fused_layer_is_missing(engine: Engine) -> None:
    engine.lose_weights()
    left_out = "model.layers.0.self_attn.k_proj.weight"
    tensors = engine.checkpoint_tensors()
    key = tensors.pop(left_out)
    engine.model.load_weights(tensors.items())
    with pytest.raises(WeightsMissingError, match=r"1 of 15 tensors \(model.layers.0.self_attn.qkv_proj.weight\)"):
        engine.ask("base")
    engine.model.load_weights(
        [("model.layers.0.self_attn.q_proj.weight", tensors[left_out.replace("k_proj", "q_proj")])]
    )
    assert state(engine) == "missing", "the same shard twice does not make up for another"
    engine.model.load_weights([(left_out, key)])
    engine.assert_whole()


def test_reload_from_an_incomplete_iterator(engine: Engine) -> None:
    engine.lose_weights()
    tensors = engine.checkpoint_tensors()
    last = tensors.popitem()
    engine.reload(weights_iterator=iter(tensors.items()))
    assert state(engine) == "missing"
    engine.model.load_weights([last])
    engine.assert_whole()


def test_processing_on_the_wrapped_model(engine: Engine) -> None:
    """As verl does after its buckets."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    engine.lose_weights()
    pairs = list(engine.checkpoint_tensors().items())
    for start in range(0, len(pairs), 5):
        engine.model.load_weights(pairs[start : start + 5])
    process_weights_after_loading(engine.model, engine.runner.model_config, torch.device("cpu"))
    engine.assert_whole()


# --- Other input --------------------------------------------------------------------------------------------------


def test_another_path(engine: Engine) -> None:
    """``weights_path`` brings other weights; the old ones come back from the old path."""
    other = make_checkpoint(engine.folder / "other", "llama", seed=7)
    engine.reload(weights_path=str(other))
    assert engine.ask("base") != {"base": engine.before["base"]}
    assert any("qkv_proj.base_layer.weight" in name for name in engine.differing())
    with pytest.raises(Exception, match="nowhere"):
        engine.reload(weights_path=str(engine.folder / "nowhere"))
    shutil.rmtree(other)
    engine.reload(weights_path=str(engine.checkpoint))
    engine.ask()  # metadata is that of the last batch, which was another one
    engine.assert_whole()


def test_adapter_of_too_high_rank(engine: Engine) -> None:
    from vllm.lora.request import LoRARequest

    path = make_adapter(engine.folder / "high", engine.checkpoint, rank=32)
    with pytest.raises(Exception, match="rank 32 is greater than max_lora_rank 16"):
        engine.llm.llm_engine.add_lora(LoRARequest("high", 9, str(path)))
    shutil.rmtree(path)
    engine.assert_whole()


# --- Negative control (more of them in test_processes.py) -------------------------------------------------------


def test_without_the_reset(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.runner, "reset_lora_state", lambda: None)
    monkeypatch.setattr(engine.worker.lora_reload.adapters, "put_back", lambda: None)
    engine.lose_weights()
    engine.reload()
    assert any("stacked" in name for name in engine.differing())
    after = engine.ask()
    assert after["adapter 1"] != engine.before["adapter 1"]


# --- Memory that is taken without a sleep -------------------------------------------------------------------------


def take_memory(engine: Engine) -> None:
    """As a framework does that unmaps the pool by a tool of its own, which nobody sees."""
    for storage in engine.worker.pool.alive():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


@pytest.mark.parametrize("way", ["reload", "direct", "one a call", "kernel format"])
def test_a_load_brings_everything_back_whatever_memory_held(engine: Engine, way: str) -> None:
    """LoRA slots, index tables, the logits mapping and buffers too, none of which a load writes."""
    kernel_format = [(name, p.detach().clone()) for name, p in engine.model.named_parameters()]
    engine.ask()
    take_memory(engine)
    assert len(engine.differing()) > 60
    if way == "reload":
        engine.reload()
    elif way == "direct":
        engine.model.load_weights(engine.checkpoint_tensors().items())
    elif way == "kernel format":
        engine.reload(weights_iterator=iter(kernel_format), is_checkpoint_format=False)
    else:
        for item in engine.checkpoint_tensors().items():
            if engine.worker.lora_reload_status()["state"] == "missing":
                with pytest.raises(WeightsMissingError, match=r"taken without sleep|have not been loaded"):
                    engine.ask("base")
            engine.model.load_weights([item])
    # What index tables hold is that of the last batch.
    assert [name for name in engine.differing() if "punica" not in name] == []
    assert engine.ask() == engine.before
    engine.assert_whole()


def test_a_load_with_nothing_lost_writes_no_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    state = engine.worker.lora_reload
    put_back = state.adapters.put_back
    monkeypatch.setattr(state.adapters, "put_back", lambda: written.append("slots") or put_back())
    engine.reload()
    engine.model.load_weights(engine.checkpoint_tensors().items())
    assert written == []
    engine.lose_weights()
    engine.reload()
    assert written == ["slots"], "at the wake-up"
