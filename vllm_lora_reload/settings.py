"""What a user can choose: ``LLM(..., additional_config={"lora_reload": {"adapters": "drop"}})``.

Each setting has an environment variable too (``LORA_RELOAD_ADAPTERS=drop``, or ``VLLM_LORA_RELOAD_ADAPTERS`` as it was
called first); what stands in the engine's config goes before it. What does not exist is refused, under any of these.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from .errors import SettingError

KEY = "lora_reload"
PREFIXES = ("LORA_RELOAD_", "VLLM_LORA_RELOAD_")  # the first goes before; vLLM warns of what begins as its own do


_LEAST = {"ring_bytes": 2 << 20}
_MOST = {"ring_bytes": 1 << 50, "ring_threads": 1024, "ring_chunk": 1 << 40}
_SMALLEST_CHUNK = 8192
_MULTIPLE = {"ring_chunk": 4096}
_FACTOR = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ALIKE = 0.9  # of two keys in a config that others share: one wrong letter


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
            SettingError: a name or a value that does not exist; the message says what was given and what there is.
        """
        names = [field.name for field in fields(cls)]
        given = in_config(getattr(vllm_config, "additional_config", None))
        if unknown := [name for name in given if name not in names]:
            raise SettingError(f"additional_config['{KEY}'] has no setting {_no_such(unknown[0], names)}")
        values: dict[str, Any] = {}
        for prefix in reversed(PREFIXES):
            known = {prefix + name.upper(): name for name in names}
            for variable in sorted(name for name in environ if name.startswith(prefix)):
                if variable not in known:
                    raise SettingError(f"there is no environment variable {_no_such(variable, known)}")
                values[known[variable]] = environ[variable]
        values |= given
        hints = get_type_hints(cls)
        settings = cls(**{name: _checked(name, hints[name], value) for name, value in values.items()})
        if settings.ring_chunk and not _SMALLEST_CHUNK <= settings.ring_chunk <= settings.ring_bytes // 2:
            raise SettingError(
                f"setting ring_chunk of vllm-lora-reload is {settings.ring_chunk}, not between {_SMALLEST_CHUNK} and "
                f"half of ring_bytes, which is {settings.ring_bytes}"
            )
        return settings


def variables() -> list[str]:
    """The environment variables that there are."""
    return [prefix + field.name.upper() for prefix in PREFIXES for field in fields(Settings)]


def in_config(config: Any) -> Mapping[str, Any]:
    """This package's part of an engine's ``additional_config``, which need not be a mapping.

    Raises:
        SettingError: it is none, or stands under another key.
    """
    if not isinstance(config, Mapping):
        return {}
    for key in config:
        if key != KEY and isinstance(key, str) and _alike(key):
            raise SettingError(
                f"additional_config has the key {_shown(key)}: settings of vllm-lora-reload go under {KEY!r}"
            )
    given = config.get(KEY, {})
    if not isinstance(given, Mapping):
        raise SettingError(
            f"additional_config['{KEY}'] is {_shown(given)}, not a mapping of settings to values such as "
            '{"adapters": "keep"}'
        )
    return given


def _alike(key: str) -> bool:
    ours, theirs = (re.sub("[^a-z0-9]", "", each.lower()) for each in (KEY, key[:80]))
    return difflib.SequenceMatcher(None, ours, theirs).ratio() >= _ALIKE


def _no_such(name: Any, names: Iterable[str]) -> str:
    names = list(names)
    wanted = str(name)[:80].replace("-", "_") if isinstance(name, str) else ""
    same_case = wanted.upper() if names[0].isupper() else wanted.lower()
    close = difflib.get_close_matches(same_case, names, n=1, cutoff=0.8)
    return f"{_shown(name)}; " + (f"did you mean {close[0]!r}? There are {names}" if close else f"there are {names}")


def _shown(value: Any) -> str:
    """What was given, in a line of bounded length, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits, and classes of others
        text = f"of type {type(value).__name__}, which cannot be printed"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _checked(name: str, hint: Any, value: Any) -> Any:
    wrong = f"setting {name} of vllm-lora-reload is {_shown(value)}, not "
    if hint is str:
        path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
        if isinstance(path, str) and "\0" not in path:
            return os.path.abspath(os.path.expanduser(path)) if path else ""
        raise SettingError(f"{wrong}a path")
    if hint is int:
        number, least, most = _number(value), _LEAST.get(name, 0), _MOST[name]
        if number is None or not least <= number <= most or number % _MULTIPLE.get(name, 1):
            raise SettingError(
                f"{wrong}a number of at least {least} and at most {most}"
                + (f", in multiples of {_MULTIPLE[name]}" if name in _MULTIPLE else "")
            )
        return number
    allowed = get_args(hint)
    if not isinstance(value, str) or value not in allowed:
        quoted = ", in quotes where the format has words for true and false" if isinstance(value, bool) else ""
        close = difflib.get_close_matches(value.lower(), allowed, n=1) if isinstance(value, str) else []
        raise SettingError(
            f"{wrong}one of {list(allowed)}{quoted}" + (f"; did you mean {close[0]!r}?" if close else "")
        )
    return value


def _number(value: Any) -> int | None:
    """Of text no more digits than the largest number allowed can have: Python refuses to read thousands."""
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,18})([KMG]?)", value.strip())):
        return int(match[1]) * _FACTOR.get(match[2], 1)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
