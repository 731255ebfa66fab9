"""Which cached prefixes requests of an adapter may use.

vLLM knows the prefixes that an adapter has cached by its name (from 0.32 by its path too), not by its weights. Here a
name gets a salt that was never used before whenever its weights may have become others: by an update, under another id
or path, with ``load_inplace``, or after it was removed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from . import seams

_MOST = 4096  # names that are remembered; one that comes back after it was forgotten gets a new salt


@dataclass
class _Known:
    number: int  # adapter id; 0 if it was removed
    path: str | None  # None if an update has decided what the name stands for, wherever its requests point
    inplace: bool  # whether a request with ``load_inplace`` has come
    salt: str


class Prefixes:
    """What one front end knows of its adapters' weights, by name."""

    def __init__(self) -> None:
        self._names: dict[str, _Known] = {}
        self._complete = True  # no name was forgotten

    def salt(self, lora_request: Any) -> str:
        """For a request of this adapter, which enters the engine now.

        Empty for a name that has had one set of weights.
        """
        known = self._names.get(lora_request.lora_name)
        inplace = bool(getattr(lora_request, "load_inplace", False))
        if known is None:
            known = self._note(lora_request, "" if self._complete else _new())
        elif (
            known.number != lora_request.lora_int_id
            or known.path not in (None, lora_request.lora_path)
            or (inplace and not (known.inplace and seams.is_lora_request(lora_request)))  # else it may bring tensors
        ):
            known = self._note(lora_request, _new())
        return known.salt

    def added(self, lora_request: Any) -> None:
        """``add_lora`` was called."""
        if getattr(lora_request, "load_inplace", False):
            self._note(lora_request, _new())
        else:
            self.salt(lora_request)

    def updated(self, lora_request: Any) -> None:
        """New weights were swapped in under the request's name and id, or may have been."""
        self._note(lora_request, _new()).path = None

    def removed(self, number: int) -> None:
        """``remove_lora`` was called."""
        mine = [known for known in self._names.values() if known.number == number]
        for known in mine:
            known.number = 0
        if not mine:  # other front ends may have used it
            self._complete = False

    def _note(self, lora_request: Any, salt: str) -> _Known:
        name = lora_request.lora_name
        self._names.pop(name, None)
        inplace = bool(getattr(lora_request, "load_inplace", False))
        known = self._names[name] = _Known(lora_request.lora_int_id, lora_request.lora_path, inplace, salt)
        if len(self._names) > _MOST:
            del self._names[next(iter(self._names))]
            self._complete = False
        return known


def _new() -> str:
    return f"|adapter version {uuid.uuid4().hex}"
