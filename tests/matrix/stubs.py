"""Lets a release without its compiled half build, wrap and load models on the CPU. Nothing here can compute."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

# Looked up when layers are built; never called, since nothing runs a forward pass.
_OPS = {
    "_C": (
        "silu_and_mul(Tensor! out, Tensor input) -> ()",
        "mul_and_silu(Tensor! out, Tensor input) -> ()",
        "gelu_and_mul(Tensor! out, Tensor input) -> ()",
        "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()",
        "gelu_new(Tensor! out, Tensor input) -> ()",
        "gelu_fast(Tensor! out, Tensor input) -> ()",
        "gelu_quick(Tensor! out, Tensor input) -> ()",
        "rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()",
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> ()",
    ),
}
_libraries: list[Any] = []  # definitions live as long as these


def define_ops() -> None:
    """Define the operators that layers look up."""
    for namespace, schemas in _OPS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for schema in schemas:
            if not hasattr(getattr(torch.ops, namespace), schema.partition("(")[0]):
                library.define(schema)


class _LooksLikeCuda:
    """A platform that kernel selection takes for CUDA: MoE layers on the CPU refuse LoRA."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True


def _select_triton_experts() -> None:
    from vllm.platforms import current_platform

    package = "vllm.model_executor.layers.fused_moe"
    for name in (f"{package}.oracle.unquantized", f"{package}.unquantized_fused_moe_method"):
        vars(importlib.import_module(name))["current_platform"] = _LooksLikeCuda(current_platform)
    experts = getattr(importlib.import_module(f"{package}.fused_moe"), "TritonExperts", None)
    if experts:  # old releases leave its other names out where there is no Triton
        for name in (package, f"{package}.unquantized_fused_moe_method"):
            vars(importlib.import_module(name))["TritonExperts"] = experts


def prepare() -> None:
    """Call before anything else of vLLM is imported."""
    os.environ |= {
        "VLLM_PLUGINS": "",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    torch.set_num_threads(1)  # tiny tensors
    define_ops()
    import vllm.platforms

    # Detection goes by the name and version of the installed wheel, and finds none.
    vars(vllm.platforms)["builtin_platform_plugins"] = {"cpu": lambda: "vllm.platforms.cpu.CpuPlatform"}
    from vllm.platforms import current_platform

    type(current_platform).import_kernels = classmethod(lambda cls: None)
    from vllm.utils import torch_utils

    copy = getattr(torch_utils, "async_tensor_h2d", None)
    if copy and copy.__defaults__ == (True,):  # 0.22 pins memory wherever it runs
        copy.__defaults__ = (False,)
    from vllm import _custom_ops
    from vllm.model_executor.models import registry

    _custom_ops._supports_onednn = False  # it packs weights into memory that no tensor shows
    vars(registry)["_run_in_subprocess"] = lambda function: function()  # a process per model costs seconds
    _select_triton_experts()
    torch.accelerator.synchronize = lambda *args, **kwargs: None
