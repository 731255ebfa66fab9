"""The front end's part: no request enters the engine while what it needs is missing.

Whatever can take weights away or bring them passes through ``sleep``, ``wake_up``, ``add_lora``, ``remove_lora`` or
``collective_rpc`` of the front end. Each counts; a request that finds the count changed since the workers were last
asked asks them once. Requests in between, and all requests of an engine that never sleeps, ask nothing.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from . import lifecycle, seams
from .errors import AdapterMissingError, WeightsMissingError
from .settings import Settings

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

Status = dict[str, Any]


@dataclass
class Guard:
    """What one front end knows of its workers.

    Attributes:
        warn_only: whether requests are answered all the same (setting ``on_missing``).
        calls: how many calls were made that can change how workers stand.
        checked: the value of `now` when they were last asked.
        error: why no request can be answered now.
        adapters: why requests for an adapter cannot, by id.
        versions: version of every adapter that this front end has updated, by id.
        inplace: path of every adapter that it has added with ``load_inplace``, by id.
        reserved: ids of names that this front end has begun to add.
        running: how many such calls have not come back; what the workers say meanwhile does not last.
        falling: how many of them are sleeps.
        updates: tasks that update adapters.
    """

    warn_only: bool
    calls: int = 0
    checked: int = field(default_factory=lambda: lifecycle.failures)
    error: str | None = None
    adapters: dict[int, str] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    inplace: dict[int, str] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    running: int = 0
    falling: int = 0
    updates: set[Any] = field(default_factory=set)

    @contextmanager
    def sleeping(self, level: int = 1, mode: str = "abort", **_: Any) -> Iterator[None]:
        """Around ``sleep``, with its arguments.

        Raises:
            ValueError: requests were to be kept over a sleep that loses the weights.
        """
        if level >= 2 and mode == "keep" and not self.warn_only:
            raise ValueError(
                "requests that are kept over sleep(level=2) would go on before the weights are back: "
                'use mode="abort" or mode="wait", or level 1'
            )
        self.falling += level > 0
        try:
            with self.changing():
                yield
        finally:
            self.falling -= level > 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around every call that can change how workers stand."""
        self.calls += 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.calls += 1

    @property
    def now(self) -> int:
        """Grows with everything that can change how workers stand, as far as this process sees it."""
        return self.calls + lifecycle.failures

    @property
    def stale(self) -> bool:
        return self.running > 0 or self.now != self.checked

    def learn(self, answers: list[Any], asked: int) -> None:
        """Take in what the workers answered, asked when `now` was `asked`. Of what is no status nothing is known."""
        statuses = [answer if _is_status(answer) else _unknown(answer) for answer in answers]
        errors = [f"rank {rank}: {status['error']}" for rank, status in enumerate(statuses) if status["error"]]
        more = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
        before, self.error = self.error, errors[0] + more if errors else None
        self.adapters = {int(number): why for status in statuses for number, why in status["adapters"].items()}
        # Loads inside a worker pass no front end, so an error is looked at again with every request.
        self.checked = asked if not errors else asked - 1
        if self.warn_only and self.error and self.error != before:
            logger.warning("Answering although %s", self.error)

    def refuse(self, lora_request: Any) -> None:
        """Raises:
        WeightsMissingError: base weights are missing or asleep; the message says why and what mends it.
        AdapterMissingError: the request's adapter is not in its slot.
        """
        error = self.error
        if self.falling and not error:
            error = 'the engine is falling asleep. Call wake_up(["weights"]), then ask again.'
        if error and not self.warn_only:
            raise seams.as_request_error(WeightsMissingError)(error)
        number = getattr(lora_request, "lora_int_id", None)
        if number in self.adapters:
            raise seams.as_request_error(AdapterMissingError)(
                f"adapter {lora_request.lora_name!r} is not there: {self.adapters[number]}. Bring it again with "
                "update_adapter, or with remove_lora and add_lora, then ask again."
            )

    def updated(self, engine: Any, number: int, version: int) -> None:
        """From now on the adapter's requests find no prefix that an older version of it has cached."""
        self._watch(engine)
        self.versions[number] = version

    def added(self, engine: Any, lora_request: Any) -> None:
        """An adapter was added, and read from its files for that.

        A server keeps ``load_inplace`` with the adapter's name. With a request it has vLLM read the files again before
        every step: over a later update, or when they are gone.
        """
        if getattr(lora_request, "load_inplace", False) and seams.is_lora_request(lora_request):
            self._watch(engine)
            self.inplace[lora_request.lora_int_id] = lora_request.lora_path

    def _watch(self, engine: Any) -> None:
        if not self.versions and not self.inplace:
            seams.requests_marked(engine, self._mark)

    def _mark(self, request: Any) -> None:
        lora = request.lora_request
        if lora is None:
            return
        if getattr(lora, "load_inplace", False) and self.inplace.get(lora.lora_int_id) == lora.lora_path:
            request.lora_request = seams.loaded_once(lora)
        if lora.lora_int_id not in self.versions:
            return
        version = f"|adapter version {self.versions[lora.lora_int_id]}"
        request.cache_salt = f"{request.cache_salt or ''}{version}"
        if request.mm_features:
            # What encoders made of images is known by these names; they bear the adapter's where it changes that.
            own = f"{lora.lora_name}:"
            request.mm_features = [
                replace(each, identifier=each.identifier + version) if each.identifier.startswith(own) else each
                for each in request.mm_features
            ]


