"""LoRA adapters that survive vLLM's sleep, wake-up and weight reload.

Importing this package imports neither torch nor vLLM; the engine loads it through the ``vllm.general_plugins`` entry
point ``lora_reload``.

Limits: one process group per engine replica reloads as a whole (every rank or none is asked to); tensors that code
outside vLLM allocates in the weights pool are not known and not restored.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    AdapterMissingError,
    AdapterRefusedError,
    AsleepError,
    LoRAReloadError,
    SeamMissingError,
    SettingError,
    SnapshotError,
    WeightsMissingError,
)
from .ranks import nearest_max_lora_rank

if TYPE_CHECKING:
    from .update import UpdatedAdapter, update_adapter

__version__ = "0.1.0"

__all__ = [
    "AdapterMissingError",
    "AdapterRefusedError",
    "AsleepError",
    "LoRAReloadError",
    "SeamMissingError",
    "SettingError",
    "SnapshotError",
    "UpdatedAdapter",
    "WeightsMissingError",
    "__version__",
    "nearest_max_lora_rank",
    "update_adapter",
]


def __getattr__(name: str) -> Any:
    if name in ("UpdatedAdapter", "update_adapter"):
        from . import update  # it needs torch

        return getattr(update, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
