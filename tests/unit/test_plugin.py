"""The entry point: light to import, idempotent, and nothing where LoRA is off."""

import abc
import importlib.metadata
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig, LoRAConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.worker_base import WorkerBase

from vllm_lora_reload import SeamMissingError, SettingError, plugin, seams
from vllm_lora_reload.client import GuardedAsyncLLM, GuardedLLMEngine, HearsRefusals
from vllm_lora_reload.door import GuardedEngineCore
from vllm_lora_reload.worker import LoRAReloadWorker

HOOKED = (WorkerBase, LLMEngine, AsyncLLM, EngineCore)
ROOT = Path(__file__).parents[2]


class Part:
    """Of an engine."""


class Client(abc.ABC):  # noqa: B024 - as vLLM's is one
    """By which requests are sent to the core."""


def _light_init(self: Any, vllm_config: Any) -> None:
    self.vllm_config = vllm_config


def _light_core(self: Any, vllm_config: Any) -> None:
    self.vllm_config, self.step_fn = vllm_config, lambda: ({}, False)
    self.model_executor = SimpleNamespace(collective_rpc=lambda method: [])


def _light_engine(self: Any, vllm_config: Any) -> None:
    self.vllm_config, self.output_processor = vllm_config, Part()
    self.engine_core = Client()


@pytest.fixture(autouse=True)
def unhooked(monkeypatch: pytest.MonkeyPatch) -> dict[type, Callable[..., None]]:
    """Constructors before any `register`, those of the engines replaced by one that starts nothing."""
    init: Any = WorkerBase.__init__
    monkeypatch.setattr(WorkerBase, "__init__", init.__wrapped__ if hasattr(init, seams._HOOK) else init)
    for engine in (LLMEngine, AsyncLLM):
        monkeypatch.setattr(engine, "__init__", _light_engine)
    monkeypatch.setattr(Executor, "__init__", _light_init)
    monkeypatch.setattr(EngineCore, "__init__", _light_core)
    for cls in (EngineCoreProc, DPEngineCoreProc):
        monkeypatch.setattr(cls, "run_busy_loop", lambda self: None)
    monkeypatch.setattr(LoRAConfig, "__init__", LoRAConfig.__init__)
    return {cls: cls.__init__ for cls in HOOKED}


def config(lora: bool) -> VllmConfig:
    vllm_config = VllmConfig()
    vllm_config.lora_config = LoRAConfig() if lora else None
    return vllm_config


def worker(lora: bool, cls: type[WorkerBase] = WorkerBase) -> WorkerBase:
    return cls(config(lora), local_rank=0, rank=0, distributed_init_method="")


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import vllm_lora_reload"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "vllm_lora_reload" in imported
    assert not [name for name in imported if name.partition(".")[0] in ("torch", "vllm")]


def test_entry_point_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="lora_reload")
    assert entry.load() is plugin.register


def test_register_hooks_each_constructor_once(unhooked: dict[type, Callable[..., None]]) -> None:
    plugin.register()
    hooked: dict[type, Any] = {cls: cls.__init__ for cls in HOOKED}
    assert all(hooked[cls] is not unhooked[cls] and hooked[cls].__wrapped__ is unhooked[cls] for cls in HOOKED)
    plugin.register()
    assert all(cls.__init__ is hooked[cls] for cls in HOOKED)


@pytest.mark.parametrize("first", [*itertools.permutations(HOOKED, 1), *itertools.permutations(HOOKED, 2)])
def test_register_leaves_hooks_that_are_there(
    first: tuple[type, ...], unhooked: dict[type, Callable[..., None]]
) -> None:
    seen: list[Any] = []
    for cls in first:
        seams.after_init(cls, seen.append)
    before = {cls: cls.__init__ for cls in first}
    plugin.register()
    assert all(cls.__init__ is before[cls] for cls in first)
    assert all(cls.__init__ is not unhooked[cls] for cls in HOOKED)
    plugin.register()
    made = {cls: worker(False) if cls is WorkerBase else cls(config(False)) for cls in first}
    assert seen == list(made.values())


