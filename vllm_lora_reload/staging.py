"""Carrying an adapter's tensors to the workers: a PEFT folder in shared memory, as safetensors. Nothing is pickled."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .errors import AdapterRefusedError

NO_FILES = "lora_reload:"  # with an adapter's name, the path of requests for one that came as tensors
FOLLOWS = "another rank could not take it"  # a worker's answer
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARED_MEMORY = Path("/dev/shm")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MARGIN = 16 << 20  # bytes that are left to others
# `get_peft_model_state_dict` leaves out the adapter's name, which parameters of a PEFT model have after `lora_A`.
_ADAPTER_NAME = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$|\.(lora_embedding_[AB])\.[^.]+$")


def peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names that they have in a PEFT file, on the CPU.

    Args:
        tensors: from ``get_peft_model_state_dict``, or a PEFT model's own parameters.

    Raises:
        AdapterRefusedError: there are none, one is no plain tensor of floats, or they are of two adapters of one model.
    """
    if not tensors:
        raise AdapterRefusedError("no tensors were given")
    named: dict[str, torch.Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in tensors.items():
        if why := _unfit(tensor):
            raise AdapterRefusedError(f"{name} {why}")
        plain = _ADAPTER_NAME.sub(lambda m: f".{m[1]}.weight" if m[1] else f".{m[2]}", name)
        if (other := origins.setdefault(plain, name)) != name:
            raise AdapterRefusedError(f"{other} and {name} belong to two adapters; give the tensors of one")
        named[plain] = tensor.detach().to("cpu", copy=True).contiguous()  # views of one storage come apart
    return named


def _unfit(tensor: Any) -> str | None:
    """Why this is no tensor that an adapter can have."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}; a torch tensor is needed"
    if hasattr(tensor, "full_tensor"):
        return "is a part of a distributed tensor; give what its full_tensor() returns"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        return f"has {kind}; float16, bfloat16, float32 or float64 is needed, not sparse"
    return None


def plain_config(peft_config: Any) -> dict[str, Any]:
    """A PEFT config (a dict or a ``peft.LoraConfig``) as what stands in ``adapter_config.json``."""
    config = dict(peft_config) if isinstance(peft_config, Mapping) else peft_config.to_dict()
    return {key: sorted(value) if isinstance(value, (set, frozenset)) else value for key, value in config.items()}


def write(tensors: Mapping[str, torch.Tensor], peft_config: Any) -> tempfile.TemporaryDirectory[str]:
    """A PEFT folder of these tensors, in shared memory where there is enough. `cleanup` it."""
    named = peft_names(tensors)
    shared = None
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        needed = sum(tensor.nbytes for tensor in named.values()) + _MARGIN
        shared = SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > needed else None
    folder = tempfile.TemporaryDirectory(prefix="lora_reload-", dir=shared)
    try:
        save_file(named, Path(folder.name, WEIGHTS))
        Path(folder.name, CONFIG).write_text(json.dumps(plain_config(peft_config), default=str))
    except BaseException:
        folder.cleanup()
        raise
    return folder


def contents(folder: str) -> dict[str, bytes]:
    """What `folder` takes as files."""
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@contextmanager
def folder(path: str, files: Mapping[str, bytes] | None) -> Iterator[str]:
    """The PEFT folder `path`, or one with these files where a worker does not see it.

    Raises:
        FileNotFoundError: it is not to be seen, and no files came.
    """
    if Path(path).is_dir():
        yield path
        return
    if files is None:
        raise FileNotFoundError(path)
    with tempfile.TemporaryDirectory(prefix="lora_reload-") as copy:
        for name in (WEIGHTS, CONFIG):
            Path(copy, name).write_bytes(files[name])
        yield copy
