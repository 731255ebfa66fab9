"""A checkpoint for a tiny model: names and shapes as its loader expects them, random values.

First choice are the weights that transformers saves for the same config. Where it has no class, vLLM's own parameters
are taken apart: fused layers into their shards, fused experts into one tensor each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

_hf: Any = transformers


def randomize(tensors: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """The same names and shapes with random values in place of every float."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in sorted(tensors.items())
    }


def from_transformers(config: Any, model_class: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers writes for a model of `config`."""
    with torch.random.fork_rng(devices=[]):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    return randomize(tensors)


def from_vllm(model: nn.Module) -> dict[str, torch.Tensor]:
    """vLLM's parameters under the names of a checkpoint, as far as the model's own tables tell them."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors |= dict(_split(model, name, tensor, packed))
    return randomize(tensors)


def _split(
    model: nn.Module,
    name: str,
    tensor: torch.Tensor,
    packed: dict[str, list[str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    path, _, kind = name.rpartition(".")
    layer = model.get_submodule(path)
    if fused := re.fullmatch(r"(w13|w2)_(weight|bias)", kind):
        prefix = path.removesuffix(".routed_experts")
        gate, down, up = (
            getattr(layer, f"ckpt_{which}_proj_name", f"{which}_proj") for which in ("gate", "down", "up")
        )
        shards = [down] if fused[1] == "w2" else [gate, up]
        for expert, both in enumerate(tensor):
            for shard, part in zip(shards, both.chunk(len(shards)), strict=True):
                yield f"{prefix}.{expert}.{shard}.{fused[2]}", part.contiguous()
        return
    parent, _, layer_name = path.rpartition(".")
    shards = packed.get(layer_name) or []
    sizes = _shard_sizes(layer)
    if shards and sizes and len(sizes) == len(shards) and tensor.shape[0] == sum(sizes):
        for shard, part in zip(shards, tensor.split(sizes), strict=True):
            yield ".".join(filter(None, (parent, shard, kind))), part.contiguous()
        return
    original = getattr(layer, "org_vocab_size", None)
    if original is not None and tensor.shape[0] > original:
        tensor = tensor[:original].contiguous()
    yield name, tensor


def _shard_sizes(layer: Any) -> list[int]:
    if hasattr(layer, "total_num_kv_heads"):
        kv = layer.total_num_kv_heads * layer.head_size
        return [layer.total_num_heads * layer.head_size, kv, layer.total_num_kv_heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", ()))


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
