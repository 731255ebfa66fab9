"""Every place where this package meets vLLM. No other file imports vLLM's modules or reads its private names.

Seams are found by looking for the feature, never by comparing version numbers. `check` names the first one that is
missing; it runs only in engines with LoRA.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from .errors import SeamMissingError

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")
_HOOK = "__lora_reload_hook__"
_ENGINE = "vllm.v1.engine"
_PARALLEL = "vllm.distributed.parallel_state"
_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def release() -> str:
    """The installed vLLM release, for messages only."""
    return str(importlib.import_module("vllm").__version__)


def _find(module: str, name: str) -> Any:
    """Return ``module.name``.

    Raises:
        SeamMissingError: it is not there; the message names it and the release.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as missing:
        raise SeamMissingError(
            f"vllm-lora-reload cannot work with vLLM {release()}: {module}.{name} is missing ({missing}). "
            "Switch LoRA off, leave `lora_reload` out of VLLM_PLUGINS, or use a supported release."
        ) from missing


# --- Constructors that the plugin hooks ---------------------------------------------------------------------------


WORKER = ("vllm.v1.worker.worker_base", "WorkerBase")
OFFLINE_ENGINE = ("vllm.v1.engine.llm_engine", "LLMEngine")
ASYNC_ENGINE = ("vllm.v1.engine.async_llm", "AsyncLLM")
EXECUTOR = ("vllm.v1.executor.abstract", "Executor")
ENGINE_CORE = ("vllm.v1.engine.core", "EngineCore")


def worker_class() -> Any:
    return _find(*WORKER)


def engine_classes() -> tuple[Any, Any]:
    """The offline and the asynchronous front end."""
    return _find(*OFFLINE_ENGINE), _find(*ASYNC_ENGINE)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once, when its module has been imported."""

    def __init__(self, module: str, callback: Callable[[], None]) -> None:
        self._module, self._callback = module, callback

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._callback()

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def hook_constructor(
    seam: tuple[str, str],
    hook: Callable[[Any], None],
    needed: bool = True,
    before: Callable[..., None] | None = None,
    late: str | None = None,
) -> None:
    """Call ``hook(obj)`` for every object of the class `seam`, from when its module is imported; import nothing now.

    Args:
        needed: whether LoRA is refused without the class.
        before: called with the constructor's arguments before it runs.
        late: a method of its subclasses, before which the hook is called too: a constructor that loads plugins itself
            is running when it is hooked. The hook is to bear a second call.

    Raises:
        SeamMissingError: it is needed, and the module is imported and lacks the class, or does not exist.
    """
    module, name = seam

    def install() -> None:
        try:
            attach()
        except SeamMissingError as missing:
            if needed:
                refuse_lora(missing)

    def attach() -> None:
        cls = _find(module, name)
        after_init(cls, hook, before)
        for each in vars(sys.modules[module]).values():
            if late and isinstance(each, type) and issubclass(each, cls) and late in vars(each):
                _before(each, late, hook)

    if needed and (module in sys.modules or importlib.util.find_spec(module) is None):
        attach()
    elif module in sys.modules:
        install()
    elif not any(isinstance(finder, _AfterImport) and finder._module == module for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, install))


def as_request_error(error: type[Exception]) -> type[Exception]:
    """A subclass of `error` that ``AsyncLLM`` and the servers pass on to the caller as the request's own fault.

    They do so for ``ValueError`` on releases before 0.27 and for ``VLLMClientError`` since.
    """
    client_error = getattr(importlib.import_module("vllm.exceptions"), "VLLMClientError", None)
    return type(error.__name__, (error, client_error), {}) if client_error else error


class _Marks(abc.ABC):
    """Mixed in before the client by which a front end sends requests. An ABC like it."""

    lora_reload_mark: Callable[[Any], None]

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.lora_reload_mark(request)
        return super().add_request(request, *args, **kwargs)  # type: ignore[misc]


class _MarksAsync(abc.ABC):
    """The same for one that sends them from an event loop."""

    lora_reload_mark: Callable[[Any], None]

    async def add_request_async(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.lora_reload_mark(request)
        return await super().add_request_async(request, *args, **kwargs)  # type: ignore[misc]


def requests_marked(engine: Any, mark: Callable[[Any], None]) -> None:
    """Call ``mark(request)`` for every ``EngineCoreRequest`` that a front end sends, from now on.

    By its class, not by a function of its own, which would keep it: vLLM freezes what the garbage collector looks at.
    """
    client = engine.engine_core
    sends_async = hasattr(client, "add_request_async") and inspect.iscoroutinefunction(engine.add_request)
    client.lora_reload_mark = mark
    extend(client, _MarksAsync if sends_async else _Marks)


def refuse_lora(missing: SeamMissingError) -> None:
    """Make every later attempt to configure LoRA fail with `missing`, and leave engines without LoRA alone."""
    config = _find("vllm.config", "LoRAConfig")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise missing

    config.__init__ = __init__


def after_init(cls: Any, hook: Callable[[Any], None], before: Callable[..., None] | None = None) -> None:
    """Call ``hook(obj)`` whenever ``cls.__init__`` has run, and `before` with its arguments when it is about to.

    A second call for the same class changes nothing.
    """
    init = cls.__init__
    if hasattr(init, _HOOK):
        return

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if before is not None:
            before(*args, **kwargs)
        init(self, *args, **kwargs)
        hook(self)

    setattr(__init__, _HOOK, hook)
    cls.__init__ = __init__


def _before(cls: Any, method: str, hook: Callable[[Any], None]) -> None:
    """Call ``hook(obj)`` before ``obj.method()``. A second call for the same class changes nothing."""
    function = vars(cls)[method]
    if hasattr(function, _HOOK):
        return

    @functools.wraps(function)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook(self)
        return function(self, *args, **kwargs)

    setattr(hooked, _HOOK, hook)
    setattr(cls, method, hooked)


def extend(obj: Any, mixin: type) -> None:
    """Put `mixin` in front of the class of this one object, as vLLM itself does with ``worker_extension_cls``.

    Works for every subclass that a platform or a framework brings, and touches no other engine in the process. What is
    overridden keeps the signature and the text that `inspect` finds: frameworks decide by them what an engine can do.
    """
    cls = type(obj)
    if not issubclass(cls, mixin):
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        obj.__class__ = type(cls.__name__, (mixin, cls), names | _overriding(mixin, cls))


def _overriding(mixin: type, cls: type) -> dict[str, Any]:
    """The functions of `mixin` that stand for functions of `cls`, looking like these."""
    found: dict[str, Any] = {}
    for name, function in vars(mixin).items():
        if not isinstance(function, FunctionType) or name.startswith("__"):
            continue  # to ask a class for its annotations gives it some
        if isinstance(original := getattr(cls, name, None), FunctionType):
            own = FunctionType(
                function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
            )
            own.__kwdefaults__ = function.__kwdefaults__
            found[name] = functools.update_wrapper(own, original)
    return found


def variables_known(names: Iterable[str]) -> None:
    """Have vLLM take those of these environment variables that are set for its own.

    It warns of names that begin with ``VLLM_`` and that it does not know, or does not start; and those that it knows it
    copies to workers that Ray starts. The constant stands where values enter the key of compiled code.
    """
    known = _find("vllm.envs", "environment_variables")
    for name in names:
        if name in os.environ:
            known.setdefault(name, lambda: None)


# --- Executor -----------------------------------------------------------------------------------------------------


def reply_queues(executor: Any) -> list[Any]:
    """Where workers leave their replies to an executor's calls, by rank; none if it asks them in another way."""
    if not hasattr(getattr(executor, "rpc_broadcast_mq", None), "enqueue"):
        return []
    return list(getattr(executor, "response_mqs", ()))


