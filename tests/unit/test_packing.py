"""Quantized checkpoints, read back by the definitions of their formats: near the weights they were made from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import GROUP, METHODS, Tensors, quantize


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The eight values of each int32, lowest bits first, in a new last dimension."""
    return (packed.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15


def read_awq(parts: Tensors) -> torch.Tensor:
    def columns(packed: torch.Tensor) -> torch.Tensor:
        values = nibbles(packed)
        in_order = torch.empty_like(values)
        in_order[..., [0, 2, 4, 6, 1, 3, 5, 7]] = values
        return in_order.flatten(1)

    zeros, scales = (part.repeat_interleave(GROUP, dim=0) for part in (columns(parts["qzeros"]), parts["scales"]))
    return ((columns(parts["qweight"]) - zeros) * scales).t()


def read_gptq(parts: Tensors) -> torch.Tensor:
    group = parts["g_idx"]
    values = nibbles(parts["qweight"]).transpose(1, 2).flatten(0, 1)
    zeros = nibbles(parts["qzeros"]).flatten(1) + 1
    return ((values - zeros[group]) * parts["scales"][group]).t()


def read_compressed_tensors(parts: Tensors) -> torch.Tensor:
    values = nibbles(parts["weight_packed"]).flatten(1) - 8
    assert list(values.shape) == parts["weight_shape"].tolist()
    return values * parts["weight_scale"].repeat_interleave(GROUP, dim=1)


def read_fp8(parts: Tensors) -> torch.Tensor:
    return parts["weight"].float() * parts["weight_scale"]


READERS: dict[str, tuple[Callable[[Tensors], torch.Tensor], float]] = {
    "awq": (read_awq, 0.12),
    "gptq": (read_gptq, 0.12),
    "compressed-tensors": (read_compressed_tensors, 0.12),
    "fp8": (read_fp8, 0.04),
    "fp8-static": (read_fp8, 0.04),
    "compressed-tensors-fp8": (read_fp8, 0.04),
}


def tensors(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", shards=2)


@pytest.mark.parametrize("method", METHODS)
def test_weights_can_be_read_back(source: Path, tmp_path: Path, method: str) -> None:
    read, tolerance = READERS[method]
    quantized = tensors(quantize(source, tmp_path / "model", method))
    quantized_layers = 0
    for name, original in tensors(source).items():
        if ".layers." in name and original.ndim == 2:
            module = name.removesuffix("weight")
            parts = {key.removeprefix(module): quantized.pop(key) for key in list(quantized) if key.startswith(module)}
            assert original.dtype not in {part.dtype for key, part in parts.items() if "scale" not in key}
            error = (read(parts) - original.float()).norm() / original.float().norm()
            assert 0 < error < tolerance, name
            quantized_layers += 1
        else:
            assert torch.equal(quantized.pop(name), original), name
    assert quantized_layers == 14
    assert quantized == {}


@pytest.mark.parametrize("method", METHODS)
def test_config_names_the_method(source: Path, tmp_path: Path, method: str) -> None:
    target = quantize(source, tmp_path / "model", method)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    settings = after.pop("quantization_config")
    assert method.startswith(settings["quant_method"])
    assert after == before
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
