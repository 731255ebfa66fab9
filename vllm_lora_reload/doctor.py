"""What ``vllm-lora-reload doctor`` looks at: the installation, the GPUs and the folder of snapshots.

Every check is a generator of rows. One that fails in a way that nobody thought of is a row too, and the others run.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import platform
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

from . import __version__, checksum, seams
from .checksum import digests
from .errors import SeamMissingError, SettingError, SnapshotError
from .files import Folder
from .pagecache import available_memory
from .ring import Piece, Pinned, Ring
from .settings import KEY, PREFIXES, Settings
from .snapshot import Entry, Manifest, Storage, digests_of, listed

CPU = torch.device("cpu")
_GROUP = "vllm.general_plugins"
_MEASURED = 4 << 30  # bytes of device memory that digests are timed on, at most
_SAMPLE = 16 << 20  # of these are compared with the CPU's digests
_BUS = 256 << 20  # copied to time the bus
_BLOCK = 1 << 30  # bytes of a snapshot that are verified at once
_REMOTE = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "9p", "fuse")  # file systems


@dataclass(frozen=True)
class Check:
    """A row. `detail` is one sentence: what was found and, unless all is well, what to do."""

    name: str
    status: Literal["ok", "warning", "problem"]
    detail: str


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warning(name: str, detail: str) -> Check:
    return Check(name, "warning", detail)


def problem(name: str, detail: str) -> Check:
    return Check(name, "problem", detail)


def examine(folder: Path | None, verify: bool) -> Iterator[Check]:
    """Every row, in order.

    Args:
        folder: of snapshots, or None.
        verify: whether to read all snapshots in it.
    """
    settings = _settings_or_default()
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    checks: dict[str, Callable[[], Iterable[Check]]] = {
        "releases": releases,
        "seams": all_seams,
        "plugin": plugin,
        "settings": settings_of_environment,
        "max_lora_rank": lora_ranks,
        "GPU": lambda: gpu(gpus),
        "sleep mode": lambda: sleep_mode(gpus),
        "digests": lambda: digests_on_device(gpus),
        "pinned memory": lambda: pinned_memory(gpus, settings),
        "snapshot folder": lambda: snapshot_folder(folder),
    }
    if folder is not None:
        checks["snapshot"] = lambda: snapshots(folder, settings, (gpus or [CPU])[0], verify)
        checks["leftovers"] = lambda: leftovers(folder)
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield problem(name, f"this could not be looked at: {_in_line(error)}")


def _in_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


# --- The installation ---------------------------------------------------------------------------------------------


def releases() -> Iterator[Check]:
    names = {"vllm-lora-reload": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    yield ok("releases", ", ".join(f"{name} {number}" for name, number in (names | {"vLLM": seams.release()}).items()))


def all_seams() -> Iterator[Check]:
    try:
        seams.check()
        seams.worker_class(), seams.engine_classes()
    except SeamMissingError as error:
        yield problem("seams", str(error))
    else:
        yield ok("seams", "this vLLM has everything that the package extends")


def plugin() -> Iterator[Check]:
    entries = importlib.metadata.entry_points(group=_GROUP, name=KEY)
    if not entries:
        yield problem("plugin", f"vLLM will not find it ({_GROUP} has no entry point {KEY}): pip install this package")
        return
    next(iter(entries)).load()
    given = os.environ.get("VLLM_PLUGINS")
    if given is None:
        yield ok("plugin", "installed, and selected: VLLM_PLUGINS is not set, so vLLM loads every plugin")
    elif KEY in given.split(","):  # as vLLM compares them
        yield ok("plugin", f"installed, and selected by VLLM_PLUGINS={given}")
    else:
        names = [name.strip() for name in given.split(",") if name.strip() not in ("", KEY)]
        yield problem("plugin", f"VLLM_PLUGINS={given!r} leaves it out: set VLLM_PLUGINS={','.join([*names, KEY])}")


def _settings_or_default() -> Settings:
    try:
        return Settings.of(None)
    except SettingError:
        return Settings()


def settings_of_environment() -> Iterator[Check]:
    try:
        settings = Settings.of(None)
    except SettingError as error:
        yield problem("settings", f"{error}; correct it in the environment")
        return
    changed = [
        f"{field.name}={value!r}"
        for field in fields(Settings)
        if (value := getattr(settings, field.name)) != field.default
    ]
    yield ok("settings", f"from the environment: {', '.join(changed)}" if changed else "the environment sets none")


def lora_ranks() -> Iterator[Check]:
    yield ok("max_lora_rank", f"this vLLM accepts {', '.join(map(str, seams.max_lora_ranks()))}")


# --- The GPUs -----------------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken there."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def gpu(gpus: Sequence[torch.device]) -> Iterator[Check]:
    for device in gpus:
        free, total = torch.cuda.mem_get_info(device)
        yield ok("GPU", f"{device}: {torch.cuda.get_device_name(device)}, {_size(free)} of {_size(total)} free")
    if not gpus:
        yield warning("GPU", f"no GPU: if the machine has one, torch {torch.__version__} cannot see it")


def sleep_mode(gpus: Sequence[torch.device]) -> Iterator[Check]:
    reason = seams.no_sleep_mode()
    if reason is None:
        yield ok("sleep mode", "available: start engines with enable_sleep_mode=True")
    elif gpus:
        yield problem("sleep mode", f"{reason}: install a vLLM that is built for this GPU")
    else:
        yield warning("sleep mode", f"no GPU: {reason}")


def digests_on_device(gpus: Sequence[torch.device]) -> Iterator[Check]:
    """Whether digests of device memory are those that the CPU computes, and how fast they are."""
    for device in gpus:
        nbytes = min(_MEASURED, free_memory(device) // 2) // 8 * 8
        if nbytes < 2 * _SAMPLE:
            yield warning("digests", f"{device} has no memory free to try them: stop what runs there and look again")
            continue
        words = torch.empty(nbytes // 8, dtype=torch.int64, device=device)
        memory = words.random_().view(torch.uint8)
        samples = [memory[:_SAMPLE], memory[_SAMPLE + 1 : 2 * _SAMPLE]]  # the second one at an odd address
        if digests(samples) != digests([sample.cpu() for sample in samples]):
            yield problem("digests", f"{device} computes others than the CPU: keep no snapshots here, and report it")
            continue
        speed = nbytes / _fastest(functools.partial(digests, [memory]), device) / 1e9
        if device.type == "cuda" and vars(checksum)["triton"] is None:
            yield warning("digests", f"{device}: {speed:.0f} GB/s: install Triton, with which they are much faster")
        else:
            yield ok("digests", f"{device}: {speed:.0f} GB/s, and the same as on the CPU")
    if not gpus:
        yield warning("digests", "no GPU")


def pinned_memory(gpus: Sequence[torch.device], settings: Settings) -> Iterator[Check]:
    """Whether a worker's ring gets its buffers, and how fast bytes go from such memory to the device."""
    for device in gpus:
        ring = _ring(device, settings, len(gpus))
        try:
            ring.prepare()
            taken = ring.nbytes
        except Exception as error:
            yield problem("pinned memory", f"{device}: {_in_line(error)}: set {PREFIXES[0]}RING_BYTES to less, 64M say")
            continue
        finally:
            ring.close()
        speed = bus_speed(device, min(taken, _BUS)) / 1e9
        yield ok("pinned memory", f"{device}: {_size(taken)} can be taken, {speed:.1f} GB/s from there to the GPU")
    if not gpus:
        yield warning("pinned memory", "no GPU")


