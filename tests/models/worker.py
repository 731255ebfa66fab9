"""Walks architectures in one process of one release: build, load, wrap, lose the pool, wake, reload, compare.

python -m tests.models.worker list out.jsonl                 # one line an architecture with LoRA support
python -m tests.models.worker walk out.jsonl ARCHITECTURE... # one line each, as soon as it is known
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import inspect
import json
import logging
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_PLUGINS="",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
)
warnings.simplefilter("ignore")

from . import stubs  # noqa: E402

stubs.install()

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.support.checkpoints import _tokenizer  # noqa: E402
from tests.support.pool import _REGISTRIES, GARBAGE, PoolInspector, StorageRecorder  # noqa: E402
from tests.support.snapshots import take_snapshot  # noqa: E402

from . import checkpoint, configs  # noqa: E402

# transformers 5.22 renamed it; vLLM 0.27 imports it for a tower that is not built here.
with contextlib.suppress(ImportError):
    from transformers.models.pixtral import modeling_pixtral

    for renamed in ("PixtralRotaryEmbedding", "position_ids_in_meshgrid"):
        if not hasattr(modeling_pixtral, renamed):
            setattr(modeling_pixtral, renamed, modeling_pixtral.PixtralVisionRotaryEmbedding)

FLAT_LOOP = re.compile(r"dict\(\s*(?:self|model)\.named_parameters\(")
CPU = torch.device("cpu")


_TOKENIZER = _tokenizer()


class NotBuildable(Exception):
    """The architecture cannot be tried here. ``group`` says at which step it ended."""

    def __init__(self, group: str, error: BaseException | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        super().__init__(text)
        self.group = group
        self.trace = "" if isinstance(error, str) else "".join(traceback.format_exception(error))


@contextlib.contextmanager
def step(group: str) -> Iterator[None]:
    try:
        yield
    except NotBuildable:
        raise
    except Exception as error:
        raise NotBuildable(group, error) from error


# --- What there is ------------------------------------------------------------------------------------------------


def architectures() -> Iterator[tuple[str, Any]]:
    """(architecture, class) of every model in vLLM's registry that supports LoRA; the error where it has no class."""
    from vllm.model_executor.models import registry, supports_lora

    drafts = set(registry._SPECULATIVE_DECODING_MODELS)
    for architecture, entry in registry.ModelRegistry.models.items():
        if architecture in drafts:  # vLLM never wraps a draft model
            continue
        try:
            cls = entry.load_model_cls()
        except Exception as error:
            yield architecture, error
        else:
            if supports_lora(cls):
                yield architecture, cls


def loads_by(cls: type) -> str:
    """``flat`` if the file of `cls` looks names up in ``dict(self.named_parameters())``, else ``auto``."""
    return "flat" if FLAT_LOOP.search(inspect.getsource(sys.modules[cls.__module__])) else "auto"


# --- The engine around a model ------------------------------------------------------------------------------------


def prepare() -> None:
    """One rank, no registry subprocesses, no processors."""
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.lora import model_manager
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.models import registry

    logging.disable(logging.ERROR)
    _custom_ops._supports_onednn = False  # as in tests.support.pool
    lazy = registry._LazyRegisteredModel
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    model_manager.MultiModalBudget = _Budget
    punica = model_manager.get_punica_wrapper
    model_manager.get_punica_wrapper = lambda tokens, *args, **kwargs: punica(int(tokens), *args, **kwargs)
    vars(torch.accelerator)["empty_cache"] = lambda: None  # the CPU runner does so too
    vars(base_loader)["initialize_model"] = _observable(base_loader.initialize_model)
    _as_on_a_gpu()
    store = tempfile.NamedTemporaryFile()  # noqa: SIM115
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store.name}.store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def _as_on_a_gpu() -> None:
    """Choose layers as on a GPU where vLLM's CPU ones take no LoRA or do not exist; they are built but never run."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.platforms.cpu import CpuPlatform

    triton = unquantized.UnquantizedMoeBackend.TRITON
    experts: Any = unquantized.backend_to_kernel_cls(triton)
    choice = (triton, experts[0] if isinstance(experts, list) else experts)
    vars(moe)["select_unquantized_moe_backend"] = lambda *args, **kwargs: choice
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        if attn_selector_config.use_mla and not attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    # FlashAttention's import, which this CPU build lacks, and nothing calls.
    from vllm.v1.attention.backends import fa_utils

    for name in ("compile_flash_attn_varlen_func_from_specs",):
        if not hasattr(fa_utils, name):
            setattr(fa_utils, name, None)
    with contextlib.suppress(ImportError):
        from vllm.v1.attention.backends.mla.prefill import flash_attn

        vars(flash_attn)["flash_attn_varlen_func"] = lambda *args, **kwargs: None
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


class _Budget:
    """Stands in for vLLM's ``MultiModalBudget``, which needs a processor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mm_max_items_per_prompt = {"image": 1}

    def get_encoder_budget(self) -> int:
        return 64