def _is_status(answer: Any) -> bool:
    return isinstance(answer, dict) and "error" in answer and isinstance(answer.get("adapters"), dict)


def _unknown(answer: Any) -> Status:
    """Of a worker that says something else: requests are refused, and the next one asks again."""
    said = f"{type(answer).__name__}: {answer}"[:200]
    return {"error": f"asked how its weights stand, this worker said ({said}). Ask again.", "adapters": {}}


def guard(engine: Any) -> None:
    """Extend one ``LLMEngine`` or ``AsyncLLM``."""
    _, async_llm = seams.engine_classes()
    engine.lora_reload = Guard(warn_only=Settings.of(engine.vllm_config).on_missing == "warn")
    seams.extend(engine, GuardedAsyncLLM if isinstance(engine, async_llm) else GuardedLLMEngine)


def _lora_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a call of ``add_request``; None if there is none."""
    if "lora_request" in kwargs:
        return kwargs["lora_request"]
    return next((each for each in args if hasattr(each, "lora_int_id")), None)


class GuardedLLMEngine:
    """Mixed in before ``LLMEngine``."""

    lora_reload: Guard

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's.

        Raises:
            WeightsMissingError, AdapterMissingError: see `Guard.refuse`.
        """
        state = self.lora_reload
        if state.stale:
            asked = state.now
            state.learn(super().collective_rpc("lora_reload_status"), asked)  # type: ignore[misc]
        if state.error or state.adapters:
            state.refuse(_lora_request(args, kwargs))
        return super().add_request(*args, **kwargs)  # type: ignore[misc]

    def sleep(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.sleeping(*args, **kwargs):
            return super().sleep(*args, **kwargs)  # type: ignore[misc]

    def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            return super().wake_up(*args, **kwargs)  # type: ignore[misc]

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            return super().collective_rpc(*args, **kwargs)  # type: ignore[misc]

    def add_lora(self, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            added = super().add_lora(lora_request, *args, **kwargs)  # type: ignore[misc]
        self.lora_reload.added(self, lora_request)
        return added

    def remove_lora(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            return super().remove_lora(*args, **kwargs)  # type: ignore[misc]


class GuardedAsyncLLM(abc.ABC):
    """Mixed in before ``AsyncLLM``. An ABC like it: Python changes an object's class only to one of the same layout."""

    lora_reload: Guard

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's.

        Raises:
            WeightsMissingError, AdapterMissingError: see `Guard.refuse`.
        """
        state = self.lora_reload
        while state.stale:
            asked = state.now
            state.learn(await super().collective_rpc("lora_reload_status"), asked)  # type: ignore[misc]
            if state.now == asked:  # else that was before something else happened
                break
        if state.error or state.adapters or state.falling:
            state.refuse(_lora_request(args, kwargs))
        return await super().add_request(*args, **kwargs)  # type: ignore[misc]

    async def sleep(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.sleeping(*args, **kwargs):
            return await super().sleep(*args, **kwargs)  # type: ignore[misc]

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            return await super().wake_up(*args, **kwargs)  # type: ignore[misc]

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            return await super().collective_rpc(*args, **kwargs)  # type: ignore[misc]

    async def add_lora(self, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            added = await super().add_lora(lora_request, *args, **kwargs)  # type: ignore[misc]
        self.lora_reload.added(self, lora_request)
        return added

    async def remove_lora(self, *args: Any, **kwargs: Any) -> Any:
        with self.lora_reload.changing():
            return await super().remove_lora(*args, **kwargs)  # type: ignore[misc]