def calls_observed(executor: Any, queues_of_call: Callable[[Collection[int]], Sequence[Any]]) -> None:
    """Let an executor look for replies to a call in ``queues_of_call(ranks that will reply)``, from now on.

    ``collective_rpc`` picks its queues right after it has broadcast the call, and may read them later.
    """
    broadcast, queues = executor.rpc_broadcast_mq, executor.response_mqs
    send = broadcast.enqueue

    @functools.wraps(send)
    def enqueue(call: Any, *args: Any, **kwargs: Any) -> None:
        send(call, *args, **kwargs)
        match call:
            case (_, _, _, None):
                executor.response_mqs = queues_of_call(range(len(queues)))
            case (_, _, _, int(rank)) if rank in range(len(queues)):
                executor.response_mqs = queues_of_call([rank])
            case _:  # nobody knows who replies
                executor.response_mqs = queues

    broadcast.enqueue = enqueue


def is_failure(reply: Any) -> bool:
    """Whether a worker's reply to a call says that it raised an error."""
    return isinstance(reply, tuple) and getattr(reply[0], "name", None) == "FAILURE"


# --- Engine core --------------------------------------------------------------------------------------------------


def worker_calls_observed(core: Any, called: Callable[[Any], None]) -> None:
    """Call ``called(method)`` after every call of the workers that an engine core's executor makes, from now on."""
    executor = core.model_executor
    call = executor.collective_rpc

    @functools.wraps(call)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(method, *args, **kwargs)
        finally:
            called(method)

    executor.collective_rpc = collective_rpc


def steps_guarded(core: Any, before: Callable[[], dict[int, Any]]) -> None:
    """Call ``before()`` before every step of an engine core. Where it has outputs for clients, they are the step's."""
    step = core.step_fn

    @functools.wraps(step)
    def step_fn() -> Any:
        outputs = before()
        return (outputs, False) if outputs else step()

    core.step_fn = step_fn


def requests(core: Any) -> list[Any]:
    """An engine core's requests that are not finished, running or not."""
    return [request for request in core.scheduler.requests.values() if not request.is_finished()]


