"""Which base tensors a load has yet to write after level 2 took them.

What loaders return says little (some models return nothing, fused layers name a parameter after its first shard), so
writes are watched instead: a parameter is there again once as many distinct bytes of its storage were written as the
first load wrote at start-up. A constant that fills memory is no load. Parameters that the first load did not write
(default scales and the like) are not waited for; nobody reloads them, so they are kept on the host over the sleep.

Where the first load could not be watched, since the weights were made up (``load_format="dummy"``) or a loader wrote
them on its own, nobody knows what a load leaves out. Then every byte of every parameter is waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from . import seams
from .extent import Extent
from .tensors import written_by

Region = tuple[object, ...]


def region(offset: int, shape: Iterable[int], strides: Iterable[int]) -> Region:
    """Which elements of its storage a tensor is: the same for every view of the same ones in the same order."""
    dims: list[tuple[int, int]] = []  # size and stride, from the outermost
    for size, stride in zip(shape, strides, strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size != 1:
            dims.append((size, stride))
    return offset, *dims


def identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


class Identities:
    """Numbers for storages that stay theirs alone while this lives, also after a storage is freed.

    Addresses of their memory would not do: a tensor that quantization makes can lie where one that it replaced was.
    """

    def __init__(self) -> None:
        self._refs: dict[int, StorageWeakRef] = {}

    def of(self, tensor: torch.Tensor) -> int:
        self._refs[identity(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return identity(tensor)


_FILLS = ("fill_", "zero_", "masked_fill_", "index_fill_", "_foreach_zero_")


class WriteRecorder(TorchDispatchMode):
    """Notes which bytes of the watched storages are written while the mode is on.

    Args:
        watched: by `Identities.of`, which must be kept as long as this.
        fills: whether constants count: always; never, but for single elements, which loaders also fill with a number
            that they were given; or, as None, only after something was copied to the same storage, as loaders zero
            what they have not loaded.

    Attributes:
        written_to: all storages that were written to, watched or not.
    """

    def __init__(self, watched: Iterable[int], fills: bool | None = False) -> None:
        super().__init__()
        self._regions: dict[int, Extent] = {key: Extent() for key in watched}
        self._fills = fills
        self._copied_to: set[int] = set()
        self._identities = Identities()
        self._sources: set[int] = set()
        self.written_to: set[int] = set()

    def source(self, tensor: torch.Tensor) -> None:
        """A copy of `tensor`, which holds unset memory, counts only as far as something was written to it before."""
        key = self._identities.of(tensor)
        self._sources.add(key)
        self._regions[key] = Extent()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs):
            self.note_write(func, tensor, args)
        return out

    def note_write(self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        """Count what an operator has written."""
        self.written_to.add(key := identity(tensor))
        if key not in self._regions:
            return
        if not _is_fill(func) or _is_given(args):
            self._copied_to.add(key)
        elif not (tensor.numel() == 1 or self._fills or (self._fills is None and key in self._copied_to)):
            return
        self.note(tensor, args[1] if func is torch.ops.aten.copy_.default else None)

    def note(self, tensor: torch.Tensor, copied: object = None) -> None:
        """Count a tensor as written, if its storage is watched."""
        if not tensor.is_meta and (key := identity(tensor)) in self._regions:
            most = None
            if isinstance(copied, torch.Tensor) and not copied.is_meta and (of := identity(copied)) in self._sources:
                most = self.written(of)
            self._regions[key].add(tensor, most)

    def written(self, key: int) -> int:
        """Distinct bytes of the storage that were written so far; see `Extent`."""
        return self._regions[key].size

    def forget(self, keys: Iterable[int]) -> None:
        """Watch these storages from now on as if nothing had been written to them."""
        self._regions.update({key: Extent() for key in keys})
        self._copied_to.difference_update(keys)

    def for_processing(self) -> WriteRecorder:
        """A recorder of the same storages for the step after the load, in which constants count."""
        return WriteRecorder(self._regions, fills=True)


@functools.cache
def _is_fill(func: Any) -> bool:
    return getattr(func, "_schema", None) is not None and func._schema.name.removeprefix("aten::") in _FILLS


def _is_given(args: tuple[Any, ...]) -> bool:
    """Whether memory is filled with a tensor's number, which a loader may have been given; zero is a constant."""
    value = args[-1] if len(args) > 1 else None
    return isinstance(value, torch.Tensor) and (value.device.type != "cpu" or bool(value != 0))