def engine_config(folder: Path, spec: configs.Spec, cls: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import SupportsMultiModal

    # The interface has a method without a body, with which vLLM would go on.
    counts = getattr(cls, "get_num_mm_encoder_tokens", None)
    towers = counts is not None and counts is not getattr(SupportsMultiModal, "get_num_mm_encoder_tokens", None)

    args: dict[str, Any] = dict(
        model=str(folder),
        trust_remote_code=False,
        dtype="bfloat16",
        enforce_eager=True,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        enable_tower_connector_lora=towers,
    )
    return EngineArgs(**args | spec.engine).create_engine_config()


def make_runner(vllm_config: Any) -> Any:
    """What of a model runner a load needs, on the release's own code."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    class Runner(LoRAModelRunnerMixin):
        reload_weights = GPUModelRunner.reload_weights

        def __init__(self) -> None:
            self.vllm_config = vllm_config
            self.model_config = vllm_config.model_config
            self.load_config = vllm_config.load_config
            self.lora_config = vllm_config.lora_config
            self.device = CPU

        def get_model(self) -> Any:
            return self.model

        def reset_encoder_cache(self) -> None: ...

        def reset_mm_cache(self) -> None: ...

    return Runner()


def initialize(vllm_config: Any) -> Any:
    """The model with its constructor's values; see `_observable`."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(vllm_config.model_config.dtype), CPU:
        return base_loader.initialize_model(vllm_config=vllm_config)


@contextlib.contextmanager
def _unset_memory_marked() -> Iterator[None]:
    """New memory that nothing has written yet is NaN or the largest int, never by chance what it should be."""
    vars(torch.utils.deterministic)["fill_uninitialized_memory"] = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _observable(build: Any) -> Any:
    """Wrap ``initialize_model``: memory that a constructor leaves unset is NaN or the largest int."""
    from vllm.model_executor.layers import rotary_embedding

    @functools.wraps(build)
    def initialize_model(vllm_config: Any, **kwargs: Any) -> Any:
        rotary_embedding._ROPE_DICT.clear()  # shared between models, but each worker allocates its own
        vllm_config.compilation_config.static_forward_context.clear()
        with _unset_memory_marked():
            return build(vllm_config=vllm_config, **kwargs)

    return initialize_model


def unset(model: Any) -> list[str]:
    """Parameters that neither the constructor nor a load has written."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel() and parameter.float().isnan().all()
    ]


class Worker:
    """A worker as far as weights go. Sleep takes the pool, wake-up restores buffers (see `tests.support.pool`)."""

    def __init__(self, runner: Any, wrapped: bool) -> None:
        self.model_runner = runner
        self.wrapped = wrapped
        self.pool = StorageRecorder()

    def load_model(self) -> None:
        """Build, load and wrap as vLLM does."""
        from vllm.model_executor.model_loader import get_model_loader

        runner = self.model_runner
        with self.pool:
            try:
                loader = get_model_loader(runner.load_config)
                model = loader.load_model(vllm_config=runner.vllm_config, model_config=runner.model_config)
            except Exception as error:
                processing = "process_weights_after_loading" in "".join(traceback.format_exception(error))
                raise NotBuildable("process" if processing else "checkpoint", error) from error
            if missing := unset(model):
                raise NotBuildable("checkpoint", f"not in the checkpoint: {missing[:4]} ({len(missing)})")
            with step("wrap"):
                runner.model = runner.load_lora_model(model, runner.vllm_config, CPU) if self.wrapped else model

    def sleep(self, level: int = 1) -> None:
        self._buffers = {name: buffer.clone() for name, buffer in self.model_runner.model.named_buffers()}
        for storage in self.pool.alive():
            _bytes(storage).fill_(GARBAGE)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for name, buffer in self.model_runner.model.named_buffers():
            if name in self._buffers:
                buffer.data.copy_(self._buffers[name])


# --- One cycle ----------------------------------------------------------------------------------------------------


class Inspector(PoolInspector):
    def __init__(self, runner: Any) -> None:
        self.model_runner = runner

    def in_pool(self, tensor: torch.Tensor) -> bool:
        return True

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """As inherited, but layers may keep dataclasses with fields that are not set (vLLM's configs)."""
        named: dict[int, tuple[str, torch.Tensor]] = {}
        model = self.model_runner.get_model()
        manager = getattr(model, "lora_manager", None)
        punica = manager.punica_wrapper_mapping.items() if manager is not None else ()
        for owner_name, owner in (*model.named_modules(), *((f"punica[{key}]", wrapper) for key, wrapper in punica)):
            values = {k: v for k, v in vars(owner).items() if k not in _REGISTRIES}
            for attribute, value in (values | owner_tensors(owner)).items():
                for position, tensor in enumerate(_leaves(value)):
                    if not tensor.is_meta and tensor.untyped_storage().nbytes():
                        key = tensor.untyped_storage().data_ptr()
                        named.setdefault(key, (f"{owner_name}.{attribute}[{position}]", tensor))
        return dict(named.values())


def owner_tensors(owner: Any) -> dict[str, Any]:
    return getattr(owner, "_parameters", {}) | getattr(owner, "_buffers", {})


def _leaves(value: Any) -> list[torch.Tensor]:
    if dataclasses.is_dataclass(value):
        value = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _digest(storage: torch.UntypedStorage) -> str:
    return hashlib.sha256(_bytes(storage).numpy().tobytes()).hexdigest()


def add_adapter(runner: Any) -> None:
    """Put an adapter of random numbers for every wrapper into the second slot, an evicted one's bytes into none."""
    manager = runner.lora_manager._adapter_manager
    generator = torch.Generator().manual_seed(1)
    embeddings = getattr(runner.model, "embedding_modules", None) or {}
    adapter = manager.create_dummy_lora(7, 8, embeddings)
    for weights in adapter.loras.values():
        for side in (weights.lora_a, weights.lora_b):
            for tensor in side if isinstance(side, (list, tuple)) else [side]:
                if tensor is not None:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    manager.add_adapter(adapter)
    manager.activate_adapter(7)


def cycle(vllm_config: Any, tensors: dict[str, torch.Tensor], mode: str, way: str = "given") -> dict[str, Any]:
    """Load, wrap, lose everything that was allocated, wake up, reload.

    Args:
        mode: ``ours`` with this package, ``stock`` without it, ``plain`` without LoRA.
        way: the reload is ``given`` the tensors, reads the checkpoint (``disk``), or is left out, since the wake-up has
            a ``snapshot``.

    Returns:
        ``error`` and ``trace`` if the reload raised; else ``base``, ``lora`` and ``unnamed``: which tensors differ,
        ``refuses``: what this package would tell a request, ``plan``: that of the first load, and ``restored``: what
        it brought the weights back from.
    """
    from vllm.config import set_current_vllm_config

    ours, wrapped = mode == "ours", mode != "plain"
    runner = make_runner(vllm_config)
    worker: Any = Worker(runner, wrapped)
    if not wrapped:
        runner.lora_config = None
    if ours:
        from vllm_lora_reload import seams
        from vllm_lora_reload.worker import LoRAReloadWorker

        seams.extend(worker, LoRAReloadWorker)
    with set_current_vllm_config(vllm_config):
        worker.load_model()
    gc.collect()
    inspector = Inspector(runner)
    adapter_error = None
    try:
        if wrapped:
            add_adapter(runner)
    except Exception as error:
        adapter_error = f"{type(error).__name__}: {error}"
    pool = worker.pool
    in_pool = {storage.data_ptr() for storage in pool.alive()}
    named = {
        name: tensor.untyped_storage()
        for name, tensor in inspector._named_tensors().items()
        if tensor.untyped_storage().data_ptr() in in_pool
    }
    before = {name: _digest(storage) for name, storage in named.items()}
    names = {storage.data_ptr() for storage in named.values()}
    unnamed = [(storage, _digest(storage)) for storage in pool.alive() if storage.data_ptr() not in names]
    parameters = {id(p) for p in runner.model.parameters()}
    wrappers = inspector.wrapper_names()
    result: dict[str, Any] = dict(tensors=len(named), wrappers=len(wrappers), adapter=adapter_error)
    lora = _lora_storages(runner) if wrapped else set()
    snapshots = tempfile.TemporaryDirectory()
    if way == "snapshot":
        with set_current_vllm_config(vllm_config):
            take_snapshot(worker, Path(snapshots.name))
    worker.sleep(level=2)
    try:
        worker.wake_up(["weights", "kv_cache"])
        with set_current_vllm_config(vllm_config), _unset_memory_marked():
            if way == "disk":
                runner.reload_weights()
            elif way == "given":
                runner.reload_weights((name, tensor.clone()) for name, tensor in tensors.items())
    except Exception as error:
        if ours:
            result["refuses"] = worker.lora_reload_status()["error"]
        result["meta"] = inspector.meta_tensors()
        result["rewrapped"] = inspector.wrapper_names() != wrappers
        return result | dict(error=f"{type(error).__name__}: {error}"[:500], trace=traceback.format_exc()[-4000:])
    if ours:
        status = worker.lora_reload_status()
        result["refuses"] = status["error"]
        result["plan"] = status["replay"]
        result["restored"] = (status["last_restore"] or {}).get("source")
    now = inspector._named_tensors()
    differ = [name for name in named if name not in now or _digest(now[name].untyped_storage()) != before[name]]
    result["lora"] = [name for name in differ if named[name].data_ptr() in lora]
    result["base"] = [name for name in differ if named[name].data_ptr() not in lora]
    result["unnamed"] = [storage.nbytes() for storage, digest in unnamed if _digest(storage) != digest]
    result["moved"] = len({id(p) for p in runner.model.parameters()} ^ parameters)
    result["rewrapped"] = inspector.wrapper_names() != wrappers
    return result


def _lora_storages(runner: Any) -> set[int]:
    """Storages of wrappers and punica that no loader fills."""
    from vllm.lora.layers import BaseLayerWithLoRA

    from vllm_lora_reload.tensors import tensors_of

    found: set[int] = set()
    manager = runner.lora_manager._adapter_manager
    base = {t.untyped_storage().data_ptr() for t in (*runner.model.parameters(), *runner.model.buffers())}
    owners = [m for m in runner.model.modules() if isinstance(m, BaseLayerWithLoRA)]
    for owner in (*owners, *manager.punica_wrapper_mapping.values()):
        found |= {tensor.untyped_storage().data_ptr() for _, tensor in tensors_of(owner)} - base
    return found


def exact(seen: dict[str, Any]) -> bool:
    keys = ("error", "refuses", "base", "lora", "unnamed", "moved", "rewrapped")
    return not any(seen.get(key) for key in keys)


def checkpoints(architecture: str, config: Any, folder: Path, vllm_config: Any) -> Iterator[tuple[str, Any]]:
    """Candidates for a checkpoint, best first; an error in place of the tensors where one could not be made."""
    from vllm.config import set_current_vllm_config

    spec = configs.TABLE.get(architecture, configs.Spec())
    hf: Any = transformers
    model_class = getattr(hf, spec.base or architecture, None) or getattr(hf, architecture, None)
    if spec.weights and hasattr(model_class, "_from_config"):
        try:
            # vLLM's Transformers backend replaces experts of transformers by its own.
            with tempfile.TemporaryDirectory() as saved, set_current_vllm_config(vllm_config):
                made: Any = checkpoint.from_transformers(config, model_class, Path(saved))
        except Exception as error:
            made = error
        yield "transformers", made
    with set_current_vllm_config(vllm_config):
        model = initialize(vllm_config)
        tensors = checkpoint.from_vllm(model)
    yield "vllm", tensors


MISSING = re.compile(r"'(\w+)' object has no attribute '(\w+)'")


def _constructible(architecture: str, cls: Any, spec: configs.Spec, folder: Path) -> tuple[Any, Any]:
    """Config and engine config with which the model can be constructed; what the config lacks is guessed."""
    from vllm.config import set_current_vllm_config

    guessed: dict[tuple[str, str], Any] = {}
    while True:
        try:
            with step("config"):
                config = configs.tiny_config(architecture, cls, guessed)
                config.save_pretrained(folder)
                _TOKENIZER.save_pretrained(folder)
            with step("engine config"):
                vllm_config = engine_config(folder, spec, cls)
            with step("construct"), set_current_vllm_config(vllm_config):
                initialize(vllm_config)
            return config, vllm_config
        except NotBuildable as error:
            missing = MISSING.search(str(error))
            if not missing or missing.groups() in guessed or missing[2] not in configs.GUESSES:
                raise
            guessed[missing[1], missing[2]] = configs.GUESSES[missing[2]]


def walk(architecture: str, cls: Any) -> dict[str, Any]:
    """Try one architecture. See `walk.Row` for the keys."""
    start = time.perf_counter()
    row: dict[str, Any] = dict(architecture=architecture)
    try:
        if isinstance(cls, Exception):
            raise NotBuildable("import", cls)
        row |= dict(file=cls.__module__, loads=loads_by(cls), cls=cls.__name__)
        spec = configs.TABLE.get(architecture, configs.Spec())
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config, vllm_config = _constructible(architecture, cls, spec, folder)
            errors: list[NotBuildable] = []
            with step("construct"):
                for source, tensors in checkpoints(architecture, config, folder, vllm_config):
                    try:
                        if isinstance(tensors, Exception):
                            raise NotBuildable("checkpoint", tensors)
                        checkpoint.write(folder, tensors)
                        row["ours"] = cycle(vllm_config, tensors, "ours")
                        for way in ("disk", "snapshot"):
                            row[way] = cycle(vllm_config, tensors, "ours", way)
                        row["stock"] = cycle(vllm_config, tensors, "stock")
                        if not exact(row["ours"]):
                            row["plain"] = cycle(vllm_config, tensors, "plain")
                        row["checkpoint"] = source
                        break
                    except NotBuildable as error:
                        errors.append(error)
                        if error.group != "checkpoint":
                            raise
                else:
                    raise errors[0]
            if errors:
                row["tried"] = [f"{e.group}: {e}"[:300] for e in errors]
    except NotBuildable as error:
        row |= dict(group=error.group, reason=str(error)[:400], trace=error.trace[-3000:])
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def main(command: str, out: str, *names: str) -> None:
    with open(out, "a") as sink:
        if command == "list":
            for architecture, cls in architectures():
                known = isinstance(cls, type)
                sink.write(json.dumps([architecture, cls.__module__ if known else None]) + "\n")
            return
        prepare()
        classes = dict(architectures())
        gc.freeze()
        for name in names:
            sink.write(json.dumps(walk(name, classes[name])) + "\n")
            sink.flush()
            # Collections of vLLM's own are most of the time otherwise: what lives by now is not worth a look.
            gc.collect()
            gc.freeze()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