def will_run(core: Any) -> bool:
    """Whether an engine core's next step can run requests: while the scheduler is paused those that wait do not."""
    return bool(core.scheduler.has_unfinished_requests())


def has_clients(core: Any) -> bool:
    """Whether an engine core answers by outputs alone, being in a process of its own."""
    return hasattr(core, "output_queue")


def queues_requests(core: Any) -> bool:
    """Whether vLLM lets requests wait now, for someone who can wake the engine meanwhile."""
    paused = getattr(core, "is_scheduler_paused", None)  # from 0.17
    return has_clients(core) and paused is not None and bool(paused())


def begin_anew(request: Any) -> None:
    """Have a request of an engine core that has not begun take no prefix from the cache."""
    if request.num_computed_tokens == 0:
        request.skip_reading_prefix_cache = True


def in_lockstep(core: Any) -> bool:
    """Whether an engine core steps together with those of other data parallel ranks."""
    return hasattr(core, "dp_group")


def end_requests(core: Any, ids: list[str]) -> None:
    """Take requests out of an engine core; those that it does not know, too."""
    core.scheduler.finish_requests(ids, _find("vllm.v1.request", "RequestStatus").FINISHED_ERROR)


def failed_outputs(failed: Iterable[tuple[int, str, str]]) -> dict[int, Any]:
    """``EngineCoreOutputs`` by client for requests that failed, given as client, id and text for ``stop_reason``."""
    output = _find(_ENGINE, "EngineCoreOutput")
    reason = _find(_ENGINE, "FinishReason").ERROR
    by_client: dict[int, list[Any]] = {}
    for client, number, text in failed:
        by_client.setdefault(client, []).append(output(number, [], finish_reason=reason, stop_reason=text))
    make = _find(_ENGINE, "EngineCoreOutputs")
    return {
        client: make(outputs=outputs, finished_requests={each.request_id for each in outputs})
        for client, outputs in by_client.items()
    }


def send_outputs(core: Any, outputs: dict[int, Any]) -> None:
    """To the clients of an engine core in a process of its own."""
    for item in outputs.items():
        core.output_queue.put_nowait(item)


# --- Front end ----------------------------------------------------------------------------------------------------


def drop_request(processor: Any, request_id: str) -> tuple[list[str], Any]:
    """Take a request, and what else was made of the same prompt, out of an output processor.

    Returns:
        Ids to take out of the engine core, and the queue of whoever waits for answers, or None.
    """
    state = processor.request_states.get(request_id)
    if state is None:
        return [], None
    parent = state.parent_req
    ids = list(processor.abort_requests([parent.request_id if parent else request_id], internal=True))
    return ids, state.queue


# --- Model loader -------------------------------------------------------------------------------------------------


_BASE_LOADER = "vllm.model_executor.model_loader.base_loader"


@contextmanager
def _replaced(module: str, **wrapped: Callable[[Any], Any]) -> Iterator[None]:
    """Let each name stand in `module` for ``wrapped[name](what stood there)``, for the length of the block."""
    names = vars(importlib.import_module(module))
    originals = {name: _find(module, name) for name in wrapped}
    names.update({name: wrapped[name](original) for name, original in originals.items()})
    try:
        yield
    finally:
        names.update(originals)