class Touched(TorchDispatchMode):
    """Notes only which storages are written to.

    Args:
        written_to: is given them.
    """

    def __init__(self, written_to: set[int]) -> None:
        super().__init__()
        self.written_to = written_to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.written_to.update(identity(tensor) for tensor in written_by(func, args, kwargs or {}))
        return out


class FirstLoad:
    """The load at start-up: the reference for what a load writes.

    Args:
        model: the model, built but not yet loaded.
        recorder: watches the load.

    Attributes:
        model: as given.
        owners: module, name and storage of every tensor that was there before the load.
        identities: of these storages.
        loaded_by: what watched the load.
        processed_by: what watched the processing after it, or None before that.
        modules: modules with a tensor of their own that the load wrote or made.
        written: bytes that the load wrote, by storage.
        brought: the same by module and name.
        built: storages that were there before the load.
        processed: those of them that the load did not write but the processing after it did.
        as_loaded: those that the load wrote and nothing has changed since.
    """

    def __init__(self, model: nn.Module, recorder: Callable[[set[int]], WriteRecorder] = WriteRecorder) -> None:
        self.model = model
        tensors = [
            (module, name, tensor)
            for module in model.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        # Online quantization builds parameters on the meta device and makes them real while it loads.
        self.unbuilt = [(module, name, tensor.nbytes) for module, name, tensor in tensors if tensor.is_meta]
        self.modules = {module for module, _, _ in self.unbuilt}
        self.identities = Identities()
        self.owners = [
            (module, name, self.identities.of(tensor)) for module, name, tensor in tensors if not tensor.is_meta
        ]
        self.built = {key for _, _, key in self.owners}
        self.loaded_by = recorder(self.built)
        self.processed_by: WriteRecorder | None = None
        self.written: dict[int, int] = {}
        self.brought: dict[nn.Module, dict[str, int]] = {}
        self.processed: set[int] = set()
        self.as_loaded: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self.loaded_by:
            yield
        self.written = {key: size for key in self.built if (size := self.loaded_by.written(key))}
        for module, name, key in self.owners:
            if key in self.written:
                self.modules.add(module)
                self.brought.setdefault(module, {})[name] = self.written[key]
        for module, name, nbytes in self.unbuilt:
            self.brought.setdefault(module, {})[name] = nbytes

    @contextmanager
    def processing(self) -> Iterator[None]:
        """The step after the load in which vLLM quantizes, repacks and derives."""
        self.processed_by = recorder = self.loaded_by.for_processing()
        with recorder:
            yield
        written = {key for key in self.built if recorder.written(key)}
        self.processed = written - self.written.keys()
        self.as_loaded = self.written.keys() - written

    def never_derived(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor holds what its layer was built with or what was loaded into it."""
        return (key := identity(tensor)) in self.built and key not in self.processed

    def never_wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor holds what its layer was built with."""
        return self.never_derived(tensor) and identity(tensor) not in self.written

    @property
    def known(self) -> bool:
        """Whether anything was seen; not so with dummy weights, or a loader that writes on its own."""
        return bool(self.written)


class Coverage:
    """Base tensors of one model that are still missing.

    Args:
        model: the model as it runs, without LoRA wrappers in its tree (inside the base view).
        first: the reference, or None where the start-up load could not be watched.

    Attributes:
        unloaded: parameters that the first load did not write.
        guessed: whether there is no reference, so that all parameters are waited for.
    """

    def __init__(self, model: nn.Module, first: FirstLoad | None) -> None:
        self._model = model
        self._identities = Identities()
        self._needed: dict[int, tuple[str, int]] = {}
        self._lasting: dict[nn.Module, list[str]] = {}
        self.guessed = first is None or not first.known
        self._brought = first.brought if first is not None else {}
        self._keys: dict[nn.Module, list[int]] = {}  # of what is needed, by module
        self._made: dict[nn.Module, list[tuple[torch.Tensor, int]]] = {}
        self._short: set[nn.Module] = set()
        self.unloaded: list[torch.Tensor] = []
        self._loaded_buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
            if first is None or not first.known or identity(buffer) in first.written
        ]
        if self.guessed:
            self._need_all()
        elif first is not None:
            for prefix, module in model.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if not parameter.is_meta and parameter.untyped_storage().nbytes():
                        self._add(f"{prefix}.{name}" if prefix else name, parameter, module, first)
                if module in first.modules:
                    self._lasting[module] = [
                        *(n for n, p in module._parameters.items() if p is not None and first.never_wrote(p)),
                        *(n for n, b in module._buffers.items() if b is not None and first.never_derived(b)),
                    ]
        self._as_loaded = self._needed.keys() & (first.as_loaded if first is not None else set())
        self._written_to: set[int] = set()
        self._tree = self._identities_by_place()
        self._missing: dict[int, tuple[str, int]] = {}
        self._recorder: WriteRecorder | None = None
        self._active: WriteRecorder | None = None

    def _need_all(self) -> None:
        extents: dict[int, Extent] = {}
        for name, parameter in self._model.named_parameters():
            if not parameter.is_meta and parameter.untyped_storage().nbytes():
                key = self._identities.of(parameter)
                extents.setdefault(key, Extent()).add(parameter)
                self._needed[key] = (self._needed.get(key, (name, 0))[0], extents[key].size)
        for module in self._model.modules():
            self._keys[module] = [identity(p) for p in module._parameters.values() if p is not None]

    def _add(self, name: str, parameter: torch.Tensor, module: nn.Module, first: FirstLoad) -> None:
        key = self._identities.of(parameter)
        self._keys.setdefault(module, []).append(key)
        if key in first.written:
            # No more than there is: loaders may fill the whole before they write its parts.
            self._needed.setdefault(key, (name, min(first.written[key], parameter.untyped_storage().nbytes())))
        elif module in first.modules and not first.never_wrote(parameter):
            # Made from what was loaded: a reload writes all of it.
            self._needed.setdefault(key, (name, parameter.numel() * parameter.element_size()))
        else:
            self.unloaded.append(parameter)

    def loaded_buffers(self) -> list[torch.Tensor]:
        """Buffers that a load brings, as they are now."""
        found = (module._buffers.get(name) for module, name in self._loaded_buffers)
        return [buffer for buffer in found if buffer is not None]

    def carry_over(self, layer: nn.Module, running: Mapping[str, torch.Tensor]) -> None:
        """Give `layer`, which a reload has just made anew, what no load writes.

        vLLM's layerwise reload allocates every tensor of a layer that it loads, and at its end copies all of them over
        the running ones. Loaded buffers are given their values too: it drops what a load brings for some of them
        (statistics of batch norms).

        Args:
            layer: its tensors hold unset memory.
            running: its running tensors by name.
        """
        made = self._made[layer] = []
        brought = self._brought.get(layer, {})
        if self.guessed:
            new_parameters = {name: p for name, p in layer._parameters.items() if p is not None and not p.is_meta}
            brought = {name: p.untyped_storage().nbytes() for name, p in new_parameters.items()}
        for name, size in brought.items():
            new, old = getattr(layer, name, None), running.get(name)
            if self._active is None or not isinstance(new, torch.Tensor) or new is old or new.is_meta:
                continue
            self._active.source(new)
            made.append((new, size))
            if self._recorder is None and old is not None and self._is_as_loaded(old, new):
                # Nothing was lost: what the load leaves out, say one shard of a fused layer, keeps its value.
                new.data.copy_(old)
        for name in self._lasting.get(layer, ()):
            # vLLM leaves out buffers that are views of parameters until it puts the running tensors back.
            if (new := getattr(layer, name, None)) is not None and new is not running[name]:
                new.data.copy_(running[name])
        # Repacking writes to the same tensors, so what the load has brought is to be seen before it.
        seams.before_processing(layer, self._judge)

    def _is_as_loaded(self, running: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether a running tensor is what a load would write into `new`, not changed since."""
        alike = (running.shape, running.stride(), running.dtype) == (new.shape, new.stride(), new.dtype)
        return alike and self.is_as_loaded(running)

    def is_as_loaded(self, running: torch.Tensor) -> bool:
        """Whether a running tensor is one that the first load wrote and nothing has changed since."""
        return identity(running) in self._as_loaded

    def _judge(self, layer: nn.Module) -> None:
        """Note whether a load has brought less of a layer that was made anew than the first load did."""
        for new, size in self._made.pop(layer, ()):
            if self._active is not None and self._active.written(identity(new)) < min(
                size, new.untyped_storage().nbytes()
            ):
                self._short.add(layer)

    @property
    def total(self) -> int:
        return len(self._needed)

    @property
    def needed(self) -> dict[int, str]:
        """Names of the tensors that a load has to bring, by storage."""
        return {key: name for key, (name, _) in self._needed.items()}

    def lose(self) -> None:
        """Count every tensor that a load brings as missing."""
        self._missing = dict(self._needed)
        self._recorder = WriteRecorder(self._missing, self._fills) if self._missing else None

    @property
    def _fills(self) -> bool | None:
        # Padding, which is a part of what is waited for if there is no reference, is filled once the rest is loaded.
        return None if self.guessed else False

    @contextmanager
    def recording(self, anew: bool = False, counts: bool = True) -> Iterator[None]:
        """Watch a load.

        Args:
            anew: whether the load may make layers anew.
            counts: whether what is written is loaded by that.
        """
        if not counts or (self._recorder is None and not anew):
            with Touched(self._written_to):
                yield
            return
        self._made.clear()
        self._short.clear()
        self._active = active = self._recorder or WriteRecorder((), self._fills)
        active.written_to = self._written_to
        try:
            with active:
                yield
            for layer in list(self._made):
                self._judge(layer)
            self._count(active)
        finally:
            self._active = None

    def _identities_by_place(self) -> dict[tuple[int, str], int]:
        return {
            (id(module), name): identity(tensor)
            for module in self._model.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and not tensor.is_meta
        }

    def begin(self) -> None:
        """A load of one or several `recording` blocks begins."""
        self._written_to.clear()

    def touched(self) -> bool:
        """Whether a tensor of the model was written to or replaced since `begin`. No layer may be taken apart now."""
        before, self._tree = self._tree, self._identities_by_place()
        return before != self._tree or not self._written_to.isdisjoint(self._tree.values())

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """In a `recording` block: threads of ours, which nothing watches, have written these."""
        for tensor in tensors:
            self._written_to.add(identity(tensor))
            if self._active is not None:
                self._active.note(tensor)

    def _count(self, recorder: WriteRecorder) -> None:
        short = {key for layer in self._short for key in self._keys.get(layer, ()) if key in self._needed}
        recorder.forget(short)
        self._missing |= {key: self._needed[key] for key in short}
        parameters = list(self._model.parameters())
        # Between the chunks of a layerwise load, what it has not reached is on the meta device, and not gone.
        in_use = None if any(p.is_meta for p in parameters) else {identity(p) for p in parameters}
        self._missing = {
            key: (name, needed)
            for key, (name, needed) in self._missing.items()
            if (in_use is None or key in in_use) and recorder.written(key) < needed
        }
        self._recorder = recorder if self._missing else None

    def missing(self) -> list[str]:
        """Names, as without LoRA, of tensors that no load has written since they were lost."""
        return [name for name, _ in self._missing.values()]

    def all_there(self) -> None:
        """Something other than a load has brought every tensor back."""
        self._missing, self._recorder = {}, None
