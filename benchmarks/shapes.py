"""Checkpoints and adapters of random values in the shape of an 8-billion-parameter Qwen3, made in seconds on a GPU."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHARD = 4_000_000_000  # bytes
_ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model. The default is that of Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    inner: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the projections of one layer."""
        return {
            "self_attn.q_proj": (self.hidden, self.heads * self.head_dim),
            "self_attn.k_proj": (self.hidden, self.kv_heads * self.head_dim),
            "self_attn.v_proj": (self.hidden, self.kv_heads * self.head_dim),
            "self_attn.o_proj": (self.heads * self.head_dim, self.hidden),
            "mlp.gate_proj": (self.hidden, self.inner),
            "mlp.up_proj": (self.hidden, self.inner),
            "mlp.down_proj": (self.inner, self.hidden),
        }

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by checkpoint name."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, (inputs, outputs) in self.widths.items():
                found[f"{prefix}{name}.weight"] = (outputs, inputs)
            for name in ("q_norm", "k_norm"):
                found[f"{prefix}self_attn.{name}.weight"] = (self.head_dim,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}{name}.weight"] = (self.hidden,)
        return found | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(shape) for shape in self.parameters().values())

    def adapter_bytes(self, rank: int) -> int:
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.widths.values()) * _ITEM


def _nbytes(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * _ITEM


def make_config(folder: Path, shape: Shape) -> Path:
    """A folder with config and tokenizer, enough for an engine that makes up the weights."""
    import transformers

    from tests.support.checkpoints import _tokenizer

    config: Any = transformers.AutoConfig.for_model(
        "qwen3",
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def shards(parameters: dict[str, tuple[int, ...]], limit: int = SHARD) -> list[list[str]]:
    """Names in files of at most `limit` bytes, in order; a larger tensor has a file of its own."""
    files: list[list[str]] = []
    room = 0
    for name, shape in parameters.items():
        if not files or _nbytes(shape) > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= _nbytes(shape)
    return files


def make_checkpoint(folder: Path, shape: Shape, device: str, limit: int = SHARD) -> Path:
    """Random weights in safetensors files with an index. What is there already in this shape is kept."""
    made = folder / "made.json"
    if made.exists() and json.loads(made.read_text()) == dataclasses.asdict(shape):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (free := shutil.disk_usage(folder).free) < shape.nbytes * 1.05:
        raise RuntimeError(
            f"the checkpoint takes {shape.nbytes / 1e9:.1f} GB, {free / 1e9:.1f} GB of the disk are free"
        )
    make_config(folder, shape)
    parameters = shape.parameters()
    generator = torch.Generator(device).manual_seed(0)
    where: dict[str, str] = {}
    files = shards(parameters, limit)
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: _draw(parameters[name], generator, device) for name in names}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": shape.nbytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made.write_text(json.dumps(dataclasses.asdict(shape)))  # last: a checkpoint that is cut short is made again
    return folder


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    if len(shape) == 1:  # norms
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02).cpu()


def adapter_tensors(shape: Shape, rank: int, seed: int, device: str, std: float = 0.01) -> dict[str, torch.Tensor]:
    """Tensors of a PEFT adapter on all projections, by name."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight": torch.randn(
            size, generator=generator, device=device, dtype=torch.bfloat16
        )
        * std
        for layer in range(shape.layers)
        for module, (inputs, outputs) in shape.widths.items()
        for side, size in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }


def adapter_config(shape: Shape, rank: int) -> dict[str, Any]:
    return {"r": rank, "lora_alpha": rank, "target_modules": sorted(shape.widths), "peft_type": "LORA"}


def make_adapter(folder: Path, shape: Shape, rank: int, seed: int, device: str, std: float = 0.01) -> Path:
    """A PEFT folder. What is there already is kept if it has the size."""
    file = folder / "adapter_model.safetensors"
    if file.exists() and 0 <= file.stat().st_size - shape.adapter_bytes(rank) < 1 << 20:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu() for name, tensor in adapter_tensors(shape, rank, seed, device, std).items()}
    save_file(tensors, file)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(shape, rank)))
    return folder


def layout(file: Path) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
    """Name, dtype, shape and offset in the file of every tensor of a safetensors file of bfloat16 values."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for name, about in header.items():
        if name != "__metadata__":
            if about["dtype"] != "BF16":
                raise ValueError(f"{file}: {name} is {about['dtype']}, not BF16")
            yield name, torch.bfloat16, about["shape"], 8 + size + about["data_offsets"][0]
