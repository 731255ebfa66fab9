"""The ``vllm.general_plugins`` entry point.

vLLM calls `register` in every process it starts, sometimes more than once. It hooks three constructors and
nothing else; each hook looks at the finished object's config and extends that one object, only if LoRA is on.
"""

from __future__ import annotations

from typing import Any

from . import seams
from .errors import SeamMissingError


def register() -> None:
    """Hook the worker and the two engine front ends. Calling it again changes nothing.

    Raises:
        SeamMissingError: later, when an engine with LoRA is configured on a release without those classes.
    """
    try:
        worker, engines = seams.worker_class(), seams.engine_classes()
    except SeamMissingError as missing:
        seams.refuse_lora(missing)
        return
    seams.after_init(worker, _extend_worker)
    for engine in engines:
        seams.after_init(engine, _extend_engine)


def _extend_worker(worker: Any) -> None:
    if worker.vllm_config.lora_config is not None:
        from .worker import LoRAReloadWorker

        seams.check()
        seams.extend(worker, LoRAReloadWorker)


def _extend_engine(engine: Any) -> None:
    if engine.vllm_config.lora_config is not None:
        from .client import guard

        guard(engine)
