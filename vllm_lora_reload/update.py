"""Replacing an adapter's weights in a running engine, on all workers or on none.

Every worker first reads and checks the new weights, which go through vLLM's own loader. Only if all of them say yes are
they swapped in, in one call between two steps of the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from . import seams, staging
from .client import Guard, Reserved
from .errors import AdapterRefusedError, LoRAReloadError
from .staging import FOLLOWS

Step = tuple[str, dict[str, Any]] | Callable[[], Any]  # a call on all workers, or work


@dataclass(frozen=True)
class UpdatedAdapter:
    """What `update_adapter` did.

    Attributes:
        name: as given.
        lora_int_id: the id that the name keeps.
        version: grows with each update of the name, and never comes again.
        lora_request: for ``generate``.
    """

    name: str
    lora_int_id: int
    version: int
    lora_request: Any


Steps = Generator[Step, Any, UpdatedAdapter]


def update_adapter(
    engine: Any,
    name: str,
    tensors: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    *,
    path: str | Path | None = None,
) -> Any:
    """Give adapter `name` new weights in place, on every worker, or add it if there is none of that name.

    Requests that run go on with the new weights from their next token; none sees a part of them. Cached prefixes of
    the adapter's older versions are not used again by this front end; those of others are. While the engine sleeps,
    the new weights are taken and reach their slot at wake-up.

    Args:
        engine: an ``LLM``, an ``LLMEngine`` or an ``AsyncLLM`` with this plugin; for the last one, await the result.
        name: the adapter's lasting name.
        tensors: PEFT tensors by name, ``lora_A`` ``[rank, inputs]`` and ``lora_B`` ``[outputs, rank]``, of any float
            dtype, on any device.
        peft_config: a ``peft.LoraConfig`` or its dict; with `tensors`.
        path: a PEFT folder instead of both; it is looked at again after each sleep.

    Returns:
        UpdatedAdapter: with the ``LoRARequest`` to use.

    Raises:
        AdapterRefusedError: the weights do not fit on some worker (names, shapes, rank, dtypes, settings that this vLLM
            does not take into account, values that are not finite), or could not be written there; all keep what they
            had.
        TypeError: an argument is of the wrong kind.
    """
    if (tensors is None) == (path is None) or (tensors is not None and peft_config is None):
        raise TypeError("update_adapter needs tensors and peft_config, or path")
    if not isinstance(name, str) or not name:
        raise TypeError(f"an adapter's name is a string that is not empty, not {name!r}")
    if tensors is not None and not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is a mapping of names to torch tensors, not a {type(tensors).__name__}")
    if peft_config is not None and not isinstance(peft_config, Mapping) and not hasattr(peft_config, "to_dict"):
        raise TypeError(f"peft_config is a peft.LoraConfig or its dict, not a {type(peft_config).__name__}")
    front = getattr(engine, "llm_engine", engine)
    if not isinstance(getattr(front, "lora_reload", None), Guard):
        raise LoRAReloadError("this engine has no LoRA, or the plugin lora_reload is not in VLLM_PLUGINS")
    if inspect.iscoroutinefunction(front.collective_rpc):
        return _update_async(front, name, tensors, peft_config, path)
    if tensors is None:
        return _run(front, _protocol(front, name, str(path), lasting=True))
    with staging.write(tensors, peft_config) as folder:
        return _run(front, _protocol(front, name, folder, lasting=False))


def _protocol(front: Any, name: str, folder: str, lasting: bool) -> Steps:
    """Yields what is to be done, and takes what comes of it: calls on all workers, and work that takes its time.

    Args:
        folder: a PEFT folder.
        lasting: whether it stays.
    """
    reserved = front.lora_reload.reserved
    mine = reserved.setdefault(name, Reserved())
    mine.users += 1  # from before the workers are asked: what they say may be old when it comes
    try:
        known = yield "lora_reload_adapter", {"name": name}
        number = known[0]["lora_int_id"] or mine.number
        if number is None:  # nothing is awaited between the choice and its reservation
            front.lora_reload.highest = max(front.lora_reload.highest + 1, *(each["free"] for each in known))
            number = mine.number = front.lora_reload.highest
        token = uuid.uuid4().hex
        staged = {"token": token, "name": name, "lora_int_id": number, "lasting": lasting, "folder": folder}
        try:
            refusals = yield "lora_reload_stage_adapter", staged
            if not lasting and any(why and why.startswith("FileNotFoundError") for why in refusals):
                files = yield partial(staging.contents, folder)  # workers on other machines
                refusals = yield "lora_reload_stage_adapter", staged | {"files": files}
        except Exception:  # some worker may have staged it
            yield "lora_reload_discard_adapter", {"token": token}
            raise
        if any(refusals):
            yield "lora_reload_discard_adapter", {"token": token}
            raise _refused(name, refusals)
        request = seams.lora_request(name, number, folder if lasting else f"{staging.NO_FILES}{name}")
        # Requests that are sent meanwhile may meet either weights: they get a mark of their own.
        front.lora_reload.prefixes.updated(request)
        try:
            outcomes = yield "lora_reload_commit_adapter", {"token": token}
        except Exception:  # some worker may have it
            front.lora_reload.prefixes.updated(request)
            raise
        if any(isinstance(outcome, str) for outcome in outcomes):
            raise _refused(name, outcomes)
        if not outcomes[0]:
            mine.number = None
            raise AdapterRefusedError(f"adapter {name!r} was not added: another one was, under the same id; try again")
        front.lora_reload.prefixes.updated(request)
        return UpdatedAdapter(name, number, outcomes[0], request)
    finally:
        mine.users -= 1
        if not mine.users:
            reserved.pop(name, None)


def _refused(name: str, answers: list[Any]) -> AdapterRefusedError:
    """Of workers that answer why not, or something else; those that only follow another one are left out."""
    reasons = [(rank, why) for rank, why in enumerate(answers) if isinstance(why, str)]
    causes = [(rank, why) for rank, why in reasons if why != FOLLOWS] or reasons
    told = "; ".join(f"rank {rank}: {why}" for rank, why in causes)
    return AdapterRefusedError(f"adapter {name!r} was not updated: {told}")


def _run(front: Any, protocol: Steps) -> UpdatedAdapter:
    step: Step | UpdatedAdapter = next(protocol)
    while not isinstance(step, UpdatedAdapter):
        try:
            outcome = step() if callable(step) else front.collective_rpc(step[0], kwargs=step[1])
        except Exception as error:
            outcome = error
        step = _resumed(protocol, outcome)
    return step


async def _run_async(front: Any, protocol: Steps) -> UpdatedAdapter:
    step: Step | UpdatedAdapter = next(protocol)
    while not isinstance(step, UpdatedAdapter):
        try:
            if callable(step):
                outcome = await asyncio.to_thread(step)
            else:
                outcome = await front.collective_rpc(step[0], kwargs=step[1])
        except Exception as error:
            outcome = error
        step = _resumed(protocol, outcome)
    return step


def _resumed(protocol: Steps, outcome: Any) -> Step | UpdatedAdapter:
    """The step to do next, or the result, given what came of the last one or its error."""
    try:
        return protocol.throw(outcome) if isinstance(outcome, Exception) else protocol.send(outcome)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _update_async(
    front: Any, name: str, tensors: Mapping[str, Any] | None, peft_config: Any, path: str | Path | None
) -> UpdatedAdapter:
    """A caller that stops waiting while its tensors are copied has updated nothing: it may change them at once.

    After that an update goes on to its end: workers and front end have to agree about what was swapped in.
    """
    folder = None if tensors is None else await _copied(tensors, peft_config)

    async def to_its_end() -> UpdatedAdapter:
        if folder is None:
            return await _run_async(front, _protocol(front, name, str(path), lasting=True))
        try:
            return await _run_async(front, _protocol(front, name, folder.name, lasting=False))
        finally:
            await asyncio.to_thread(folder.cleanup)

    task = asyncio.ensure_future(to_its_end())
    tasks = front.lora_reload.updates  # the event loop alone does not keep them
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return await asyncio.shield(task)


async def _copied(tensors: Mapping[str, Any], peft_config: Any) -> TemporaryDirectory[str]:
    """`staging.write` in a thread: it takes seconds for large adapters, and requests go on meanwhile."""
    tensors = dict(tensors)
    devices = {each.device for each in tensors.values() if getattr(each, "is_cuda", False)}
    streams = [torch.cuda.current_stream(device) for device in devices]  # what is still being computed comes first

    def write() -> TemporaryDirectory[str]:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return staging.write(tensors, peft_config)

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_thrown_away)
        raise


def _thrown_away(writing: asyncio.Future[TemporaryDirectory[str]]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        writing.result().cleanup()