def bus_speed(device: torch.device, nbytes: int) -> float:
    """Bytes a second from pinned memory to the device."""
    pinned = Pinned(nbytes, device)
    try:
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return nbytes / _fastest(functools.partial(target.copy_, pinned.memory, non_blocking=True), device)
    finally:
        pinned.close()


def _fastest(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs."""
    seconds = math.inf
    for _ in range(4):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds


def _ring(device: torch.device, settings: Settings, ranks: int = 1) -> Ring:
    return Ring(device, settings.ring_bytes, settings.ring_threads, settings.ring_chunk, settings.ring_reader, ranks)


# --- The folder of snapshots --------------------------------------------------------------------------------------


def snapshot_folder(folder: Path | None) -> Iterator[Check]:
    if folder is None:
        yield ok("snapshot folder", "none is set: after sleep(level=2) weights have to be loaded")
        return
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        direct = _writable(place)
    except OSError as error:
        yield problem("snapshot folder", f"nothing can be written to {place} ({error.strerror}): choose another one")
        return
    free, kind = shutil.disk_usage(place).free, file_system(place)
    found = f"{folder}: {kind}, {_size(free)} free, {'with' if direct else 'without'} direct reads and writes"
    needed = max((manifest.size for _, manifest in _manifests(folder) if isinstance(manifest, Manifest)), default=0)
    if kind.startswith(_REMOTE):
        yield warning("snapshot folder", f"{found}: a folder on a local disk is read faster")
    elif free < needed:
        yield warning("snapshot folder", f"{found}: free {_size(needed)}, so that a snapshot can be replaced")
    elif place != folder:
        yield warning("snapshot folder", f"{found}: it is not there yet, the first engine will make it")
    else:
        yield ok("snapshot folder", found)


def _writable(folder: Path) -> bool:
    """Whether the file system has direct reads and writes.

    Raises:
        OSError: no file can be written there.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".vllm-lora-reload-") as file:
        file.write(b"?")
        file.flush()
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
    return True


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that `folder` is on."""
    place, longest, kind = folder.resolve(), -1, "unknown file system"
    for line in mounts.read_text().splitlines():
        _, quoted, found, *_ = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), quoted)
        if place.is_relative_to(point) and len(point) >= longest:  # of two on one point, the later one hides the other
            longest, kind = len(point), found
    return kind


def _files_in(folder: Path, pattern: str) -> Iterator[Path]:
    """In the folders of models, none of which is a link."""
    for path in sorted(folder.glob(f"*/{pattern}")):
        if not path.parent.is_symlink():
            yield path


def _manifests(folder: Path) -> Iterator[tuple[Path, Manifest | SnapshotError]]:
    for path in _files_in(folder, "*.json"):
        try:
            yield path, Manifest.read(path)
        except SnapshotError as error:
            yield path, error


def snapshots(folder: Path, settings: Settings, device: torch.device, verify: bool) -> Iterator[Check]:
    """One row for each. An engine that finds fault at its start writes it anew, but there it does not read the file."""
    anew = "the next engine, or `vllm-lora-reload snapshot`, writes it anew"
    found = list(_manifests(folder))
    if not found:
        yield ok("snapshot", "none has been written yet")
    for path, manifest in found:
        if isinstance(manifest, SnapshotError):
            yield problem("snapshot", f"{manifest}: {anew}")
            continue
        engine, file = manifest.engine, path.parent / manifest.file
        what = (
            f"{path.parent.name}/{path.stem}: {engine.model}, vLLM {engine.release}, {engine.dtype.split('.')[-1]}, "
            f"{engine.quantization or 'not quantized'}, {_size(manifest.size)}"
        )
        if fault := _fault(file, manifest):
            yield problem("snapshot", f"{what}: {fault}: {anew}")
            continue
        if verify:
            try:
                wrong = damaged(file, manifest.entries, settings, device)
            except OSError as error:
                yield problem("snapshot", f"{what}: it cannot be read, {_in_line(error)}: delete {file}")
                continue
            if wrong:
                yield problem("snapshot", f"{what}: damaged, {listed(wrong)} have other bytes: delete {file}")
                continue
        if engine.release != seams.release():
            yield warning("snapshot", f"{what}: engines of vLLM {seams.release()} will not use it but write their own")
        else:
            yield ok("snapshot", f"{what}, {'every digest is right' if verify else 'not read (--verify does)'}")


def _fault(file: Path, manifest: Manifest) -> str | None:
    """What about the file is not as the manifest says, without reading it."""
    try:
        with Folder(file.parent) as folder, folder.open(file.name) as opened:
            stat = os.fstat(opened.fileno())
    except FileNotFoundError as error:
        return f"{file.name} is gone ({error.strerror})"
    except OSError as error:
        return f"{file.name} cannot be used ({error.strerror})"
    if stat.st_size != manifest.size:
        return f"{file.name} has {stat.st_size} bytes instead of {manifest.size}"
    if stat.st_mtime_ns != manifest.mtime_ns:
        return f"{file.name} was changed after it was written"
    return None


def damaged(file: Path, entries: Sequence[Entry], settings: Settings, device: torch.device) -> list[str]:
    """Names of tensors whose bytes in the file do not have the manifest's digest.

    Takes memory on `device` for twice `_BLOCK` bytes or the largest of them; where there is not so much, host memory.

    Raises:
        OSError: the file cannot be read to its end.
    """
    needed = max(_BLOCK, *(entry.nbytes for entry in entries), 0)
    ring = _ring(device if free_memory(device) > 2 * needed else CPU, settings)
    wrong: list[str] = []
    todo = deque(entries)
    with Folder(file.parent) as folder:
        opened = folder.open(file.name)
    try:
        while todo:
            some = [todo.popleft()]
            while todo and sum(entry.nbytes for entry in some) + todo[0].nbytes <= _BLOCK:
                some.append(todo.popleft())
            found = [
                Storage(torch.empty(entry.nbytes, dtype=torch.uint8, device=ring.device), {}, loaded=True)
                for entry in some
            ]
            ring.read({opened: [Piece(e.offset, storage.memory) for e, storage in zip(some, found, strict=True)]})
            current = digests_of(found)
            wrong += [entry.name for entry, digest in zip(some, current, strict=True) if digest != entry.digest]
    finally:
        opened.close()
        ring.close()
    return wrong


def leftovers(folder: Path) -> Iterator[Check]:
    """What a writer that died has left."""
    named = {path.parent / manifest.file for path, manifest in _manifests(folder) if isinstance(manifest, Manifest)}
    left = [*_files_in(folder, ".*.part"), *(file for file in _files_in(folder, "*.safetensors") if file not in named)]
    if left:
        size = sum(file.lstat().st_size for file in left)
        names = ", ".join(str(file.relative_to(folder)) for file in sorted(left)[:3])
        yield warning(
            "leftovers",
            f"{len(left)} files of {_size(size)} belong to no snapshot ({names}{', ...' if len(left) > 3 else ''}): "
            "unless an engine is writing now, delete them",
        )
    else:
        yield ok("leftovers", "none")
