"""What a user can choose: ``LLM(..., additional_config={"lora_reload": {"adapters": "drop"}})``.

Each setting has an environment variable too (``VLLM_LORA_RELOAD_ADAPTERS=drop``); what stands in the engine's config
goes before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from .errors import SettingError

KEY = "lora_reload"
_PREFIX = "VLLM_LORA_RELOAD_"


@dataclass(frozen=True)
class Settings:
    """Attributes:
    adapters: ``keep`` them over sleep and reload, or ``drop`` them all after a reload, as vLLM does from 0.28 on.
    on_missing: what a request gets while base weights are missing: it is refused (``refuse``) or answered, with a
        warning in the log (``warn``). ``reload`` loads the checkpoint by itself at the wake-up that maps the weights
        again, and refuses if that failed.
    """

    adapters: Literal["keep", "drop"] = "keep"
    on_missing: Literal["refuse", "reload", "warn"] = "refuse"

    @classmethod
    def of(cls, vllm_config: Any, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings of one engine.

        Raises:
            SettingError: a name or a value that does not exist.
        """
        config = getattr(vllm_config, "additional_config", None)
        given = dict(config.get(KEY) or {}) if isinstance(config, Mapping) else {}
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise SettingError(f"additional_config['{KEY}'] has no setting {unknown[0]!r}; there are {names}")
        values: dict[str, Any] = {
            name: environ[_PREFIX + name.upper()] for name in names if _PREFIX + name.upper() in environ
        } | given
        hints = get_type_hints(cls)
        for name, value in values.items():
            if value not in (allowed := get_args(hints[name])):
                raise SettingError(f"setting {name} of vllm-lora-reload is {value!r}, not one of {list(allowed)}")
        return cls(**values)
