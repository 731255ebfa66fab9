"""The front end's part: no request enters the engine while base weights are missing.

Whatever can take weights away or bring them passes through ``sleep``, ``wake_up`` or ``collective_rpc`` of the front
end. Each counts; a request that finds the count changed since the workers last said that all is well asks them once.
Requests in between, and all requests of an engine that never sleeps, ask nothing.
"""

from __future__ import annotations

import abc
from typing import Any

from . import seams
from .errors import WeightsMissingError


def guard(engine: Any) -> None:
    """Extend one ``LLMEngine`` or ``AsyncLLM``."""
    _, async_llm = seams.engine_classes()
    seams.extend(engine, GuardedAsyncLLM if isinstance(engine, async_llm) else GuardedLLMEngine)
    engine._lora_reload_calls = engine._lora_reload_checked = 0


def _refuse(statuses: list[dict[str, str | None]]) -> None:
    errors = [f"rank {rank}: {status['error']}" for rank, status in enumerate(statuses) if status["error"]]
    if errors:
        refusal = seams.as_request_error(WeightsMissingError)
        raise refusal(errors[0] if len(errors) == 1 else f"{errors[0]} (and {len(errors) - 1} more ranks)")


class GuardedLLMEngine:
    """Mixed in before ``LLMEngine``."""

    _lora_reload_calls: int
    _lora_reload_checked: int

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's.

        Raises:
            WeightsMissingError: base weights are missing; the message says why and what loads them.
        """
        calls = self._lora_reload_calls
        if calls != self._lora_reload_checked:
            _refuse(super().collective_rpc("lora_reload_status"))  # type: ignore[misc]
            self._lora_reload_checked = calls
        return super().add_request(*args, **kwargs)  # type: ignore[misc]

    def sleep(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_reload_calls += 1
        return super().sleep(*args, **kwargs)  # type: ignore[misc]

    def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_reload_calls += 1
        return super().wake_up(*args, **kwargs)  # type: ignore[misc]

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_reload_calls += 1
        return super().collective_rpc(*args, **kwargs)  # type: ignore[misc]


class GuardedAsyncLLM(abc.ABC):
    """Mixed in before ``AsyncLLM``. An ABC like it: Python changes an object's class only to one of the same layout."""

    _lora_reload_calls: int
    _lora_reload_checked: int

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's.

        Raises:
            WeightsMissingError: base weights are missing; the message says why and what loads them.
        """
        calls = self._lora_reload_calls
        if calls != self._lora_reload_checked:
            _refuse(await super().collective_rpc("lora_reload_status"))  # type: ignore[misc]
            self._lora_reload_checked = calls
        return await super().add_request(*args, **kwargs)  # type: ignore[misc]

    async def sleep(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_reload_calls += 1
        return await super().sleep(*args, **kwargs)  # type: ignore[misc]

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_reload_calls += 1
        return await super().wake_up(*args, **kwargs)  # type: ignore[misc]

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_reload_calls += 1
        return await super().collective_rpc(*args, **kwargs)  # type: ignore[misc]
