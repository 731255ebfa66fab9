"""LoRA adapters that survive vLLM's sleep, wake-up and weight reload.

The engine loads this package through the ``vllm.general_plugins`` entry point ``lora_reload``. Importing it imports no
part of vLLM.

Limits: one process group per engine replica reloads as a whole (every rank or none is asked to); tensors that code
outside vLLM allocates in the weights pool are not known and not restored.
"""

from .errors import (
    AdapterMissingError,
    AdapterRefusedError,
    AsleepError,
    LoRAReloadError,
    SeamMissingError,
    SettingError,
    WeightsMissingError,
)
from .ranks import nearest_max_lora_rank
from .update import UpdatedAdapter, update_adapter

__version__ = "0.1.0"

__all__ = [
    "AdapterMissingError",
    "AdapterRefusedError",
    "AsleepError",
    "LoRAReloadError",
    "SeamMissingError",
    "SettingError",
    "UpdatedAdapter",
    "WeightsMissingError",
    "__version__",
    "nearest_max_lora_rank",
    "update_adapter",
]