def test_each_object_is_extended_by_one_hook_call(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Any] = []
    engines: list[Any] = []
    monkeypatch.setattr(plugin, "_extend_worker", workers.append)
    monkeypatch.setattr(plugin, "_extend_engine", engines.append)
    for _ in range(3):
        plugin.register()
    made = [worker(True), LLMEngine(config(True)), AsyncLLM(config(True))]
    assert [workers, engines] == [made[:1], made[1:]]


def test_settings_are_checked_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a worker, whose death says little; and not where LoRA is off."""
    started: list[Any] = []
    for engine in (LLMEngine, AsyncLLM):
        monkeypatch.setattr(engine, "__init__", lambda self, vllm_config: started.append(self))
    plugin.register()
    wrong = config(True)
    wrong.additional_config = {"lora_reload": "on"}
    for engine in (LLMEngine, AsyncLLM):
        for call in (lambda cls: cls(wrong), lambda cls: cls(vllm_config=wrong)):
            with pytest.raises(SettingError, match="is 'on', not a mapping"):
                call(engine)
    assert started == []


@pytest.mark.parametrize("hard_fail", [False, True])
def test_vllm_knows_our_variables(hard_fail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either name: it warns of none, starts if it is to fail on unknown ones, and copies them to Ray's workers."""
    from vllm import envs
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    unknown = {name for name in os.environ if name.startswith("VLLM_")} - set(envs.environment_variables)
    for name in unknown:
        monkeypatch.delenv(name)
    before = dict(envs.environment_variables)
    plugin.register()
    assert envs.environment_variables == before, "none is set"
    ours = ["LORA_RELOAD_ADAPTERS", "VLLM_LORA_RELOAD_SNAPSHOT_DIR"]
    for name in ours:
        monkeypatch.setenv(name, "drop")
    plugin.register()
    warnings: list[Any] = []
    validate = envs.validate_environ if hasattr(envs, "validate_environ") else current_platform.validate_environ
    logger = sys.modules[validate.__module__].logger
    monkeypatch.setattr(logger, "warning", lambda *args: warnings.append(args))
    validate(hard_fail)
    assert warnings == []
    assert set(ours) <= get_env_vars_to_copy()
    monkeypatch.setenv("VLLM_LORA_RELOAD_ADAPTER", "drop")
    plugin.register()
    with pytest.raises(ValueError, match="VLLM_LORA_RELOAD_ADAPTER"):
        validate(True)


def test_nothing_is_extended_without_lora() -> None:
    plugin.register()
    assert type(worker(False)) is WorkerBase
    assert type(LLMEngine(config(False))) is LLMEngine
    assert type(AsyncLLM(config(False))) is AsyncLLM


def test_worker_with_lora_is_extended() -> None:
    plugin.register()
    extended = worker(True)
    assert isinstance(extended, LoRAReloadWorker) and isinstance(extended, WorkerBase)
    assert type(extended).__name__ == "WorkerBase"
    assert type(worker(False)) is WorkerBase


@pytest.mark.parametrize("registered_first", [True, False])
def test_custom_worker_is_extended(registered_first: bool) -> None:
    if registered_first:
        plugin.register()

    class FrameworkWorker(WorkerBase):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.ready = True

        def check_health(self) -> str:
            return "mine"

    plugin.register()
    extended: Any = worker(True, FrameworkWorker)
    assert isinstance(extended, LoRAReloadWorker) and isinstance(extended, FrameworkWorker)
    assert extended.ready and extended.check_health() == "mine"
    assert type(worker(False, FrameworkWorker)) is FrameworkWorker


@pytest.mark.parametrize(
    ("engine", "guarded", "other"),
    [(LLMEngine, GuardedLLMEngine, GuardedAsyncLLM), (AsyncLLM, GuardedAsyncLLM, GuardedLLMEngine)],
)
def test_engine_with_lora_is_guarded(engine: Any, guarded: type, other: type) -> None:
    plugin.register()
    extended = engine(config(True))
    assert isinstance(extended, guarded) and isinstance(extended, engine) and not isinstance(extended, other)
    assert isinstance(extended.output_processor, HearsRefusals)
    assert type(engine(config(False))) is engine


@pytest.mark.parametrize("cls", [EngineCore, EngineCoreProc, DPEngineCoreProc])
def test_core_of_an_engine_with_lora_is_guarded(cls: Any) -> None:
    plugin.register()
    for lora in (True, False):
        core = cls.__new__(cls)
        EngineCore.__init__(core, config(lora))
        assert isinstance(core, GuardedEngineCore) == lora and isinstance(core, cls)


