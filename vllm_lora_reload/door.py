"""The engine core's part: what a request needs is there when it is taken, and still there when it runs.

Every front end's requests come through the engine core's ``add_request``, and run in its steps. Sleeps, wake-ups, calls
of workers, requests and steps take turns in one thread there, so what was true when the core looked still holds when it
goes on. It asks the workers again only after a call that can have changed how they stand; otherwise a look is a few
comparisons.

A refused request ends alone: in process with an error, else with an output that says why, which the front end turns
into that error.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from . import lifecycle, seams
from .errors import AdapterMissingError, WeightsMissingError
from .settings import Settings

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

Status = dict[str, Any]
_MARK = "lora_reload:"
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (WeightsMissingError, AdapterMissingError)}

# Calls of workers after which they stand as before. After any other one they are asked.
_QUIET = {
    "execute_model",
    "sample_tokens",
    "execute_dummy_batch",
    "take_draft_token_ids",
    "synchronize_device",
    "list_loras",
    "pin_lora",
    "profile",
    "reset_mm_cache",
    "reset_encoder_cache",
    "lora_reload_status",
    "lora_reload_adapter",
    "lora_reload_adapters",
    "lora_reload_admit",
    "lora_reload_stage_adapter",
    "lora_reload_discard_adapter",
    "lora_reload_take_snapshot",
    "lora_reload_free_buffers",
}


# Calls of workers that can give an adapter other weights.
_SWAPS = {"lora_reload_commit_adapter", "add_lora"}


# --- What workers say ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How the workers of one engine stand.

    Attributes:
        error: why no request can be answered now; None if they can.
        waits: whether nothing is missing, only a sleep at level 1 is not over.
        asleep: whether memory is not there at all: nothing is to run then, whatever `on_missing` says.
        apart: why no request can run now, though requests may queue.
        adapters: why requests for an adapter cannot, by id.
    """

    error: str | None = None
    waits: bool = False
    asleep: bool = False
    apart: str | None = None
    adapters: dict[int, str] = field(default_factory=dict)


def verdict(answers: list[Any]) -> Verdict:
    """Of what ``lora_reload_status`` gave, by rank. Of what is no status nothing is known.

    The rank that shows is the one with the deepest cause (`Lifecycle.depth`), its own before that of another rank.
    """
    statuses = [answer if _is_status(answer) else _unknown(answer) for answer in answers]
    wrong = sorted((-status["depth"], status["waits"], rank) for rank, status in enumerate(statuses) if status["error"])
    adapters: dict[int, tuple[bool, int, str]] = {}
    for rank, status in enumerate(statuses):
        for number, why in status["adapters"].items():
            found = (_of_another_rank(why), rank, why)
            adapters[int(number)] = min(adapters.get(int(number), found), found)
    several = len(statuses) > 1
    return Verdict(
        error=_shown(wrong[0][2], statuses, len(wrong) - 1) if wrong else None,
        waits=all(status["waits"] for status in statuses if status["error"]),
        asleep=any(status["error"] and status["depth"] >= lifecycle.ASLEEP for status in statuses),
        apart=_first(status["apart"] for status in statuses),
        adapters={number: f"rank {rank}: {why}" if several else why for number, (_, rank, why) in adapters.items()},
    )


def _shown(rank: int, statuses: list[Status], others: int) -> str:
    more = f" (and {others} more ranks)" if others else ""
    return f"rank {rank}: {statuses[rank]['error']}{more}"


def _of_another_rank(why: str) -> bool:
    return "another rank" in why


