"""What a user can choose: ``LLM(..., additional_config={"lora_reload": {"adapters": "drop"}})``.

Each setting has an environment variable too (``VLLM_LORA_RELOAD_ADAPTERS=drop``); what stands in the engine's config
goes before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from .errors import SettingError

KEY = "lora_reload"
_PREFIX = "VLLM_LORA_RELOAD_"


_LEAST = {"ring_bytes": 2 << 20}
_SMALLEST_CHUNK = 8192
_MULTIPLE = {"ring_chunk": 4096}
_FACTOR = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """Attributes:
    adapters: ``keep`` them over sleep and reload, or ``drop`` them all after a reload, as vLLM does from 0.28 on.
    on_missing: what a request gets while base weights are missing: it is refused (``refuse``) or answered, with a
        warning in the log (``warn``). ``reload`` loads the checkpoint by itself at the wake-up that maps the weights
        again, and refuses if that failed.
    snapshot_dir: a folder on a local disk for snapshots of the base weights; none are kept if it is empty.
    snapshot: when one is written: ``once``, after start-up, if there is none that fits; ``always``, also after every
        load that changed the weights; ``never``, only when asked (``collective_rpc("lora_reload_take_snapshot")``).
    verify: which tensors are compared with the snapshot's digests after a restore: none (``off``), every sixteenth
        (``sample``, one at the least) or all (``full``). One that may have been changed is compared as a whole.
    replay: whether ``reload_weights`` may copy a checkpoint's tensors straight to where the load at start-up put them
        (``on``), or leaves all loading to vLLM (``off``).
    ring_bytes: of pinned host memory for restoring, at most, for each worker; "512M" and the like in the environment.
    ring_threads: how many reads go on at a time; 0 chooses from the number of cores.
    ring_chunk: bytes of one read, a multiple of 4096; 0 chooses.
    ring_reader: see `ring.Ring`.
    """

    adapters: Literal["keep", "drop"] = "keep"
    on_missing: Literal["refuse", "reload", "warn"] = "refuse"
    snapshot_dir: str = ""
    snapshot: Literal["once", "always", "never"] = "once"
    verify: Literal["off", "sample", "full"] = "full"
    replay: Literal["on", "off"] = "on"
    ring_bytes: int = 512 << 20
    ring_threads: int = 0
    ring_chunk: int = 0
    ring_reader: Literal["auto", "buffered", "direct"] = "auto"

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
        settings = cls(**{name: _checked(name, hints[name], value) for name, value in values.items()})
        if settings.ring_chunk and not _SMALLEST_CHUNK <= settings.ring_chunk <= settings.ring_bytes // 2:
            raise SettingError(
                f"setting ring_chunk of vllm-lora-reload is {settings.ring_chunk}, not between {_SMALLEST_CHUNK} and "
                f"half of ring_bytes, which is {settings.ring_bytes}"
            )
        return settings


def _checked(name: str, hint: Any, value: Any) -> Any:
    if hint is str:
        if isinstance(value, (str, os.PathLike)):
            return os.path.abspath(os.path.expanduser(value)) if value else ""
        raise SettingError(f"setting {name} of vllm-lora-reload is {value!r}, not a path")
    if hint is int:
        number = _number(value)
        if number is None or number < _LEAST.get(name, 0) or number % _MULTIPLE.get(name, 1):
            raise SettingError(
                f"setting {name} of vllm-lora-reload is {value!r}, not a number of at least {_LEAST.get(name, 0)}"
                + (f", in multiples of {_MULTIPLE[name]}" if name in _MULTIPLE else "")
            )
        return number
    if value not in (allowed := get_args(hint)):
        raise SettingError(f"setting {name} of vllm-lora-reload is {value!r}, not one of {list(allowed)}")
    return value


def _number(value: Any) -> int | None:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)([KMG]?)", value.strip())):
        return int(match[1]) * _FACTOR.get(match[2], 1)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