@pytest.mark.parametrize("cls", [EngineCoreProc, DPEngineCoreProc])
def test_core_whose_constructor_loaded_the_plugin_is_guarded(cls: Any) -> None:
    """In a process that was spawned it is what loads plugins first."""
    core = cls.__new__(cls)
    _light_core(core, config(True))
    plugin.register()
    assert type(core) is cls
    core.run_busy_loop()
    assert isinstance(core, GuardedEngineCore)
    door = core.lora_reload
    core.run_busy_loop()
    assert core.lora_reload is door


class Bare(Executor):
    """Asks its workers in a way of its own."""


class Queued(Bare):
    """Has what vLLM's executor for several workers has."""

    def __init__(self, vllm_config: Any, **other: Any) -> None:
        vars(self).update({"rpc_broadcast_mq": SimpleNamespace(enqueue=_light_init), "response_mqs": ["queue"]} | other)
        super().__init__(vllm_config)


for each in (Bare, Queued):
    each.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("lora", [False, True])
def test_only_with_lora_an_executor_keeps_replies_apart(lora: bool) -> None:
    plugin.register()
    executor = Queued(config(lora))
    assert type(executor) is Queued
    assert (executor.rpc_broadcast_mq.enqueue is not _light_init) == lora


@pytest.mark.parametrize("other", [{"rpc_broadcast_mq": None}, {"rpc_broadcast_mq": object()}, {"response_mqs": []}])
def test_executor_without_queues_is_left_alone(other: dict[str, Any]) -> None:
    plugin.register()
    executor: Any = Queued(config(True), **other)
    assert all(vars(executor)[name] is value for name, value in other.items())
    assert "rpc_broadcast_mq" in other or executor.rpc_broadcast_mq.enqueue is _light_init
    assert set(vars(Bare(config(True)))) == {"vllm_config"}


@pytest.mark.parametrize("module", [Executor.__module__, "vllm.no_such_module"])
def test_without_the_class_of_executors_lora_works(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "EXECUTOR", (module, "NoSuchClass"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    plugin.register()
    assert LoRAConfig(max_loras=2) and isinstance(worker(True), LoRAReloadWorker)


@pytest.mark.parametrize("missing", HOOKED)
def test_missing_class_makes_only_lora_fail(
    missing: type, monkeypatch: pytest.MonkeyPatch, unhooked: dict[type, Callable[..., None]]
) -> None:
    monkeypatch.delattr(sys.modules[missing.__module__], missing.__name__)
    plugin.register()
    plugin.register()
    for _ in range(2):
        with pytest.raises(SeamMissingError) as failure:
            LoRAConfig(max_loras=2)
        assert f"{missing.__module__}.{missing.__name__}" in str(failure.value)
        assert f"vLLM {seams.release()}:" in str(failure.value)
    assert missing.__init__ is unhooked[missing]
    assert CacheConfig() and VllmConfig().lora_config is None
    assert type(worker(False)) is WorkerBase


def test_seam_of_the_worker_is_asked_for_only_with_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    monkeypatch.delattr("vllm.lora.utils._all_lora_classes")
    assert type(worker(False)) is WorkerBase
    with pytest.raises(SeamMissingError, match=r"vllm\.lora\.utils\._all_lora_classes is missing"):
        worker(True)


def test_hooks_wait_for_the_import() -> None:
    """In a fresh process: nothing is imported by registering, and what vLLM imports later is hooked then, once."""
    program = """
import sys
import vllm.engine.arg_utils
from vllm_lora_reload import plugin, seams
plugin.register()
plugin.register()
modules = [module for module, _ in (seams.WORKER, seams.OFFLINE_ENGINE, seams.ASYNC_ENGINE)]
assert not any(module in sys.modules for module in modules), "imported early"
for cls in (seams.worker_class(), *seams.engine_classes(), seams._find(*seams.EXECUTOR)):
    assert hasattr(cls.__init__, seams._HOOK), cls
    assert not hasattr(cls.__init__.__wrapped__, seams._HOOK), "hooked twice"
assert not any(isinstance(finder, seams._AfterImport) for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"VLLM_PLUGINS": "none"})
