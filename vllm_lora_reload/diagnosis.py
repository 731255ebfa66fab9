"""Say of a failed load which tensor and which file it stopped at. vLLM's own errors often name neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .files import open_regular, read_json


def annotate(error: Exception, note: str) -> None:
    """Add `note` to the error's message, keeping the error and its type: callers may catch it by type."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} [{note}]", *error.args[1:])
    elif not error.args:
        error.args = (note,)
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


# Settings that change what an adapter's tensors mean.
_SPECIAL = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)


def adapter_rank(folder: str) -> int | None:
    """The ``r`` that a PEFT folder's config states, if it can be read."""
    try:
        return int(_peft_config(folder)["r"])
    except (ValueError, KeyError, TypeError):
        return None


def special_settings(folder: str) -> set[str]:
    """Which settings of a PEFT folder's config, if it can be read, change what its tensors mean."""
    config = _peft_config(folder)
    return {name for name in _SPECIAL if config.get(name)}


def _peft_config(folder: str) -> dict[str, Any]:
    """Empty if it cannot be read."""
    try:
        config = read_json(Path(folder, "adapter_config.json"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


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
