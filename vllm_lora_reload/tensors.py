"""Finding tensors: those that modules keep outside parameters and buffers, and those that an operator writes to."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

_REGISTERED = ("_parameters", "_buffers", "_modules")


def tensors_of(owner: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (attribute name, tensor) for tensors in plain attributes of `owner`.

    Looks into lists, tuples, dicts and dataclasses (punica keeps metadata in one), not into submodules.
    """
    for name, value in vars(owner).items():
        if name not in _REGISTERED:
            for tensor in _tensors_in(value):
                yield name, tensor


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if isinstance(item := getattr(value, field.name, None), torch.Tensor):
                yield item


def modules_beside(model: nn.Module) -> list[nn.Module]:
    """Modules that others hold only in plain attributes (a dict of attention layers, say), outside the module tree."""
    known = set(model.modules())
    found: list[nn.Module] = []
    owners = list(known)
    while owners:
        for name, value in vars(owners.pop()).items():
            for module in _modules_in(value) if name not in _REGISTERED else ():
                fresh = [m for m in module.modules() if m not in known]
                known.update(fresh)
                found += fresh
                owners += fresh
    return found


def _modules_in(value: object) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(item)


def tensors_behind(parameter: torch.Tensor, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in a parameter's own attributes and in plain objects there (quantization states of bitsandbytes)."""
    for value in vars(parameter).values():
        yield from _behind(value, depth)


def _behind(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or isinstance(value, (nn.Module, type)) or callable(value):
        return
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _behind(item, depth - 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _behind(item, depth - 1)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that one call of an operator writes to, as a ``TorchDispatchMode`` sees it."""
    return [
        tensor
        for position, name in _written_arguments(func)
        for tensor in tree_leaves(kwargs[name] if name in kwargs else args[position : position + 1])
        if isinstance(tensor, torch.Tensor)
    ]


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Position and name of them. Asking the schema every time would take longer than most operators."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    arguments = schema.arguments if schema is not None and schema.is_mutable else ()
    return [
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage: equal for two tensors that hold bytes exactly if they share memory."""
    return tensor.untyped_storage().data_ptr()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor, ``[bytes]``."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's storage as a flat uint8 tensor, ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _unregistered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that neither parameters nor buffers of the module tree give, with names of their own."""
    beside = modules_beside(model)
    for number, module in enumerate(beside):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield f"beside.{number}.{name}", tensor
    for name, parameter in model.named_parameters():
        for number, tensor in enumerate(tensors_behind(parameter)):
            yield f"{name}.behind.{number}", tensor
    for prefix, module in (*model.named_modules(), *((f"beside.{n}", m) for n, m in enumerate(beside))):
        helpers = ((name, getattr(module, name, None)) for name in ("quant_method", "impl", "scheme"))
        for helper, owner in (
            ("", module),
            *((name, helper) for name, helper in helpers if hasattr(helper, "__dict__")),
        ):
            for number, (name, tensor) in enumerate(tensors_of(owner)):
                yield ".".join(part for part in (prefix, helper, name, f"unregistered.{number}") if part), tensor


class Copies:
    """What tensors held, in host memory, as long as they are in use.

    Args:
        tensors: on a device; each storage that they share is copied once, as a whole.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        by_storage = {storage_key(t): t for t in tensors if not t.is_meta and t.untyped_storage().nbytes()}
        self._copies = [(weakref.ref(t), whole_storage(t).to("cpu", copy=True)) for t in by_storage.values()]

    def restore(self) -> None:
        """Copy it back, also after a tensor was moved to other memory of the same size."""
        for ref, saved in self._copies:
            tensor = ref()
            if tensor is not None and not tensor.is_meta and tensor.untyped_storage().nbytes() == len(saved):
                whole_storage(tensor).copy_(saved)


_CANARY = list(range(101, 165))


class Canary:
    """A few bytes in the weights pool that nothing writes to: whoever takes the pool's memory takes them too."""

    def __init__(self, device: torch.device) -> None:
        self._in_pool = torch.empty(64, dtype=torch.uint8, device=device)
        self.renew()

    def alive(self) -> bool:
        """Whether they are as they were. The memory must be mapped."""
        return self._in_pool.tolist() == _CANARY

    def renew(self) -> None:
        """All of the pool is right, or is known not to be."""
        self._in_pool.copy_(torch.tensor(_CANARY, dtype=torch.uint8, device="cpu"))


class UnregisteredTensors:
    """Base tensors that no loader fills and vLLM's wake-up does not restore: it saves only registered buffers.

    Layers, their quantization method or their attention backend keep them as plain attributes (attention ranges,
    decompressed MLA projections, and the like), parameters have attributes of their own, and some layers are in no
    module tree. They are copied to the host at sleep and back at wake-up.

    Args:
        model: the model, right after it was loaded: what is created later is not in the weights pool.
        device: where the model runs.
        known: storages (`storage_key`) that somebody else restores.
        more: registered parameters that need the same care, because no checkpoint has them.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, known: set[int], more: Iterable[torch.Tensor] = ()
    ) -> None:
        known = known | {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._views: dict[int, list[tuple[str, weakref.ref[torch.Tensor]]]] = {}
        for name, tensor in _unregistered(model):
            on_device = tensor.device.type == device.type and tensor.untyped_storage().nbytes() > 0
            if on_device and storage_key(tensor) not in known:
                self._views.setdefault(storage_key(tensor), []).append((name, weakref.ref(tensor)))
        for number, tensor in enumerate(more):
            self._views.setdefault(storage_key(tensor), []).append((f"unloaded.{number}", weakref.ref(tensor)))
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those still in use, under names that are the same in every engine of the same kind."""
        for views in self._views.values():
            for name, ref in views:
                if (tensor := ref()) is not None:
                    yield name, tensor

    def save(self) -> None:
        """Copy what is still in use to host memory."""
        found = {storage_key(tensor): whole_storage(tensor) for _, tensor in self.named()}
        self._saved = [(storage, storage.to("cpu", copy=True)) for storage in found.values()]

    def restore(self) -> None:
        """Copy back what `save` kept, and forget it."""
        for tensor, saved in self._saved:
            tensor.copy_(saved)
        self._saved = []
