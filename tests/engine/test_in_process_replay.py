"""Reloading by the plan of the first load, on a real engine in this process: when it is used, and what breaks it."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tests.support.checkpoints import make_checkpoint
from tests.support.engine import Engine
from vllm_lora_reload import WeightsMissingError
from vllm_lora_reload.ring import Ring

pytestmark = pytest.mark.engine


@pytest.fixture
def loader_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for every load from disk by the engine's own loader."""
    calls: list[str] = []
    read = DefaultModelLoader.get_all_weights

    def get_all_weights(*args: Any) -> Any:
        calls.append("disk")
        return read(*args)

    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", get_all_weights)
    return calls


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the runner's warnings; vLLM's loggers do not pass theirs on."""
    said: list[str] = []
    logger = logging.getLogger("vllm.vllm_lora_reload.runner")
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    return said


def last_restore(engine: Engine) -> Any:
    return engine.llm.collective_rpc("lora_reload_status")[0]["last_restore"]


def state(engine: Engine) -> Any:
    return engine.llm.collective_rpc("lora_reload_status")[0]["state"]


def shards(engine: Engine) -> list[Path]:
    return sorted(engine.checkpoint.glob("*.safetensors"))


def rewrite(engine: Engine, change: Any) -> None:
    """What a trainer does that saves into the folder that the engine was started with."""
    for file in shards(engine):
        tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        save_file({n: t for n, t in tensors.items() if t is not None}, file, metadata={"format": "pt"})


def test_the_plan_is_whole(engine: Engine) -> None:
    plan = engine.runner.lora_reload.plan
    assert plan.reason is None and plan.rest == []
    assert plan.names == set(engine.checkpoint_tensors())


def test_two_cycles(engine: Engine, loader_calls: list[str]) -> None:
    total = sum(tensor.nbytes for tensor in engine.checkpoint_tensors().values())
    for _ in range(2):
        engine.runner.lora_reload.last_restore = None
        engine.lose_weights()
        engine.reload()
        told = last_restore(engine)
        assert told["source"] == "checkpoint" and told["bytes"] == total
        assert told["seconds"] > 0 and told["verify_seconds"] == 0
        assert engine.differing() == []
        assert engine.ask() == engine.before
    assert loader_calls == []
    engine.assert_whole()


def test_while_awake(engine: Engine, loader_calls: list[str]) -> None:
    for parameter in engine.model.parameters():
        parameter.data.fill_(1)
    engine.reload(is_checkpoint_format=True, weights_path=None)
    assert loader_calls == []
    engine.assert_whole()


def test_new_content_in_the_same_folder(engine: Engine, loader_calls: list[str]) -> None:
    """Also in other shards; the reference is vLLM's own loader."""
    other = make_checkpoint(engine.folder / "new", "llama", seed=11, shards=2)
    for file in [*shards(engine), *engine.checkpoint.glob("*.json")]:
        file.unlink()
    for file in other.iterdir():
        shutil.copy(file, engine.checkpoint)
    engine.lose_weights()
    engine.reload()
    assert loader_calls == []
    replayed = engine.worker.pool_digests()
    assert any(replayed[name] != digest for name, digest in engine.digests.items())
    engine.lose_weights()
    engine.reload(weights_path=str(other))
    assert loader_calls == ["disk"]
    loaded = engine.worker.pool_digests()
    assert loaded == replayed
    shutil.rmtree(other)
    engine.runner.model_config.model = str(engine.checkpoint)


def test_another_path_is_left_to_the_engine(engine: Engine, loader_calls: list[str]) -> None:
    engine.lose_weights()
    engine.reload(weights_path=str(engine.checkpoint))
    assert loader_calls == ["disk"]
    engine.lose_weights()
    engine.reload(weights_iterator=iter(engine.checkpoint_tensors().items()))
    engine.assert_whole()


