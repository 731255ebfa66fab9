"""The weights pool as tests see it: what is in it, its bytes, and, for the CPU, its loss.

`PoolInspector` names every tensor in the pool and digests it. On a GPU it is used as a worker extension, and the pool
is what vLLM's allocator holds under the tag ``weights``. A CPU has no sleep mode, so `PoolLossWorker` simulates it: it
records every storage allocated while the model and its LoRA wrappers load, which is what the allocator would put into
the pool. Sleep at level 2 fills them all with 0xFF, worse than the zeros often seen on a GPU, and wake-up restores what
vLLM's own worker restores: the model's buffers. Level 1 keeps everything.

    LLM(..., worker_cls="tests.support.pool.PoolLossWorker")                               # CPU
    LLM(..., worker_extension_cls="tests.support.pool.PoolExtension", enable_sleep_mode=True)  # GPU
    llm.collective_rpc("pool_digests")
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = 0xFF
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_FRESH_ALIAS = {torch.ops.aten.lift_fresh.default}  # torch.tensor(...): the result aliases an input nobody else has


class StorageRecorder(TorchDispatchMode):
    """Remembers, weakly, each storage that an operation allocates while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if func in _FRESH_ALIAS or storage._cdata not in given:
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        return out

    def alive(self) -> list[torch.UntypedStorage]:
        """The recorded storages that still exist and hold bytes, in order of allocation."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._seen.values())
        return [s for s in storages if s is not None and s.nbytes()]


class PoolInspector:
    """Methods for ``collective_rpc`` that look at one worker's weights pool and module tree."""

    model_runner: Any
    rank: int
    parallel_config: Any
    _pool_names: list[str] | None = None

    def in_pool(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def pool_digests(self) -> dict[str, str]:
        """SHA-256 of the bytes of every tensor that was in the pool at the first call, by name.

        A tensor that was since replaced by another under the same name is digested in its new place.
        """
        tensors = self._named_tensors()
        if self._pool_names is None:
            self._pool_names = [name for name, tensor in tensors.items() if self.in_pool(tensor)]
        return {name: _digest(tensors[name]) if name in tensors else "gone" for name in self._pool_names}

    def meta_tensors(self) -> list[str]:
        """Names of parameters and buffers that are left on the meta device."""
        model = self.model_runner.get_model()
        return [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]

    def wrapper_names(self) -> list[str]:
        """Where LoRA wrappers are in the module tree now, aliases included."""
        from vllm.lora.layers import BaseLayerWithLoRA

        modules = self.model_runner.get_model().named_modules(remove_duplicate=False)
        return [name for name, module in modules if isinstance(module, BaseLayerWithLoRA)]

    def logits_mapping_sizes(self) -> list[int]:
        """Length of every logits mapping (TP > 1) that exists."""
        modules = self.model_runner.get_model().modules()
        mappings = (getattr(module, "sharded_to_full_mapping_gpu", None) for module in modules)
        return [mapping.numel() for mapping in mappings if mapping is not None]

    def load_one_by_one(self, checkpoint: str) -> None:
        """Load the base weights as TRL and OpenRLHF do: ``model.load_weights`` once for every tensor."""
        from safetensors.torch import load_file

        model = self.model_runner.get_model()
        device = next(model.parameters()).device
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                model.load_weights([(name, tensor.to(device))])

    def keep_kernel_format(self, wanted: bool) -> None:
        """Remember the parameters as the running model holds them, for `reload_kernel_format`."""
        named = self.model_runner.get_model().named_parameters() if wanted else ()
        self._kernel_format = [(name, parameter.detach().to("cpu", copy=True)) for name, parameter in named]

    def reload_kernel_format(self) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(self._kernel_format), is_checkpoint_format=False)

    def take_out(self, part: str) -> None:
        """Negative control: disable one part of the package in this worker.

        Args:
            part: ``view`` (the base view), ``reset`` (the reset of LoRA state), ``mapping`` (its logits mapping) or
                ``snapshot`` (a bit of the last rank's).
        """
        from contextlib import nullcontext

        from vllm_lora_reload import session

        if part == "view":
            vars(session)["base_view"] = nullcontext
        elif part == "reset":
            self.model_runner.reset_lora_state = lambda: None
            self.model_runner.lora_reload.adapters.put_back = lambda: None  # a load would do it
        elif part == "mapping":
            for processor in self.model_runner.lora_reload.lora.logits_processors:
                processor.reset_sharded_to_full_mapping = lambda: None
        elif part == "snapshot":
            if self.rank == self.parallel_config.world_size - 1:
                file = self.model_runner.lora_reload.keeper.snapshot.file
                stat, content = file.stat(), bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
                os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        else:
            raise ValueError(part)

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors with bytes of modules and punica wrappers, one name for each storage."""
        model = self.model_runner.get_model()
        manager = getattr(model, "lora_manager", None)
        punica = manager.punica_wrapper_mapping.items() if manager is not None else ()
        owners = [*model.named_modules(), *((f"punica[{key}]", wrapper) for key, wrapper in punica)]
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for owner_name, owner in owners:
            values = {k: v for k, v in vars(owner).items() if k not in _REGISTRIES}
            values |= getattr(owner, "_parameters", {}) | getattr(owner, "_buffers", {})
            for attribute, value in values.items():
                if hasattr(value, "__dataclass_fields__"):  # punica keeps kernel metadata in one
                    value = [getattr(value, field, None) for field in value.__dataclass_fields__]
                for position, tensor in enumerate(tree_leaves(value)):
                    if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.untyped_storage().nbytes():
                        key = tensor.untyped_storage().data_ptr()
                        named.setdefault(key, (f"{owner_name}.{attribute}[{position}]", tensor))
        return dict(named.values())


def _digest(tensor: torch.Tensor) -> str:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


class PoolExtension(PoolInspector):
    """Worker extension for a GPU engine with sleep mode."""

    def in_pool(self, tensor: torch.Tensor) -> bool:
        from vllm.device_allocator.cumem import CuMemAllocator

        at = tensor.untyped_storage().data_ptr()
        held = CuMemAllocator.get_instance().pointer_to_data
        return any(start <= at < start + data.handle[1] for start, data in held.items() if data.tag == "weights")

    def drive_allocator(self, step: str) -> None:
        """As frameworks do that have ways of their own to free memory: everything is discarded, or mapped again."""
        from vllm.device_allocator.cumem import CuMemAllocator

        torch.cuda.synchronize()
        if step == "sleep":
            CuMemAllocator.get_instance().sleep(offload_tags=())
        else:
            CuMemAllocator.get_instance().wake_up(["weights"])
            CuMemAllocator.get_instance().wake_up(["kv_cache"])


class PoolLoss(PoolInspector):
    """Mixed in before a worker class that runs on the CPU, which then loses its weights pool at sleep level 2."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self.pool = StorageRecorder()
        with self.pool:
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def in_pool(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {s.data_ptr() for s in self.pool.alive()}

    def sleep(self, level: int = 1) -> None:
        if level < 2:
            return
        model = self.model_runner.get_model()
        self._sleep_saved_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for storage in self.pool.alive():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(GARBAGE)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            for name, buffer in self.model_runner.get_model().named_buffers():
                if name in self._sleep_saved_buffers:
                    buffer.data.copy_(self._sleep_saved_buffers[name])
            self._sleep_saved_buffers = {}


def __getattr__(name: str) -> Any:
    """Make `PoolLossWorker` on demand: its base class exists only where vLLM was built for the CPU."""
    if name == "PoolLossWorker":
        globals()[name] = cls = _pool_loss_worker()
        return cls
    raise AttributeError(name)


def _pool_loss_worker() -> type:
    from vllm import _custom_ops
    from vllm.v1.worker.cpu_worker import CPUWorker

    # oneDNN packs weights into memory of its own and hands out pointers in tensors: neither is so on a GPU.
    _custom_ops._supports_onednn = False

    class PoolLossWorker(PoolLoss, CPUWorker):
        """The CPU engine's worker with `PoolLoss`."""

    return PoolLossWorker
