"""Which base tensors a load has yet to write after level 2 took them.

What loaders return says little (some models return nothing, fused layers name a parameter after its first shard), so
writes are watched instead: a parameter is there again once as many distinct bytes of its storage were written as the
first load wrote at start-up. Parameters that the first load did not write (default scales and the like) are not waited
for; nobody reloads them, so they are kept on the host over the sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .tensors import storage_key

Region = tuple[object, ...]  # offset, shape, strides


class WriteRecorder(TorchDispatchMode):
    """Notes which regions of the watched storages are written while the mode is on.

    Args:
        watched: storages, by `storage_key`. They must stay alive, so that their addresses are theirs alone.
    """

    def __init__(self, watched: Iterable[int]) -> None:
        super().__init__()
        self._regions: dict[int, dict[Region, int]] = {key: {} for key in watched}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tree_leaves(given.get(argument.name)):
                        self._note(tensor)
        return out

    def _note(self, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and (key := storage_key(tensor)) in self._regions:
            region = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            self._regions[key][region] = tensor.numel() * tensor.element_size()

    def written(self, key: int) -> int:
        """Bytes written to the storage so far, a region that was written twice counted once."""
        return sum(self._regions[key].values())


class FirstLoad:
    """The load at start-up: the reference for what a load writes.

    Args:
        model: the model, built but not yet loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        parameters = [(module, p) for module in model.modules() for p in module.parameters(recurse=False)]
        # Online quantization builds parameters on the meta device and makes them real while it loads.
        self.modules = {id(module) for module, p in parameters if p.is_meta}
        self._owners = [(module, storage_key(p)) for module, p in parameters if not p.is_meta]
        self._recorder = WriteRecorder(key for _, key in self._owners)
        self.written: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._recorder:
            yield
        self.written = {key: size for _, key in self._owners if (size := self._recorder.written(key))}
        self.modules |= {id(module) for module, key in self._owners if key in self.written}

    @property
    def known(self) -> bool:
        """Whether anything was seen; not so with dummy weights, or a loader that writes on its own."""
        return bool(self.modules)


class Coverage:
    """Base tensors of one model that are still missing.

    Args:
        model: the model as it runs, without LoRA wrappers in its tree (inside the base view).
        first: the reference, or None where the start-up load could not be watched. Then single tensors are not
            followed, and a load that succeeds counts as complete.

    Attributes:
        unloaded: parameters that the first load did not write.
    """

    def __init__(self, model: nn.Module, first: FirstLoad | None) -> None:
        self._model = model
        self._needed: dict[int, tuple[str, int]] = {}
        self.unloaded: list[torch.Tensor] = []
        if first is not None and first.known:
            for prefix, module in model.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if key := storage_key(parameter):
                        self._add(f"{prefix}.{name}" if prefix else name, key, parameter, id(module), first)
        self._missing: dict[int, tuple[str, int]] = {}
        self._recorder: WriteRecorder | None = None

    def _add(self, name: str, key: int, parameter: torch.Tensor, module: int, first: FirstLoad) -> None:
        if key in first.written:
            self._needed.setdefault(key, (name, first.written[key]))
        elif module in first.modules:  # made from what was loaded: a reload writes all of it
            self._needed.setdefault(key, (name, parameter.numel() * parameter.element_size()))
        else:
            self.unloaded.append(parameter)

    @property
    def total(self) -> int:
        return len(self._needed)

    def lose(self) -> None:
        """Count every tensor that a load brings as missing."""
        self._missing = dict(self._needed)
        self._recorder = WriteRecorder(self._missing) if self._missing else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch a load. While nothing is missing, this does nothing."""
        if self._recorder is None:
            yield
            return
        with self._recorder:
            yield
        in_use = {storage_key(parameter) for parameter in self._model.parameters()}
        self._missing = {
            key: (name, needed)
            for key, (name, needed) in self._missing.items()
            if key in in_use and self._recorder.written(key) < needed
        }
        if not self._missing:
            self._recorder = None

    def missing(self) -> list[str]:
        """Names, as without LoRA, of tensors that no load has written since they were lost."""
        return [name for name, _ in self._missing.values()]
