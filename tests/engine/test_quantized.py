"""Quantized checkpoints: the running tensors are not those of the checkpoint, a reload makes them anew.

One engine for each method that vLLM can run on this CPU. Checkpoints of method ``fp8`` do not get that far: while
loading them, vLLM requantizes with an operator that only GPUs have. ``compressed-tensors-fp8`` stands in for them.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.matrix.transfer import InProcessEngine, send
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import Engine
from tests.support.quantized import missing_operator, quantize
from tests.support.scenario import Scenario, run
from tests.support.snapshots import take_snapshot
from vllm_lora_reload import WeightsMissingError

pytestmark = pytest.mark.engine

Pair = tuple[str, torch.Tensor]

# What `model.load_weights`, outside a reload, raises for tensors of the checkpoint; with LoRA off it is
# the same. For AWQ it raises nothing: the repacked parameters have a loader that does nothing.
DIRECT: dict[str, Any] = {
    "awq": (),
    "gptq": (ValueError, AssertionError),
    "compressed-tensors": RuntimeError,
    "compressed-tensors-fp8": AttributeError,
}


@pytest.fixture(scope="module", params=DIRECT)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(method: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if operator := missing_operator(method):
        with pytest.raises(RuntimeError, match=f"no attribute '{operator}'"):
            run(Scenario(adapters=0, cycles=0, quantization=method), plugins="none")
        pytest.skip(f"vLLM has no {operator} for this kind of CPU; without this package it fails with {method} too")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # weight transfer calls it
        engine = Engine(tmp_path_factory.mktemp(method), method)
        worker = engine.worker
        worker.weight_transfer_engine = InProcessEngine(
            WeightTransferConfig(), worker.vllm_config, worker.device, engine.model
        )
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """The method's engine; a test that failed on its way does not harm the next one."""
    yield loaded
    loaded.reload()


def with_base_layer(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Names as a caller sees them who walks the wrapped model."""
    for name, tensor in pairs:
        module, _, attribute = name.rpartition(".")
        yield (f"{module}.base_layer.{attribute}" if "proj" in module else name), tensor


def refused(engine: Engine) -> None:
    for who in engine.requests:
        with pytest.raises(WeightsMissingError):
            engine.ask(who)


def error_of_a_layer(engine: Engine, source: Path) -> float:
    """How far outputs of one running layer are from those of its weight in `source`, as a part of their size."""
    weight = next(
        tensors["model.layers.0.mlp.down_proj.weight"]
        for file in source.glob("*.safetensors")
        if "model.layers.0.mlp.down_proj.weight" in (tensors := load_file(file))
    )
    layer = engine.model.model.layers[0].mlp.down_proj.base_layer
    inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.no_grad():
        outputs = layer.quant_method.apply(layer, inputs, None)
    expected = inputs @ weight.t()
    return float((outputs - expected).norm() / expected.norm())


def test_kernels_compute_with_what_was_quantized(engine: Engine) -> None:
    """The checkpoint means to vLLM what it should mean."""
    assert 0 < error_of_a_layer(engine, engine.folder / "source") < 0.15
    assert len({json.dumps(answer) for answer in engine.before.values()}) == 3


def test_other_weights(engine: Engine, method: str, tmp_path: Path) -> None:
    """Every quantized tensor takes the new value; the old checkpoint brings the old ones back."""
    source = make_checkpoint(tmp_path / "source", seed=7)
    other = load_file(quantize(source, tmp_path / "model", method) / "model.safetensors")
    names = [name for name, _ in engine.model.named_parameters() if "_proj.base_layer." in name]
    engine.reload(weights_iterator=iter(other.items()))
    assert {f"{name}[0]" for name in names if "weight_shape" not in name} <= set(engine.differing())
    assert 0 < error_of_a_layer(engine, source) < 0.15
    engine.reload()
    engine.assert_whole()


@pytest.mark.parametrize("way", ["disk", "iterator", "transfer", "kernel format"])
def test_way_in(engine: Engine, way: str) -> None:
    running = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    quantized = [name for name in running if "_proj.base_layer." in name]
    assert len(quantized) >= 16
    engine.lose_weights()
    assert {f"{name}[0]" for name in quantized} <= set(engine.differing())
    refused(engine)
    pairs = engine.checkpoint_tensors().items()
    if way == "disk":
        engine.reload()
    elif way == "iterator":
        engine.reload(weights_iterator=with_base_layer(pairs))
    elif way == "transfer":
        send(engine.worker, list(pairs))
    else:
        engine.reload(weights_iterator=iter(running.items()), is_checkpoint_format=False)
    engine.assert_whole()


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "after sleep"])
def test_left_out_shard(engine: Engine, asleep: bool) -> None:
    """vLLM repacks whatever memory the layer was allocated with, and copies it over the running tensors."""
    if asleep:
        engine.lose_weights()
    left_out = "model.layers.1.self_attn.k_proj."
    pairs = {name: tensor for name, tensor in engine.checkpoint_tensors().items() if not name.startswith(left_out)}
    assert len(pairs) < len(engine.checkpoint_tensors())
    engine.reload(weights_iterator=iter(pairs.items()))
    status = engine.llm.collective_rpc("lora_reload_status")[0]
    assert status["state"] == "missing" and "model.layers.1.self_attn.qkv_proj" in status["error"]
    refused(engine)
    engine.reload()
    assert engine.worker.lora_reload_status()["state"] == "complete"
    engine.assert_whole()


def test_interrupted_reload(engine: Engine) -> None:
    """Half of the layers are repacked, one is on its way: every tensor is back in place, and the next reload works."""
    pairs = list(engine.checkpoint_tensors().items())

    def broken() -> Iterator[Pair]:
        yield from pairs[: len(pairs) // 2]
        raise OSError("the trainer went away")

    engine.lose_weights()
    with pytest.raises(OSError, match="the trainer went away"):
        engine.reload(weights_iterator=broken())
    assert engine.worker.meta_tensors() == []
    assert engine.worker.wrapper_names() == engine.wrappers
    refused(engine)
    engine.reload()
    engine.assert_whole()


def test_direct_load_does_not_count(engine: Engine, method: str) -> None:
    """vLLM cannot load single tensors into repacked parameters, LoRA or not. It must not pass for a load."""
    engine.lose_weights()
    with pytest.raises(DIRECT[method]) if DIRECT[method] else nullcontext():
        for pair in engine.checkpoint_tensors().items():
            engine.model.load_weights([pair])
    refused(engine)
    engine.reload()
    engine.assert_whole()


def test_snapshot(engine: Engine, tmp_path: Path) -> None:
    """Repacked tensors come back as they are."""
    state = engine.worker.lora_reload
    keeper = take_snapshot(engine.worker, tmp_path)
    try:
        engine.lose_weights()
        assert state.last_restore["source"] == "snapshot"
        engine.assert_whole()
    finally:
        keeper.close()
        state.keeper = None