@contextmanager
def loading_observed(
    built: Callable[[nn.Module], None], processing: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """Call ``built(model)`` for every model that the block builds, and process its weights in ``processing(model)``."""

    def wrap_initialize(initialize: Any) -> Any:
        def initialize_model(*args: Any, **kwargs: Any) -> nn.Module:
            model: nn.Module = initialize(*args, **kwargs)
            built(model)
            return model

        return initialize_model

    def wrap_process(process: Any) -> Any:
        def process_weights_after_loading(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with processing(model):
                return process(model, *args, **kwargs)

        return process_weights_after_loading

    with _replaced(_BASE_LOADER, initialize_model=wrap_initialize, process_weights_after_loading=wrap_process):
        yield


# --- LoRA layers --------------------------------------------------------------------------------------------------


def base_layer_with_lora() -> Any:
    return _find("vllm.lora.layers", "BaseLayerWithLoRA")


def logits_processor_with_lora() -> Any:
    return _find("vllm.lora.layers", "LogitsProcessorWithLoRA")


def auto_weights_loader() -> Any:
    return _find("vllm.model_executor.models.utils", "AutoWeightsLoader")


def expert_name_prefixes(model: nn.Module) -> dict[nn.Module, str]:
    """Experts that a LoRA wrapper has told to look for ``base_layer.`` in checkpoint names, and the prefix."""
    marked = ((module, vars(module).get("lora_base_layer_prefix")) for module in model.modules())
    return {module: prefix for module, prefix in marked if prefix}


def set_expert_name_prefix(experts: nn.Module, prefix: str) -> None:
    """Change what `expert_name_prefixes` found."""
    vars(experts)["lora_base_layer_prefix"] = prefix


@contextmanager
def wrapper_classes_replaced(replace: Callable[[type], type]) -> Iterator[None]:
    """Pass every class that vLLM chooses LoRA wrappers from through `replace`, for the length of the block.

    ``from_layer`` walks the table ``_all_lora_classes``; ``from_layer_logits_processor`` names its class.
    """
    once = functools.cache(replace)
    with _replaced(
        "vllm.lora.utils",
        _all_lora_classes=lambda classes: type(classes)(once(cls) for cls in classes),
        LogitsProcessorWithLoRA=once,
    ):
        yield


# --- Model runner and adapter manager -----------------------------------------------------------------------------


def lora_model_runner_mixin() -> Any:
    return _find("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin")


def checkpoint(runner: Any) -> str:
    """Folder (or hub name) of the model that a runner serves."""
    return str(runner.model_config.model)


def can_read_checkpoint(runner: Any) -> bool:
    """Whether ``reload_weights`` can read weights by itself: with dummy weights, say, there is nothing to read."""
    loader = _find("vllm.model_executor.model_loader", "get_model_loader")(runner.load_config)
    return hasattr(loader, "get_all_weights")


def checkpoint_files(runner: Any, model: nn.Module) -> list[Path]:
    """The safetensors files that vLLM's loader would read now; of a hub's model, those that were downloaded.

    Raises:
        ValueError: it reads something else, or not all weights from there; the message says why.
        Exception: what vLLM raises about the files.
    """
    config, load_config = runner.model_config, runner.load_config
    loader = _find("vllm.model_executor.model_loader", "get_model_loader")(load_config)
    if type(loader) is not _find("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader") or (
        str(getattr(load_config.load_format, "value", load_config.load_format)) not in ("auto", "hf", "safetensors")
    ):
        raise ValueError(f"weights are loaded with load_format {load_config.load_format!r}")
    if getattr(config, "model_weights", "") or tuple(getattr(model, "secondary_weights", ())):
        raise ValueError("not all weights are in the model's own folder")
    folder = config.model
    if not Path(folder).is_dir():
        download = _find("huggingface_hub", "snapshot_download")
        folder = download(folder, revision=config.revision, cache_dir=load_config.download_dir, local_files_only=True)
    values = {
        "model_name_or_path": folder,
        "subfolder": None,
        "revision": config.revision,
        "fall_back_to_pt": getattr(model, "fall_back_to_pt_during_load", True),
        "allow_patterns_overrides": getattr(model, "allow_patterns_overrides", None),
    }
    asked = inspect.signature(loader._prepare_weights).parameters
    _, files, safe, *_ = loader._prepare_weights(**{name: values[name] for name in asked})
    if not safe:
        raise ValueError("the checkpoint has no safetensors files")
    return [Path(file) for file in files]


def after_reload(runner: Any) -> None:
    """What vLLM's ``reload_weights`` does at its end, the state of LoRA aside: forget what old weights computed."""
    for name in ("reset_encoder_cache", "reset_mm_cache"):
        if hasattr(runner, name):
            getattr(runner, name)()


def weights_can_move(vllm_config: Any) -> bool:
    """Whether vLLM exchanges experts between ranks while it serves."""
    return bool(getattr(vllm_config.parallel_config, "enable_eplb", False))


def ranks_on_this_host(vllm_config: Any) -> int:
    """Workers on this host that share its cores: those of one engine, for every data parallel engine here."""
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size) * max(1, int(parallel.data_parallel_size_local))


def identity(vllm_config: Any) -> dict[str, Any]:
    """Fields of `snapshot.Engine`: what tells one rank's weights from others. Needs the parallel groups."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = {"tp": _find(_PARALLEL, "get_tp_group")(), "pp": _find(_PARALLEL, "get_pp_group")()}
    place = {kind: [group.rank_in_group, group.world_size] for kind, group in groups.items()}
    if getattr(model, "is_moe", True):  # these have experts of their own
        if parallel.data_parallel_size > 1:
            place["dp"] = [parallel.data_parallel_rank, parallel.data_parallel_size]
        if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            group = _find(_PARALLEL, "get_pcp_group")()
            place["pcp"] = [group.rank_in_group, group.world_size]
    return {
        "model": str(model.model),
        "release": release(),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "place": place,
    }


def sleeps(vllm_config: Any) -> bool:
    """Whether an engine can be put to sleep; not told apart where vLLM has no sleep mode (simulations)."""
    return bool(vllm_config.model_config.enable_sleep_mode) or no_sleep_mode() is not None


def engine_resets_lora() -> bool:
    """Whether the engine itself calls ``reset_lora_state`` after a reload and a weight update (0.28 and later)."""
    return hasattr(lora_model_runner_mixin(), "reset_lora_state")


def worker_manager(runner: Any) -> Any:
    """The ``WorkerLoRAManager`` of a runner that has wrapped its model."""
    return runner.lora_manager


def adapter_manager(worker_manager: Any) -> Any:
    """The ``LoRAModelManager`` in it."""
    return worker_manager._adapter_manager


def punica_wrappers(manager: Any) -> list[Any]:
    """The manager's punica wrappers, each once (towers of one model share theirs)."""
    return list({id(wrapper): wrapper for wrapper in manager.punica_wrapper_mapping.values()}.values())


def slots(manager: Any) -> list[int | None]:
    """Adapter id by LoRA slot; None where a slot is free."""
    return list(manager.lora_index_to_id)


def is_active(manager: Any, number: int) -> bool:
    """Whether an adapter has a slot."""
    return number in manager._active_adapters


def forget_mapping(manager: Any) -> None:
    """Make the next batch compute punica metadata anew, even if its mapping is that of the last batch."""
    manager._last_mapping = None
    if hasattr(manager, "_last_slot_layout"):
        manager._last_slot_layout = None


class _OneFreeSlot:
    """The manager as ``activate_adapter`` sees it, with a single free slot and its own bookkeeping.

    Lets vLLM's own code write an adapter into a chosen slot while pins, LRU order and slot table stay untouched.
    """

    def __init__(self, manager: Any, index: int, adapter: Any) -> None:
        self._manager = manager
        self.lora_index_to_id: list[int | None] = [-1] * len(manager.lora_index_to_id)
        self.lora_index_to_id[index] = None
        self._active_adapters: dict[int, None] = {}
        self._registered_adapters = {adapter.id: adapter}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def write_slot(manager: Any, index: int, adapter: Any) -> None:
    """Copy an adapter (a ``LoRAModel``) from host memory into LoRA slot `index` of every wrapper."""
    activate = _find("vllm.lora.model_manager", "LoRAModelManager").activate_adapter
    activate(_OneFreeSlot(manager, index, adapter), adapter.id)


def registered(manager: Any) -> dict[int, Any]:
    """``LoRAModel`` by adapter id: every adapter in host memory, least recently used first."""
    return dict(manager.list_adapters())


def register_adapter(manager: Any, adapter: Any) -> None:
    """Put a merged ``LoRAModel`` into the host registry, in the place of one with the same id.

    Raises:
        RuntimeError: the registry is full of pinned adapters.
    """
    registry = manager._registered_adapters
    if adapter.id not in manager.list_adapters() and len(manager) + 1 > manager.capacity:
        manager.remove_oldest_adapter()
    registry[adapter.id] = adapter


def wrappers(manager: Any) -> list[Any]:
    """The manager's LoRA wrappers."""
    return list(manager.modules.values())


def whole_modules(adapter: Any) -> dict[str, Any]:
    """Modules that an adapter brings whole, with ``weight`` and ``bias`` (``modules_to_save``, from 0.32)."""
    return dict(getattr(adapter, "modules_to_save", None) or {})


def remove_adapter(manager: Any, number: int) -> None:
    """Take an adapter out of the host registry and its slot, if it is there."""
    manager.remove_adapter(number)


def deactivate_adapter(manager: Any, number: int) -> None:
    """Take an adapter out of its slot."""
    manager.deactivate_adapter(number)


def activate_if_possible(manager: Any, number: int) -> None:
    """Give a registered adapter a slot, unless all slots hold pinned adapters: then it gets one when one is free."""
    active = manager._active_adapters
    if len(active) < manager.lora_slots or set(active.order) - active.pinned_items:
        manager.activate_adapter(number)


def merge_packed_modules(manager: Any, adapter: Any) -> None:
    """Bring a ``LoRAModel`` as it was read into the form that slots take, and fold its scaling in. Only once."""
    manager._create_merged_loras_inplace(adapter)


def modules_without_a_place(manager: Any, adapter: Any) -> list[str]:
    """Modules of a merged ``LoRAModel`` that the model has on no pipeline stage: vLLM leaves them out without a word.

    What stands beside modules of the model, though without LoRA here (an encoder's, say), is not among them. All of
    them are if none has LoRA here.
    """
    tree = dict(manager.model.named_modules())
    elsewhere = _find("vllm.model_executor.models.utils", "PPMissingLayer")
    other_stages = tuple(f"{name}." for name, module in tree.items() if isinstance(module, elsewhere))
    # Adapters of pooling models may lack this part of the names.
    forms = ("", "model.") if manager.is_pooling_model else ("",)

    def has_place(name: str) -> bool:
        return any(
            (form + name).rpartition(".")[0] in tree or f"{form}{name}.".startswith(other_stages) for form in forms
        )

    names = sorted(adapter.loras)
    wrapped = {*manager.modules, *(f"{name}.base_layer" for name in manager.modules)}
    if not other_stages and not any(form + name in wrapped for name in names for form in forms):
        return names
    return [name for name in names if not has_place(name)]


def peft_settings() -> set[str]:
    """Those of ``adapter_config.json`` that vLLM takes into account."""
    helper = _find("vllm.lora.peft_helper", "PEFTHelper")
    return {field.name for field in dataclasses.fields(helper)}


def loaded_once(request: Any) -> Any:
    """A ``LoRARequest`` without `load_inplace`, of the same adapter."""
    request = copy.copy(request)
    request.load_inplace = False
    return request


def at_folder(request: Any, folder: str) -> Any:
    """A ``LoRARequest`` of the same adapter, in a folder by its whole path."""
    request = copy.copy(request)
    request.lora_path = folder
    return request


def adapter_folder(path: str) -> str:
    """The folder that vLLM reads an adapter from; of a hub's name, where it was downloaded to."""
    return str(_find("vllm.lora.utils", "get_adapter_absolute_path")(path))


def reads_files(load: Any) -> bool:
    """Whether a ``_load_adapter`` is vLLM's own, not a framework's."""
    return str(getattr(load, "__module__", "")).startswith("vllm.")


def is_lora_request(request: Any) -> bool:
    """Whether it is vLLM's own, not one that a framework has made of it, with tensors."""
    return type(request) is _find("vllm.lora.request", "LoRARequest")


def take_modules(manager: Any) -> Any:
    """From now on the manager keeps its books, but reaches no wrapper: what it would write is left out.

    Returns:
        What `give_modules` takes.
    """
    modules, manager.modules = manager.modules, {}
    return modules


def give_modules(manager: Any, modules: Any) -> None:
    """Undo `take_modules`."""
    manager.modules = modules


class _SlotTable(list[int | None]):
    """Adapter id by slot, which tells when it changes: vLLM writes to it only when it assigns a slot."""

    def __init__(self, slots: list[int | None], changed: Callable[[int], None]) -> None:
        super().__init__(slots)
        self._changed = changed

    def __setitem__(self, index: Any, number: Any) -> None:
        super().__setitem__(index, number)
        self._changed(index)


def experts(manager: Any, module: str) -> int | None:
    """How many experts an adapter's flat tensors for `module` hold side by side.

    Returns:
        None if it is none of experts; 0 if that is not known here (on another pipeline stage, say).
    """
    if not module.endswith((".experts", ".experts.base_layer")):
        return None
    wrapper = manager.modules.get(module.removesuffix(".base_layer"))
    for layer in (wrapper, getattr(wrapper, "base_layer", None)):
        if isinstance(count := getattr(layer, "global_num_experts", None), int):
            return count
    return 0


def watch_slots(manager: Any, changed: Callable[[int], None]) -> None:
    """Call ``changed(index)`` whenever the manager gives a slot to another adapter or to none."""
    manager.lora_index_to_id = _SlotTable(slots(manager), changed)


def lora_request(name: str, number: int, path: str) -> Any:
    return _find("vllm.lora.request", "LoRARequest")(lora_name=name, lora_int_id=number, lora_path=path)


def one_front_end(vllm_config: Any) -> bool:
    """Whether all ranks get their calls from one front end, so that each of them gets every call."""
    backend = vllm_config.parallel_config.distributed_executor_backend
    return "ExternalLauncher" not in getattr(backend, "__name__", "") and backend != "external_launcher"


def max_lora_ranks() -> list[int]:
    """Values of ``max_lora_rank`` that this release accepts, in order."""
    return sorted(get_args(_find("vllm.config.lora", "MaxLoRARanks")))


def linear_with_lora() -> Any:
    return _find("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA")


def same_on_all_ranks(value: T) -> T:
    """What the first rank of this engine has. A collective: every rank has to call it."""
    for group in _groups():
        value = group.broadcast_object(value, src=0)
    return value


def true_on_all_ranks(value: bool) -> bool:
    """A collective: every rank of this engine has to call it."""
    torch = importlib.import_module("torch")
    for group in _groups():
        flag = torch.tensor([int(value)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        value = bool(flag.item())
    return value


def _groups() -> list[Any]:
    """Pipeline and tensor parallel groups; each pass over both reaches every rank of one engine."""
    groups = [_find(_PARALLEL, "get_pp_group")(), _find(_PARALLEL, "get_tp_group")()]
    return [group for group in groups if group.world_size > 1]


def set_checkpoint(runner: Any, settings: dict[str, Any]) -> None:
    """Put back what `checkpoint_settings` gave."""
    vars(runner.model_config).update(settings)


def checkpoint_settings(runner: Any) -> dict[str, Any]:
    """Where a runner reads weights from. ``reload_weights(weights_path=...)`` changes it before it reads anything."""
    return {k: v for k, v in vars(runner.model_config).items() if k in ("model", "model_weights", "revision")}


def close_weight_update(worker: Any) -> None:
    """Make a worker forget an open weight transfer session, which it would refuse to let another follow."""
    if getattr(worker, "_weight_update_active", False):
        worker._weight_update_active = False
        if hasattr(worker, "_is_checkpoint_format"):  # before 0.26
            worker._is_checkpoint_format = True
        if hasattr(worker.weight_transfer_engine, "reset_weight_update_target"):  # from 0.26
            worker.weight_transfer_engine.reset_weight_update_target()


def draft_model(worker: Any) -> nn.Module | None:
    """The speculative draft model, where a worker can be asked for it (from 0.26) and has one."""
    get_draft_model = getattr(worker, "get_draft_model", None)
    return get_draft_model() if get_draft_model is not None else None


def takes_kernel_format(worker: Any, update_info: Any) -> bool:
    """Whether a transfer copies tensors as they are into parameters, broadcasting what is too small (before 0.26)."""
    if not isinstance(update_info, dict):
        return False
    return not update_info.get("is_checkpoint_format", getattr(worker, "_is_checkpoint_format", True))


# --- Layerwise reload ---------------------------------------------------------------------------------------------


@contextmanager
def layers_observed(
    made: Callable[[nn.Module, dict[str, torch.Tensor]], None], as_loaded: Callable[[torch.Tensor], bool]
) -> Iterator[None]:
    """Call ``made(layer, running tensors by name)`` for every layer whose tensors a layerwise reload has allocated.

    A layer that begins a layerwise reload in the block takes all that is loaded into it. vLLM counts elements and drops
    what comes when there were as many as the layer has: of tensors that a checkpoint has once for each shard of a fused
    layer (shapes of packed weights) the last one, which is what a first load leaves there.

    Args:
        as_loaded: whether a running tensor is what a load writes, not processed since.
    """

    def wrap_materialize(materialize: Any) -> Any:
        def materialize_layer(layer: nn.Module, *args: Any) -> None:
            materialize(layer, *args)
            info = _find(_LAYERWISE, "LAYERWISE_INFO")[layer]
            if info.kernel_tensors is not None:  # None in the first load of a layer
                parameters, buffers = info.kernel_tensors
                made(layer, parameters | buffers)

        return materialize_layer

    def wrap_make(make: Any) -> Any:
        def make_online_process_loader(layer: nn.Module, param_name: str) -> Any:
            original = _find(_LAYERWISE, "_get_original_loader")(getattr(layer, param_name))
            loader = make(layer, param_name)
            info = _find(_LAYERWISE, "LAYERWISE_INFO")[layer]

            @functools.wraps(loader)
            def online_process_loader(*args: Any, **kwargs: Any) -> Any:
                if info.load_numel_total is not None:
                    return loader(*args, **kwargs)
                bound, running = inspect.signature(original).bind(*args, **kwargs), getattr(layer, param_name, None)
                same_kind = type(running) is type(bound.arguments.get("param"))
                if running is None or not same_kind or not as_loaded(running):
                    return loader(*args, **kwargs)
                bound.arguments["param"] = running
                return original(*bound.args, **bound.kwargs)

            return online_process_loader

        return make_online_process_loader

    with _replaced(_LAYERWISE, materialize_layer=wrap_materialize, make_online_process_loader=wrap_make):
        yield


def before_processing(layer: nn.Module, call: Callable[[nn.Module], None]) -> None:
    """Call ``call(layer)`` the next time that vLLM is about to process the layer's weights."""
    method = getattr(layer, "quant_method", None)
    process = getattr(method, "process_weights_after_loading", None)
    if method is None or process is None:
        return

    def process_weights_after_loading(*args: Any, **kwargs: Any) -> Any:
        vars(method).pop("process_weights_after_loading", None)
        call(args[0] if args else layer)  # layers may share the method
        return process(*args, **kwargs)

    vars(method)["process_weights_after_loading"] = process_weights_after_loading


def abort_layerwise_reload(model: nn.Module) -> None:
    """Give every layer that an interrupted layerwise reload holds its running tensors and their loaders back."""
    info_of = _find(_LAYERWISE, "LAYERWISE_INFO")
    place = _find(_LAYERWISE, "_place_kernel_tensors")
    original_loader = _find(_LAYERWISE, "_get_original_loader")
    for layer in model.modules():
        info = info_of.get(layer)
        if info is None or info.load_numel_total is None:
            continue
        if info.kernel_tensors is not None:
            place(layer, info)
        for tensor in [*layer._parameters.values(), *layer._buffers.values()]:
            # A bias is never moved to the meta device, so the wrapped loader sits on the running tensor.
            # Other loaders may be partial functions, which vLLM's unwrapping does not take.
            if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
                tensor.weight_loader = original_loader(tensor)  # type: ignore[union-attr]
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


# --- Command line -------------------------------------------------------------------------------------------------


def engine_arguments(given: Sequence[str], prog: str) -> dict[str, Any]:
    """Keyword arguments of ``LLM`` for what a user gave on the command line: MODEL and vLLM's own options."""
    engine_args = _find("vllm.engine.arg_utils", "EngineArgs")
    parser = engine_args.add_cli_args(_find("vllm.utils.argparse_utils", "FlexibleArgumentParser")(prog=prog))
    parser.add_argument("positional_model", metavar="MODEL")
    args = parser.parse_args(list(given))
    args.model = args.positional_model
    return dict(vars(engine_args.from_cli_args(args)))


def offline_engine(**arguments: Any) -> Any:
    """An ``LLM``."""
    return _find("vllm", "LLM")(**arguments)


def no_sleep_mode() -> str | None:
    """Why vLLM has no sleep mode here, in words; None if it has. Asks what its config and its allocator ask."""
    platform = _find("vllm.platforms", "current_platform")
    if not platform.is_sleep_mode_available():
        return f"vLLM has none on the platform {platform.device_name or 'unknown'}"
    if platform.is_cuda_alike() and not _find("vllm.device_allocator.cumem", "cumem_available"):
        return "the extension vllm.cumem_allocator of this vLLM cannot be loaded"
    return None


@contextmanager
def unmapping_noticed(vllm_config: Any) -> Iterator[Callable[[], bool]]:
    """Around a worker's ``sleep``: gives a function that tells whether it may have unmapped anything by then.

    Before it, vLLM copies buffers to the host, which can fail.
    """
    backend = getattr(vllm_config.model_config, "sleep_mode_backend", "cumem")  # from 0.26
    if backend != "cumem" or not _find("vllm.platforms", "current_platform").is_cuda_alike():
        yield lambda: True
        return
    begun = False
    allocator = _find("vllm.device_allocator.cumem", "CuMemAllocator")
    real = allocator.sleep

    @functools.wraps(real)
    def sleep(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun = True
        return real(*args, **kwargs)

    allocator.sleep = sleep
    try:
        yield lambda: begun
    finally:
        allocator.sleep = real


def pool_watched(
    vllm_config: Any,
    unmapping: Callable[[int, set[str]], AbstractContextManager[None]],
    mapped: Callable[[set[str]], None],
) -> Callable[[], None]:
    """From now on, whoever asks vLLM's allocator to unmap pools does so in ``unmapping(level, pools)``.

    Frameworks drive the allocator themselves, without the worker. ``mapped(pools)`` is called when they are mapped
    again. The pools are ``weights`` and ``kv_cache``.

    Returns:
        What ends this.
    """
    platform = _find("vllm.platforms", "current_platform")
    backend = getattr(vllm_config.model_config, "sleep_mode_backend", "cumem")  # from 0.26
    if backend != "cumem" or not platform.is_cuda_alike() or not vllm_config.model_config.enable_sleep_mode:
        return lambda: None
    cls = _find("vllm.device_allocator.cumem", "CuMemAllocator")
    allocator = cls.get_instance()
    hooks: dict[str, Any] = {}

    def hook(name: str, around: Callable[[Any], AbstractContextManager[Any]]) -> None:
        if (real := getattr(cls, name, None)) is None:
            return

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(real).bind(allocator, *args, **kwargs).arguments
            with around(next((value for key, value in given.items() if key != "self"), None)):
                return getattr(type(allocator), name)(allocator, *args, **kwargs)

        hooks[name] = wrapped

    every = {"weights", "kv_cache"}

    def named(tags: Any) -> set[str]:
        return every & set((tags,) if isinstance(tags, str) else tags or ())

    @contextmanager
    def waking(tags: Any) -> Iterator[None]:
        yield
        mapped(every if tags is None else named(tags))

    hook("sleep", lambda offloaded: unmapping(1 if "weights" in named(offloaded) else 2, every))
    hook("discard", lambda tags: unmapping(2, named(tags)))
    hook("wake_up", waking)
    vars(allocator).update(hooks)

    def end() -> None:
        for name, wrapped in hooks.items():
            if vars(allocator).get(name) is wrapped:
                del vars(allocator)[name]

    return end


def take_saved_buffers(worker: Any) -> None:
    """Put back the buffers that a worker's own sleep has saved, as its own wake-up would do, and only once."""
    saved, worker._sleep_saved_buffers = getattr(worker, "_sleep_saved_buffers", {}), {}
    for name, buffer in worker.model_runner.model.named_buffers():
        if name in saved:
            buffer.data.copy_(saved[name].data)


def check() -> None:
    """Look for every seam that a worker needs.

    Raises:
        SeamMissingError: the first one that is missing, with its name and the release.
    """
    lora_model_runner_mixin(), base_layer_with_lora(), logits_processor_with_lora(), auto_weights_loader()
    for module, name in (
        (_BASE_LOADER, "initialize_model"),
        (_BASE_LOADER, "process_weights_after_loading"),
        ("vllm.lora.utils", "_all_lora_classes"),
        ("vllm.lora.utils", "LogitsProcessorWithLoRA"),
        ("vllm.lora.model_manager", "LoRAModelManager"),
        ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA"),
        ("vllm.lora.request", "LoRARequest"),
        ("vllm.config.lora", "MaxLoRARanks"),
        (_PARALLEL, "get_pp_group"),
        (_PARALLEL, "get_tp_group"),
        (_LAYERWISE, "LAYERWISE_INFO"),
        (_LAYERWISE, "_place_kernel_tensors"),
        (_LAYERWISE, "_get_original_loader"),
        (_LAYERWISE, "materialize_layer"),
        (_LAYERWISE, "make_online_process_loader"),
    ):
        _find(module, name)
