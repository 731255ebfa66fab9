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

from . import diagnosis, lifecycle, seams, staging
from .errors import AdapterMissingError, WeightsMissingError
from .prefixes import Prefixes
from .settings import Settings

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

Status = dict[str, Any]


@dataclass
class Reserved:
    """A name that `users` updates at once may add, and its id once it has been chosen."""

    number: int | None = None
    users: int = 0


@dataclass
class Guard:
    """What one front end knows of its workers.

    Attributes:
        warn_only: whether requests are answered all the same (setting ``on_missing``).
        calls: how many calls were made that can change how workers stand.
        checked: the value of `now` when they were last asked.
        error: why no request can be answered now.
        adapters: why requests for an adapter cannot, by id.
        prefixes: salts of adapters' requests.
        reserved: names that updates of this front end are about to add.
        highest: the last id that it has given to one.
        there: adapters whose requests have no files, but which the workers had when `now` was `there_at`, by id.
        running: how many such calls have not come back; what the workers say meanwhile does not last.
        falling: how many of them are sleeps.
        updates: tasks that update adapters.
    """

    warn_only: bool
    calls: int = 0
    checked: int = field(default_factory=lambda: lifecycle.failures)
    error: str | None = None
    adapters: dict[int, str] = field(default_factory=dict)
    prefixes: Prefixes = field(default_factory=Prefixes)
    reserved: dict[str, Reserved] = field(default_factory=dict)
    highest: int = 0
    there: set[int] = field(default_factory=set)
    there_at: int = -1
    running: int = 0
    falling: int = 0
    updates: set[Any] = field(default_factory=set)
    _watching: bool = False

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

    def doubts(self, lora_request: Any) -> dict[str, Any] | None:
        """What to ask the workers (``lora_reload_lacks``) about a request whose adapter may not be there any more.

        vLLM would look for it in the midst of a step, and the engine would die.
        """
        path = str(getattr(lora_request, "lora_path", ""))
        if not path.startswith(("/", "~", staging.NO_FILES)) or not seams.is_lora_request(lora_request):
            return None  # of a hub, or it brings tensors
        if getattr(lora_request, "tensorizer_config_dict", None):  # says where it is; before 0.32
            return None
        folder = diagnosis.local_folder(path)
        if folder is not None and (folder / staging.CONFIG).is_file():
            return None
        if self.there_at != self.now:
            self.there, self.there_at = set(), self.now
        number = lora_request.lora_int_id
        if number in self.there:
            return None
        return {"lora_int_id": number, "name": lora_request.lora_name, "path": path}

    def settle(self, lora_request: Any, answers: list[Any]) -> None:
        """Take in what the workers answered about what it `doubts`.

        Raises:
            AdapterMissingError: one of them lacks the adapter.
        """
        if lacking := [f"rank {rank}: {why}" for rank, why in enumerate(answers) if why]:
            raise seams.as_request_error(AdapterMissingError)(
                f"adapter {lora_request.lora_name!r} is not there: {lacking[0]}. Bring it again with update_adapter or "
                "add_lora, then ask again with the request that goes with it."
            )
        self.there.add(lora_request.lora_int_id)

    def updated(self, engine: Any, lora_request: Any) -> None:
        """From now on the adapter's requests find no prefix that older weights of it have cached."""
        self.watch(engine)
        self.prefixes.updated(lora_request)

    def added(self, engine: Any, lora_request: Any) -> None:
        """``add_lora`` was called."""
        self.watch(engine)
        self.prefixes.added(lora_request)

    def removed(self, engine: Any, number: int) -> None:
        """``remove_lora`` was called."""
        self.watch(engine)
        self.prefixes.removed(number)

    def watch(self, engine: Any) -> None:
        """From the first request with an adapter on, and the first call about one."""
        if not self._watching:
            self._watching = True
            seams.requests_marked(engine, self._mark)

    def _mark(self, request: Any) -> None:
        lora = request.lora_request
        if lora is None or not (version := self.prefixes.salt(lora)):
            return
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
        lora_request = _lora_request(args, kwargs)
        if state.error or state.adapters:
            state.refuse(lora_request)
        if lora_request is not None:
            state.watch(self)
            if asking := state.doubts(lora_request):
                state.settle(lora_request, super().collective_rpc("lora_reload_lacks", kwargs=asking))  # type: ignore[misc]
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
        try:
            with self.lora_reload.changing():
                return super().add_lora(lora_request, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.added(self, lora_request)

    def remove_lora(self, lora_id: int, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.lora_reload.changing():
                return super().remove_lora(lora_id, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.removed(self, lora_id)


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
        lora_request = _lora_request(args, kwargs)
        if state.error or state.adapters or state.falling:
            state.refuse(lora_request)
        if lora_request is not None:
            state.watch(self)
            if asking := state.doubts(lora_request):
                state.settle(lora_request, await super().collective_rpc("lora_reload_lacks", kwargs=asking))  # type: ignore[misc]
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
        try:
            with self.lora_reload.changing():
                return await super().add_lora(lora_request, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.added(self, lora_request)

    async def remove_lora(self, lora_id: int, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.lora_reload.changing():
                return await super().remove_lora(lora_id, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.removed(self, lora_id)
