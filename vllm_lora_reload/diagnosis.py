"""Say of a failed load which tensor and which file it stopped at. vLLM's own errors often name neither."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .files import open_regular, read_json
from .tensors import SAFETENSORS_DTYPES


def annotate(error: Exception, note: str) -> None:
    """Add `note` to the error's message, keeping the error and its type: callers may catch it by type."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} [{note}]", *error.args[1:])
    elif not error.args:
        error.args = (note,)
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


def local_folder(path: Any) -> Path | None:
    """Where vLLM looks for an adapter's files if `path` is no hub's name; None if it is no path at all."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in os.fspath(path):
        return None
    return Path(os.path.expanduser(path)).absolute()


def adapter_rank(folder: str) -> int | None:
    """The ``r`` that a PEFT folder's config states, if it can be read."""
    try:
        return int(peft_config(folder)["r"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def peft_config(folder: str) -> dict[str, Any]:
    """A PEFT folder's config.

    Raises:
        ValueError: it cannot be read.
    """
    where = local_folder(folder)
    try:
        config = read_json(where / _CONFIG) if where is not None else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{_CONFIG} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{_CONFIG} in {folder!r} is not there, or is no JSON object")
    return config


_CONFIG = "adapter_config.json"
_CHECKED = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "peft_type", "init_lora_weights", "bias", "use_rslora"}
# Of PEFT, and of frameworks that extend its config: they say how an adapter came to be, or which modules it has, which
# its tensors say too.
_NO_MATTER = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",  # vLLM looks at this and takes or refuses it, on every release
    "fan_in_fan_out",  # how the base weights lie
    "lora_dropout",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "lora_dtype",
    "lorap_lr_ratio",
    "lorap_emb_lr",
}
# Others change the base weights, which the engine has as they were before.
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


def unfit_settings(config: Mapping[str, Any], understood: Collection[str]) -> list[str]:
    """Why an adapter with this PEFT config is not known to be served right: what was given, and what may be.

    Args:
        config: what stands in ``adapter_config.json``.
        understood: settings that the vLLM at hand takes into account.
    """
    reasons = []
    if config.get("peft_type") not in (None, "LORA"):
        reasons.append(f"peft_type is {config['peft_type']!r}, not 'LORA'")
    for where, rank in _numbers("r", config.get("r"), config.get("rank_pattern")):
        if type(rank) is not int or rank < 1:
            reasons.append(f"{where} is {rank!r}, not a whole number of at least 1")
    for where, alpha in _numbers("lora_alpha", config.get("lora_alpha"), config.get("alpha_pattern")):
        if type(alpha) not in (int, float) or not 2.0**-126 < alpha < 2.0**127:  # NaN is not
            reasons.append(f"{where} is {alpha!r}, not a positive number that float32 holds")
    init = config.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _INITS)):
        reasons.append(
            f"init_lora_weights is {init!r}, which changes base weights; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    if config.get("bias") not in (None, "none"):
        reasons.append(f"bias is {config['bias']!r}, not 'none'")
    if not isinstance(config.get("use_rslora"), (bool, type(None))):
        reasons.append(f"use_rslora is {config['use_rslora']!r}, not true or false")
    for name, value in config.items():
        if not value or name in _NO_MATTER or name in understood or _is_default(name, value):
            continue
        if name in _PATTERNS or name == "use_rslora":
            reasons.append(f"{name}: this vLLM would leave it out")
        elif name not in _CHECKED:
            reasons.append(
                f"{name} is {value!r}: this vLLM would leave it out, and it may change what the tensors mean"
            )
    return reasons


_PATTERNS = ("rank_pattern", "alpha_pattern")


def _numbers(name: str, value: Any, pattern: Any) -> list[tuple[str, Any]]:
    """One number for all modules, and those of single ones, with where they stand."""
    each = pattern.items() if isinstance(pattern, dict) else [("", pattern)] if pattern else ()
    return [(name, value), *((f"{name} of {key}", number) for key, number in each)]


def _is_default(name: str, value: Any) -> bool:
    """Whether the installed PEFT, if there is one, has this value where the user has set nothing."""
    try:
        fields = importlib.import_module("peft").LoraConfig.__dataclass_fields__ if name not in _CHECKED else {}
    except ImportError:
        return False
    return name in fields and type(fields[name].default) is type(value) and bool(fields[name].default == value)


def unfit_dtypes(folder: str) -> list[str]:
    """Which tensors of a PEFT folder have a dtype that no adapter has: vLLM converts any without a word.

    Raises:
        Exception: the file with the tensors is damaged.
    """
    where = local_folder(folder)
    if where is None:
        return []
    file: Path | None = where / "adapter_model.safetensors"
    if file is not None and file.is_file():
        with safe_open(file, framework="pt") as content:
            dtypes = {name: content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118 - not a dict
    elif file := next((where / name for name in _PICKLES if (where / name).is_file()), None):  # as vLLM chooses
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        kinds = {dtype: kind for kind, dtype in SAFETENSORS_DTYPES.items()}
        dtypes = {name: kinds.get(tensor.dtype, str(tensor.dtype)) for name, tensor in tensors.items()}
    else:
        return []
    if not dtypes:
        return ["it has no tensors"]
    return [f"{name} has dtype {dtype}" for name, dtype in dtypes.items() if dtype not in ("F16", "BF16", "F32", "F64")]


_PICKLES = ("adapter_model.bin", "adapter_model.pt")


def where(tensor: str | None, folder: Path | None) -> str | None:
    """Words for where a load stopped.

    Args:
        tensor: checkpoint name of the last tensor that the model was given; None if it was given none.
        folder: the checkpoint; None if the tensors came from a caller.

    Returns:
        None where nothing can be said.
    """
    if folder is not None:
        if not folder.is_dir():
            return f"{folder} is not a folder"
        for index in sorted(folder.glob("*.safetensors.index.json")):
            try:
                read_json(index)["weight_map"].values()
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as damage:
                return f"{index} is damaged: {type(damage).__name__}: {damage}"
        holder = None
        for file in sorted(folder.glob("*.safetensors")):
            try:
                open_regular(file).close()
                with safe_open(file, framework="pt") as content:
                    if tensor in content.keys():  # noqa: SIM118 - not a dict
                        holder = file
            except (OSError, SafetensorError) as damage:
                return f"{file} is damaged: {damage}"
        if holder is not None:
            return f"while loading {tensor} from {holder}"
    return None if tensor is None else f"while loading {tensor}"
