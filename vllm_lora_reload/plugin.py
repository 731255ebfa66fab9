"""The ``vllm.general_plugins`` entry point.

vLLM calls `register` in every process it starts, sometimes more than once. It hooks five constructors and
nothing else; each hook looks at the finished object's config and extends that one object, only if LoRA is on.
"""

from __future__ import annotations

from typing import Any

from . import seams
from .errors import SeamMissingError


def register() -> None:
    """Hook the worker, the two engine front ends, the engine core and the executor. Calling it again changes nothing.

    It imports none of them: what is not imported yet is hooked when vLLM imports it.

    Raises:
        SeamMissingError: later, when an engine with LoRA is configured on a release without the first four classes.
    """
    try:
        seams.hook_constructor(seams.WORKER, _extend_worker)
        seams.hook_constructor(seams.OFFLINE_ENGINE, _extend_engine)
        seams.hook_constructor(seams.ASYNC_ENGINE, _extend_engine)
        seams.hook_constructor(seams.ENGINE_CORE, _extend_core, late="run_busy_loop")
    except SeamMissingError as missing:
        seams.refuse_lora(missing)
    seams.hook_constructor(seams.EXECUTOR, _extend_executor, needed=False)


def _extend_worker(worker: Any) -> None:
    if worker.vllm_config.lora_config is not None:
        from .worker import extend

        seams.check()
        extend(worker)


def _extend_engine(engine: Any) -> None:
    if engine.vllm_config.lora_config is not None:
        from .client import guard

        guard(engine)


def _extend_core(core: Any) -> None:
    if core.vllm_config.lora_config is not None:
        from .door import guard_core

        guard_core(core)


def _extend_executor(executor: Any) -> None:
    if executor.vllm_config.lora_config is not None:
        from .replies import keep_apart

        keep_apart(executor)