def test_caches_of_old_weights_are_forgotten(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    names = [name for name in ("reset_encoder_cache", "reset_mm_cache") if hasattr(engine.runner, name)]
    for name in names:
        monkeypatch.setattr(engine.runner, name, lambda name=name: called.append(name))
    engine.reload()
    assert called == names != []


def test_without_its_setting(engine: Engine, loader_calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the setting leaves out is the plan."""
    monkeypatch.setattr(engine.runner.lora_reload, "plan", None)
    engine.lose_weights()
    engine.reload()
    assert loader_calls == ["disk"]
    engine.assert_whole()


# --- The engine's loader steps in ---------------------------------------------------------------------------------


def test_changed_shape(engine: Engine, loader_calls: list[str], warnings: list[str]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(engine, lambda n, tensor: tensor[:-1].clone() if n == name else tensor)
    engine.lose_weights()
    with pytest.raises(Exception, match=re.escape(name)):
        engine.reload()
    assert loader_calls == ["disk"]
    assert len(warnings) == 1 and warnings[0].endswith(f"not laid out as at start-up: {name}")
    assert state(engine) == "missing"


def test_more_digits(engine: Engine, loader_calls: list[str]) -> None:
    rewrite(engine, lambda n, tensor: tensor.float())
    engine.lose_weights()
    engine.reload()
    assert loader_calls == ["disk"]
    engine.assert_whole()


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_cut_file(engine: Engine, asleep: bool, warnings: list[str]) -> None:
    file = shards(engine)[1]
    os.truncate(file, file.stat().st_size - 10)
    if asleep:
        engine.lose_weights()
    with pytest.raises(Exception, match=re.escape(f"{file} is damaged")):
        engine.reload()
    assert state(engine) == "missing"
    assert len(warnings) == 1 and str(file) in warnings[0]
    with pytest.raises(WeightsMissingError, match=re.escape(str(file))):
        engine.ask("base")


@pytest.fixture(params=["before anything", "half way", "after everything"])
def broken_ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    read = Ring.read

    def break_off(self: Ring, wanted: Any) -> None:
        files = list(wanted.items())
        part = {"before anything": 0, "half way": len(files) // 2}.get(request.param, len(files))
        read(self, dict(files[:part]))
        raise OSError("the disk went away")

    monkeypatch.setattr(Ring, "read", break_off)
    yield


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_reading_breaks_off(
    engine: Engine, asleep: bool, broken_ring: None, loader_calls: list[str], warnings: list[str]
) -> None:
    """The engine's loader loads in the same call."""
    if asleep:
        engine.lose_weights()
    engine.reload()
    assert loader_calls == ["disk"]
    assert len(warnings) == 1 and "the disk went away" in warnings[0]
    assert state(engine) == "complete"
    engine.assert_whole()


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_both_break_off(engine: Engine, asleep: bool, broken_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may have been written: nothing is answered until a load succeeds."""
    if asleep:
        engine.lose_weights()

    def fail(*args: Any) -> Any:
        raise OSError("and nothing can be read")
        yield

    with pytest.raises(OSError, match="and nothing can be read"), monkeypatch.context() as patch:
        patch.setattr(DefaultModelLoader, "get_all_weights", fail)
        engine.reload()
    assert state(engine) == "missing"
    assert engine.worker.meta_tensors() == []
    with pytest.raises(WeightsMissingError, match="the last load failed"):
        engine.ask("base")
    engine.reload(weights_iterator=iter(engine.checkpoint_tensors().items()))
    engine.assert_whole()


def test_incomplete_after_reading_broke_off(engine: Engine, broken_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Awake, what a load leaves out keeps its value; not so after a replay that may have written any of them."""
    left_out = "model.norm.weight"
    read = DefaultModelLoader.get_all_weights
    with monkeypatch.context() as patch:
        patch.setattr(
            DefaultModelLoader,
            "get_all_weights",
            lambda *args: (pair for pair in read(*args) if pair[0] != left_out),
        )
        engine.reload()
    assert state(engine) == "missing"
    with pytest.raises(WeightsMissingError, match=rf"1 of 15 tensors \({left_out}\)"):
        engine.ask("base")


def test_asleep(engine: Engine) -> None:
    engine.llm.sleep(level=2)
    with pytest.raises(Exception, match="cannot be loaded while the engine sleeps"):
        engine.reload()
    engine.llm.wake_up()


def test_reset_that_fails_is_no_reason_to_load_again(
    engine: Engine, loader_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("no reset")

    engine.lose_weights()
    with pytest.raises(ValueError, match="no reset"), monkeypatch.context() as patch:
        patch.setattr(engine.runner, "reset_lora_state", fail)
        engine.reload()
    assert loader_calls == []
    assert state(engine) == "missing"


def test_tensors_in_kernel_format_and_then_the_plan(engine: Engine, loader_calls: list[str]) -> None:
    """Other loads keep the running tensors, which the plan is made for."""
    tensors = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    engine.lose_weights()
    engine.reload(weights_iterator=iter(tensors.items()), is_checkpoint_format=False)
    engine.lose_weights()
    for pair in engine.checkpoint_tensors().items():
        engine.model.load_weights([pair])
    engine.reload(weights_path=str(engine.checkpoint))
    assert loader_calls == ["disk"]
    engine.lose_weights()
    engine.reload()
    assert loader_calls == ["disk"]
    assert torch.isfinite(engine.model.model.norm.weight).all()
    engine.assert_whole()
