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

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARED_MEMORY = Path("/dev/shm")
_MARGIN = 16 << 20  # bytes that are left to others
# `get_peft_model_state_dict` leaves out the adapter's name, which parameters of a PEFT model have after `lora_A`.
_ADAPTER_NAME = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$|\.(lora_embedding_[AB])\.[^.]+$")


def peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names that they have in a PEFT file, on the CPU.

    Args:
        tensors: from ``get_peft_model_state_dict``, or a PEFT model's own parameters.

    Raises:
        AdapterRefusedError: they are of two adapters of one model.
    """
    named: dict[str, torch.Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = _ADAPTER_NAME.sub(lambda m: f".{m[1]}.weight" if m[1] else f".{m[2]}", name)
        if (other := origins.setdefault(plain, name)) != name:
            raise AdapterRefusedError(f"{other} and {name} belong to two adapters; give the tensors of one")
        named[plain] = tensor.detach().to("cpu", copy=True).contiguous()  # views of one storage come apart
    return named


def plain_config(peft_config: Any) -> dict[str, Any]:
    """A PEFT config (a dict or a ``peft.LoraConfig``) as what stands in ``adapter_config.json``."""
    config = dict(peft_config) if isinstance(peft_config, Mapping) else peft_config.to_dict()
    return {key: sorted(value) if isinstance(value, (set, frozenset)) else value for key, value in config.items()}


@contextmanager
def written(tensors: Mapping[str, torch.Tensor], peft_config: Any) -> Iterator[Path]:
    """A PEFT folder of these tensors for the length of the block, in shared memory where there is enough."""
    named = peft_names(tensors)
    shared = None
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        needed = sum(tensor.nbytes for tensor in named.values()) + _MARGIN
        shared = SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > needed else None
    with tempfile.TemporaryDirectory(prefix="lora_reload-", dir=shared) as folder:
        save_file(named, Path(folder, WEIGHTS))
        Path(folder, CONFIG).write_text(json.dumps(plain_config(peft_config), default=str))
        yield Path(folder)


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
