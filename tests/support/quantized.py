"""Tiny checkpoints in quantized formats that vLLM reads, made from those of `make_checkpoint`.

Weights are really quantized, by rounding to the nearest value; nothing is downloaded. Four-bit formats have groups of
32, and everything that is not quantized keeps the dtype of the source: vLLM's CPU kernels and Marlin accept both.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.scalar_type import scalar_types

_pack: Any = quant_utils  # without types
BITS = 4
GROUP = 32
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
INPUT_MAX = 16.0  # static activation scale: what a projection of the tiny models can be given

Tensors = dict[str, torch.Tensor]


def _awq(weight: torch.Tensor) -> Tensors:
    """AutoAWQ's GEMM format: asymmetric, packed along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    _, values, scales, zeros = _pack.quantize_weights(weight.t().float(), scalar_types.uint4, GROUP, zero_points=True)
    return {
        "qweight": _pack.awq_pack(values, BITS, *values.shape),
        "qzeros": _pack.awq_pack(zeros, BITS, *zeros.shape),
        "scales": scales.to(weight.dtype),
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    """AutoGPTQ's first format: symmetric, packed along the inputs; zero points are stored minus one."""
    _, values, scales, _ = _pack.quantize_weights(weight.t().float(), scalar_types.uint4b8, GROUP)
    zeros = torch.full(scales.shape, scalar_types.uint4b8.bias - 1)
    return {
        "qweight": _pack.gptq_pack(values, BITS, *values.shape),
        "qzeros": _pack.pack_cols(zeros, BITS, *zeros.shape),
        "scales": scales.to(weight.dtype),
        "g_idx": torch.arange(len(values), dtype=torch.int32) // GROUP,
    }


def _compressed_tensors(weight: torch.Tensor) -> Tensors:
    """W4A16 in the format `pack-quantized`: symmetric, rows are outputs, packed along the inputs."""
    _, values, scales, _ = _pack.quantize_weights(weight.t().float(), scalar_types.uint4b8, GROUP)
    return {
        "weight_packed": _pack.pack_cols(values.t().contiguous(), BITS, *weight.shape),
        "weight_scale": scales.t().contiguous().to(weight.dtype),
        "weight_shape": torch.tensor(weight.shape),
    }


def _fp8(weight: torch.Tensor) -> Tensors:
    """One scale for the whole weight; activations are scaled at run time."""
    scale = weight.float().abs().max() / FP8_MAX
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_static(weight: torch.Tensor) -> Tensors:
    """As `_fp8`, with a scale for activations in the checkpoint."""
    return _fp8(weight) | {"input_scale": torch.tensor(INPUT_MAX / FP8_MAX)}


def _compressed_tensors_fp8(weight: torch.Tensor) -> Tensors:
    """W8A8 in the format `float-quantized`: one scale for each output, activations are scaled token by token."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / FP8_MAX
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


_W4A16 = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_METHODS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "awq": (_awq, {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}),
    "fp8": (_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-static": (_fp8_static, {"quant_method": "fp8", "activation_scheme": "static"}),
    "compressed-tensors": (
        _compressed_tensors,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _W4A16}},
            "ignore": ["lm_head"],
        },
    ),
    "compressed-tensors-fp8": (
        _compressed_tensors_fp8,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _CHANNEL, "input_activations": _TOKEN}},
            "ignore": ["lm_head"],
        },
    ),
}

METHODS: tuple[str, ...] = tuple(_METHODS)

# What methods need of vLLM's library for the CPU. There is one for each kind of CPU, with different operators.
_OPERATORS = dict.fromkeys(("awq", "gptq", "compressed-tensors"), "cpu_gemm_wna16")


def missing_operator(method: str) -> str | None:
    """Name of the operator of vLLM's that `method` needs on the CPU and that this kind of CPU has not got."""
    from vllm import _custom_ops  # noqa: F401  # loads the library

    operator = _OPERATORS.get(method)
    return operator if operator and not hasattr(torch.ops._C, operator) else None


def quantize(source: Path, target: Path, method: str) -> Path:
    """Write the checkpoint `source` into the folder `target`, quantized by one of `METHODS`, and return `target`.

    Projections of the decoder layers are quantized; embeddings, norms, biases and `lm_head` are copied, as are the
    tokenizer and the division into files. Adapters are to be made from `source`.
    """
    pack, settings = _METHODS[method]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.index.json"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": settings}, indent=2) + "\n")
    for file in target.glob("*.safetensors"):
        tensors: Tensors = {}
        for name, tensor in load_file(file).items():
            if ".layers." in name and tensor.ndim == 2:
                module = name.removesuffix(".weight")
                tensors |= {f"{module}.{part}": packed for part, packed in pack(tensor).items()}
            else:
                tensors[name] = tensor
        save_file(tensors, file, metadata={"format": "pt"})
    return target
