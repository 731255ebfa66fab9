"""LoRA adapters that survive vLLM's sleep, wake-up and weight reload.

Importing this package imports neither torch nor vLLM; the engine loads it through the
``vllm.general_plugins`` entry point ``lora_reload``.

Limits: one process group per engine replica reloads as a whole (every rank or none is asked to);
tensors that code outside vLLM allocates in the weights pool are not known and not restored.
"""

from .errors import LoRAReloadError, SeamMissingError, WeightsMissingError

__version__ = "0.1.0"

__all__ = ["LoRAReloadError", "SeamMissingError", "WeightsMissingError", "__version__"]
