"""The front end's part: a refused request's caller gets an error, and new versions of adapters are marked.

Whether a request can be answered is the engine core's to say (`door`).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import Any

from . import door, seams
from .errors import AdapterMissingError, WeightsMissingError
from .prefixes import Prefixes
from .settings import Settings


@dataclass
class Reserved:
    """A name that `users` updates at once may add, and its id once it has been chosen."""

    number: int | None = None
    users: int = 0


@dataclass
class Guard:
    """What one front end knows.

    Attributes:
        warn_only: whether requests are answered although weights are missing (setting ``on_missing``).
        asleep: whether an offline engine was put to sleep, and has not been seen awake since.
        refused: what an offline engine's caller has to hear of.
        prefixes: salts of adapters' requests.
        reserved: names that updates of this front end are about to add.
        highest: the last id that it has given to one.
        updates: tasks that update adapters.
    """

    warn_only: bool
    asleep: bool = False
    refused: list[Exception] = field(default_factory=list)
    prefixes: Prefixes = field(default_factory=Prefixes)
    reserved: dict[str, Reserved] = field(default_factory=dict)
    highest: int = 0
    updates: set[Any] = field(default_factory=set)

    def mark(self, request: Any) -> None:
        """A request is about to be sent: it is to find no prefix that other weights under its adapter's name cached."""
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


def guard(engine: Any) -> None:
    """Extend one ``LLMEngine`` or ``AsyncLLM``."""
    _, async_llm = seams.engine_classes()
    engine.lora_reload = Guard(warn_only=Settings.of(engine.vllm_config).on_missing == "warn")
    seams.extend(engine, GuardedAsyncLLM if isinstance(engine, async_llm) else GuardedLLMEngine)
    engine.output_processor.lora_reload = engine.lora_reload
    seams.extend(engine.output_processor, HearsRefusals)
    seams.requests_marked(engine, engine.lora_reload.mark)


class HearsRefusals:
    """Mixed in before a front end's ``OutputProcessor``."""

    lora_reload: Guard

    def process_outputs(self, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        refused = {}
        for output in engine_core_outputs:
            if output.finish_reason is not None and (error := door.unpacked(output)):
                refused[output.request_id] = error
        if not refused:
            return super().process_outputs(engine_core_outputs, *args, **kwargs)  # type: ignore[misc]
        ids = [each for number, error in refused.items() for each in self.end(number, error)]
        others = [output for output in engine_core_outputs if output.request_id not in refused]
        processed = super().process_outputs(others, *args, **kwargs)  # type: ignore[misc]
        processed.reqs_to_abort.extend(each for each in ids if each not in refused)
        return processed

    def end(self, request_id: str, error: Exception) -> list[str]:
        """Forget a request that was refused, and tell who waits for it; gives ids that the engine core may still know.

        A prompt that is sampled several times has been made several requests; they end together.
        """
        ids, queue = seams.drop_request(self, request_id)
        if queue is not None:
            queue.put(error)
        elif ids:
            self.lora_reload.refused.append(error)
        return ids


class GuardedLLMEngine:
    """Mixed in before ``LLMEngine``."""

    lora_reload: Guard
    output_processor: Any
    engine_core: Any

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's.

        Raises:
            WeightsMissingError, AdapterMissingError: see `door.Door.admit`. With the engine core in a process of its
                own it is the last `step` of the requests at hand that raises it.
        """
        if self.lora_reload.asleep:  # vLLM would let it wait, but whoever waits with it cannot wake the engine
            error = door.verdict(self.collective_rpc("lora_reload_status")).error  # type: ignore[attr-defined]
            if error and not self.lora_reload.warn_only:
                raise door.weights_missing(error)
            self.lora_reload.asleep = False
        try:
            return super().add_request(*args, **kwargs)  # type: ignore[misc]
        except (WeightsMissingError, AdapterMissingError) as error:
            ids, _ = seams.drop_request(self.output_processor, vars(error).get("request_id", ""))
            self.engine_core.abort_requests(ids)
            raise

    def has_unfinished_requests(self) -> bool:
        """Also while there is an error to be raised."""
        return bool(self.lora_reload.refused) or super().has_unfinished_requests()  # type: ignore[misc]

    def step(self) -> Any:
        """As vLLM's. When all other requests are answered, it raises what a refused one's caller has to hear."""
        refused = self.lora_reload.refused
        if not refused or super().has_unfinished_requests():  # type: ignore[misc]
            return super().step()  # type: ignore[misc]
        error = refused[0]
        refused.clear()
        raise error

    def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        _check_kept(self, level, *args, **kwargs)
        self.lora_reload.asleep |= level > 0
        return super().sleep(level, *args, **kwargs)  # type: ignore[misc]

    def add_lora(self, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        self.lora_reload.prefixes.added(lora_request)  # before and after: requests may be sent meanwhile
        try:
            return super().add_lora(lora_request, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.prefixes.added(lora_request)

    def remove_lora(self, lora_id: int, *args: Any, **kwargs: Any) -> Any:
        self.lora_reload.prefixes.removed(lora_id)
        try:
            return super().remove_lora(lora_id, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.prefixes.removed(lora_id)


class GuardedAsyncLLM(abc.ABC):
    """Mixed in before ``AsyncLLM``. An ABC like it: Python changes an object's class only to one of the same layout."""

    lora_reload: Guard
    output_processor: Any

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        _check_kept(self, level, *args, **kwargs)
        return await super().sleep(level, *args, **kwargs)  # type: ignore[misc]

    async def add_lora(self, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        self.lora_reload.prefixes.added(lora_request)  # before and after: requests may be sent meanwhile
        try:
            return await super().add_lora(lora_request, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.prefixes.added(lora_request)

    async def remove_lora(self, lora_id: int, *args: Any, **kwargs: Any) -> Any:
        self.lora_reload.prefixes.removed(lora_id)
        try:
            return await super().remove_lora(lora_id, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.lora_reload.prefixes.removed(lora_id)


def _check_kept(engine: Any, level: int = 1, mode: str | None = None, **_: Any) -> None:
    """The engine core looks too, also at other front ends' requests; but its errors lose their class on the way."""
    door.check_kept(level, mode, engine.output_processor.has_unfinished_requests(), engine.lora_reload.warn_only)
