"""Replacing an adapter's weights in a running engine, on all workers or on none.

Every worker first reads and checks the new weights, which go through vLLM's own loader. Only if all of them say yes are
they swapped in, in one call between two steps of the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import seams, staging
from .client import Guard
from .errors import AdapterRefusedError, LoRAReloadError

_FIRST_NUMBER = 1_000_000  # callers of ``add_lora`` count from 1
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class UpdatedAdapter:
    """What `update_adapter` did.

    Attributes:
        name: as given.
        lora_int_id: the id that the name keeps.
        version: 1 for the first update of the name, then one more each time.
        lora_request: for ``generate``.
    """

    name: str
    lora_int_id: int
    version: int
    lora_request: Any


Steps = Generator[Call, list[Any], UpdatedAdapter]


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
        AdapterRefusedError: the weights do not fit on some worker (names, shapes, rank, values that are not finite);
            all keep what they had.
    """
    if (tensors is None) == (path is None) or (tensors is not None and peft_config is None):
        raise TypeError("update_adapter needs tensors and peft_config, or path")
    front = getattr(engine, "llm_engine", engine)
    if not isinstance(getattr(front, "lora_reload", None), Guard):
        raise LoRAReloadError("this engine has no LoRA, or the plugin lora_reload is not in VLLM_PLUGINS")
    protocol = _protocol(front, name, tensors, peft_config, path)
    if inspect.iscoroutinefunction(front.collective_rpc):
        return _to_its_end(front, protocol)
    return _run(front, protocol)


def _protocol(
    front: Any, name: str, tensors: Mapping[str, Any] | None, peft_config: Any, path: str | Path | None
) -> Steps:
    """Yields calls to make on all workers and takes their answers."""
    known: dict[str, Any] = (yield "lora_reload_adapters", {})[0]
    used = (yield "list_loras", {})[0]
    reserved = front.lora_reload.reserved
    if name in known:
        number = known[name]["lora_int_id"]
    else:  # nothing is awaited between the choice and its reservation
        number = reserved.setdefault(name, _free_number(known, [*used, *reserved.values()]))
    token = uuid.uuid4().hex
    staged = {"token": token, "name": name, "lora_int_id": number, "lasting": path is not None}
    try:
        with nullcontext(Path(str(path))) if tensors is None else staging.written(tensors, peft_config) as folder:
            refusals = yield "lora_reload_stage_adapter", staged | {"folder": str(folder)}
            if tensors is not None and any(why and why.startswith("FileNotFoundError") for why in refusals):
                files = {file.name: file.read_bytes() for file in folder.iterdir()}  # workers on other machines
                refusals = yield "lora_reload_stage_adapter", staged | {"folder": str(folder), "files": files}
    except Exception:  # some worker may have staged it
        yield "lora_reload_discard_adapter", {"token": token}
        raise
    if reasons := [f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why]:
        yield "lora_reload_discard_adapter", {"token": token}
        raise AdapterRefusedError(f"adapter {name!r} was not updated: {'; '.join(reasons)}")
    version = min((yield "lora_reload_commit_adapter", {"token": token}))
    if not version:
        reserved.pop(name, None)
        raise AdapterRefusedError(f"adapter {name!r} was not added: another one was, under the same id; try again")
    front.lora_reload.updated(front, number, version)
    request = seams.lora_request(name, number, str(path) if path else f"lora_reload:{name}")
    return UpdatedAdapter(name, number, version, request)


def _free_number(known: Mapping[str, Any], used: Any) -> int:
    highest: int = max([_FIRST_NUMBER - 1, *used, *(each["lora_int_id"] for each in known.values())])
    return highest + 1


def _run(front: Any, protocol: Steps) -> UpdatedAdapter:
    step: Call | UpdatedAdapter = next(protocol)
    while not isinstance(step, UpdatedAdapter):
        method, kwargs = step
        try:
            outcome = front.collective_rpc(method, kwargs=kwargs)
        except Exception as error:
            outcome = error
        step = _resumed(protocol, outcome)
    return step


async def _run_async(front: Any, protocol: Steps) -> UpdatedAdapter:
    step: Call | UpdatedAdapter = next(protocol)
    while not isinstance(step, UpdatedAdapter):
        method, kwargs = step
        try:
            outcome = await front.collective_rpc(method, kwargs=kwargs)
        except Exception as error:
            outcome = error
        step = _resumed(protocol, outcome)
    return step


def _resumed(protocol: Steps, outcome: list[Any] | Exception) -> Call | UpdatedAdapter:
    """The call to make next, or the result, given the workers' answers to the last call or its error."""
    try:
        return protocol.throw(outcome) if isinstance(outcome, Exception) else protocol.send(outcome)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _to_its_end(front: Any, protocol: Steps) -> UpdatedAdapter:
    """Also if the caller stops waiting: workers and front end have to agree about what was swapped in."""
    task = asyncio.ensure_future(_run_async(front, protocol))
    tasks = front.lora_reload.updates  # the event loop alone does not keep them
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return await asyncio.shield(task)