def _is_status(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.keys() >= {"error", "depth", "waits", "apart", "adapters"}


def _unknown(answer: Any) -> Status:
    """Of a worker that says something else: requests are refused, and the next one asks again."""
    said = f"{type(answer).__name__}: {answer}"[:200]
    error = f"asked how its weights stand, this worker said ({said}). Ask again."
    return {"error": error, "depth": 1, "waits": False, "apart": None, "adapters": {}}


# --- Refusals -----------------------------------------------------------------------------------------------------


def weights_missing(why: str) -> Exception:
    return seams.as_request_error(WeightsMissingError)(why)


def adapter_missing(name: str, why: str) -> Exception:
    return seams.as_request_error(AdapterMissingError)(
        f"adapter {name!r} is not there: {why}. Bring it again with update_adapter, or with remove_lora and add_lora, "
        "then ask again."
    )


def packed(error: Exception) -> str:
    """A refusal as a ``stop_reason``: the only text that an output of the engine core has room for."""
    return f"{_MARK}{type(error).__name__}:{error}"


def unpacked(output: Any) -> Exception | None:
    """The refusal that an output of the engine core carries."""
    reason = output.stop_reason
    if output.finish_reason is None or not isinstance(reason, str) or not reason.startswith(_MARK):
        return None
    kind, _, text = reason.removeprefix(_MARK).partition(":")
    return seams.as_request_error(_KINDS[kind])(text) if kind in _KINDS else None


# --- The door -----------------------------------------------------------------------------------------------------


class Door:
    """Attribute ``lora_reload`` of an engine core.

    Args:
        core: vLLM's.

    Attributes:
        warn_only: whether requests are answered although weights are missing (setting ``on_missing``).
        verdict: what the workers said last.
    """

    def __init__(self, core: Any) -> None:
        self.warn_only = Settings.of(core.vllm_config).on_missing == "warn"
        self.verdict = Verdict()
        self._core = core
        self._calls = 0  # that can have changed how workers stand
        self._seen = self._now
        self._admitted: dict[int, str] = {}  # path by id of adapters that all workers hold
        self._anew: set[int] = set()  # adapters that were read again here, of which no front end knows
        seams.worker_calls_observed(core, self._called)
        seams.steps_guarded(core, self.before_step)

    def _called(self, method: Any) -> None:
        if method not in _QUIET:
            self._calls += 1
        if method in _SWAPS:
            # Those that wait bear the mark of the weights before, and are not to begin with what these have cached.
            for request in seams.requests(self._core):
                if request.lora_request is not None:
                    seams.begin_anew(request)

    @property
    def _now(self) -> int:
        return self._calls + lifecycle.failures

    def look(self) -> Verdict:
        """How the workers stand. Loads inside a worker pass no call, so an error is looked at again each time."""
        now = self._now
        if now != self._seen or (self.verdict.error and not self.warn_only):
            before = self.verdict.error
            self.verdict = self._ask()
            self._seen = now
            self._admitted.clear()
            if self.warn_only and self.verdict.error and self.verdict.error != before:
                logger.warning("Answering although %s", self.verdict.error)
        return self.verdict

    def _ask(self) -> Verdict:
        try:
            return verdict(self._core.model_executor.collective_rpc("lora_reload_status"))
        except Exception as error:  # who asks is the thread that must go on
            return verdict([error])

    def admit(self, request: Any) -> None:
        """Let a request in, or not. Its adapter is in host memory of every worker then, as a step must not look for it.

        Raises:
            WeightsMissingError: base weights are missing or asleep; the message says why and what mends it. A sleep at
                level 1 loses nothing, and a weight transfer ends, so where vLLM queues requests over them they are let
                in.
            AdapterMissingError: the request's adapter is neither there nor can be read.
        """
        stands = self.look()
        why = stands.apart or (None if self.warn_only and not stands.asleep else stands.error)
        if why and not ((stands.waits or why is stands.apart) and seams.queues_requests(self._core)):
            raise weights_missing(why)
        lora = request.lora_request
        if lora is None:
            return
        number = lora.lora_int_id
        if number in stands.adapters:
            raise adapter_missing(lora.lora_name, stands.adapters[number])
        anew = getattr(lora, "load_inplace", False)
        if anew or self._admitted.get(number) != lora.lora_path:
            if why := self._bring(lora):
                raise adapter_missing(lora.lora_name, why)
            self._admitted[number] = lora.lora_path
        if number in self._anew:
            seams.begin_anew(request)
        if anew and seams.is_lora_request(lora):
            # With a request, vLLM would read the files again before every step: over a later update, or when they are
            # gone.
            request.lora_request = seams.loaded_once(lora)

    def _bring(self, lora: Any) -> str | None:
        """Have every worker hold an adapter; says why if one cannot."""
        call = self._core.model_executor.collective_rpc
        live = {each.lora_request.lora_int_id for each in seams.requests(self._core) if each.lora_request}
        try:
            answers = call("lora_reload_admit", args=(lora, sorted(live)))
            held = set.intersection(*(set(answer["held"]) for answer in answers))
            self._admitted = {number: path for number, path in self._admitted.items() if number in held}
            if why := _first(answer["why"] for answer in answers):
                return why
            if any(answer["changed"] for answer in answers):  # on all workers or on none
                return self._read_anew(call, lora)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _read_anew(self, call: Any, lora: Any) -> str | None:
        token = uuid.uuid4().hex
        staged = (token, lora.lora_name, lora.lora_int_id, lora.lora_path, True)
        if why := _first(call("lora_reload_stage_adapter", args=staged)):
            call("lora_reload_discard_adapter", args=(token,))
            return f"its files have changed, and {why}"
        outcomes = call("lora_reload_commit_adapter", args=(token,))
        if why := _first(each if isinstance(each, str) else None for each in outcomes):
            return f"its files have changed, and {why}"
        self._anew.add(lora.lora_int_id)
        return None

    def before_step(self) -> dict[int, Any]:
        """Outputs for the requests that cannot run now, by client; they are gone then."""
        if not seams.will_run(self._core):
            return {}
        stands = self.look()
        refused: list[tuple[Any, Exception]] = []
        why = stands.apart or (None if self.warn_only and not stands.asleep else stands.error)
        if why:
            error = weights_missing(why)
            refused = [(request, error) for request in seams.requests(self._core)]
        elif stands.adapters:
            for request in seams.requests(self._core):
                lora = request.lora_request
                if lora is not None and (why := stands.adapters.get(lora.lora_int_id)) is not None:
                    refused.append((request, adapter_missing(lora.lora_name, why)))
        return self.refused(refused)

    def refused(self, requests: Iterable[tuple[Any, Exception]]) -> dict[int, Any]:
        """End requests; gives their outputs by client."""
        requests = list(requests)
        if not requests:
            return {}
        seams.end_requests(self._core, [request.request_id for request, _ in requests])
        return seams.failed_outputs(
            (request.client_index, request.request_id, packed(error)) for request, error in requests
        )


def _first(reasons: Iterable[str | None]) -> str | None:
    """Of several ranks' reasons the first that is the rank's own, with the rank."""
    found = sorted((_of_another_rank(why), rank, why) for rank, why in enumerate(reasons) if why)
    return f"rank {found[0][1]}: {found[0][2]}" if found else None


class GuardedEngineCore:
    """Mixed in before an ``EngineCore``."""

    lora_reload: Door

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self.lora_reload.admit(request)
        except (WeightsMissingError, AdapterMissingError) as error:
            if not seams.has_clients(self):
                vars(error)["request_id"] = request.request_id
                raise
            if seams.in_lockstep(self):  # with other engines, which may have begun to step for this request
                super().add_request(request, *args, **kwargs)  # type: ignore[misc]
            seams.send_outputs(self, self.lora_reload.refused([(request, error)]))
            return None
        return super().add_request(request, *args, **kwargs)  # type: ignore[misc]

    def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode", args[0] if args else None)
        check_kept(level, mode, bool(seams.requests(self)), self.lora_reload.warn_only)
        return super().sleep(level, *args, **kwargs)  # type: ignore[misc]


def check_kept(level: int, mode: str | None, requests: bool, warn_only: bool) -> None:
    """Raises:
    ValueError: requests would be kept over a sleep that loses the weights.
    """
    if level >= 2 and mode == "keep" and requests and not warn_only:
        raise ValueError(
            "requests that are kept over sleep(level=2) would go on with what other weights have begun: "
            'use mode="abort" or mode="wait", or level 1'
        )


def guard_core(core: Any) -> None:
    """Extend one engine core. A second call changes nothing."""
    if not isinstance(core, GuardedEngineCore):
        core.lora_reload = Door(core)
        seams.extend(core, GuardedEngineCore)
