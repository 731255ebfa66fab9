"""How fast do bytes of a file reach the device, by size, number of threads, reader and page cache?

    python -m benchmarks.scaling [--gigabytes 1 4 8 16 32] [--folder DIR] [--seconds 300] [--out scaling]

Uses the package's ring without an engine, on one file of random blocks: each read is of its first bytes, into poisoned
device memory, and is compared with what was written. Beside each figure stands its share of the bus limit: 1 GiB from
pinned memory to the device, measured in the same run. `reads alone`: the same reads into buffers that go nowhere. Each
number of threads has a process of its own, as glibc is told it once. `warm`: the file is in the page cache; `cold`: it
was dropped from it before each read (a virtual disk's host may still hold it); `cached` is what the kernel said just
before the read. Then the disk's own write speed, and other loaders on one safetensors file, page cache warm, each in a
process of its own; the first of their rounds, in which they take buffers, is not counted. By default instanttensor
reads past the page cache and fastsafetensors through GPUDirect Storage, so each has a second row that does not. Cases
that do not fit into --seconds are left out, and named. Needs a GPU. Prints tables, writes OUT.json, OUT.md, and, with
matplotlib, OUT.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import common
from .common import Child, ChildError, Parent, middle, paired
from .shapes import Shape, layout

GIGABYTE = 1_000_000_000
BLOCK = 64 << 20  # bytes of the file that are alike but for their number
PIECE = 96 << 20  # about the largest weight of an 8-billion-parameter model
PAGE = 4096


# --- What is measured -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One line of the table. `threads` 0 leaves the choice to the ring."""

    series: str
    gigabytes: float
    threads: int
    reader: str
    warm: bool


def cases(sizes: Sequence[float], at: float, cores: int) -> list[Case]:
    """In order of interest: time may run out. Direct reads do not look at the page cache."""
    threads = [count for count in (1, 2, 4, 8, 16, 32) if count <= max(cores, 16)]
    cold = [size for size in sizes if size <= 8]
    return [
        *(Case("size", size, 0, "buffered", True) for size in sizes),
        *(Case("threads", at, count, "buffered", True) for count in threads),
        *(Case("size", size, 0, reader, False) for size in cold for reader in ("buffered", "direct")),
        *(Case("threads", at / 4, count, reader, False) for count in threads for reader in ("buffered", "direct")),
    ]


def cached(file: Path, nbytes: int) -> float | None:
    """Share of the first `nbytes` that is in the page cache, by a sample; None where the kernel does not tell."""
    from vllm_lora_reload import pagecache

    fd = os.open(file, os.O_RDONLY)
    try:
        return pagecache.cached(fd, 0, nbytes, 256)
    finally:
        os.close(fd)


def drop_from_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def open_direct(file: Path, flags: int) -> int | None:
    """None on a file system without direct access."""
    try:
        return os.open(file, flags | os.O_DIRECT, 0o644)
    except OSError:
        return None


def stamp(block: memoryview, number: int) -> None:
    block[:8] = number.to_bytes(8, "little")


def write(file: Path, nbytes: int, block: mmap.mmap, direct: bool) -> float | None:
    """Write numbered blocks; gigabytes per second until they are on disk. None where that is not possible."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = open_direct(file, flags) if direct else os.open(file, flags, 0o644)
    if fd is None:
        return None
    step = 16 << 20
    try:
        start = time.perf_counter()
        with memoryview(block) as view:
            for offset in range(0, nbytes, step):
                within = offset % BLOCK
                if within == 0:
                    stamp(view, offset // BLOCK)
                todo = min(step, nbytes - offset)
                while todo > 0:  # the last write of a direct file may be longer than what is asked for
                    done = min(step, nbytes - offset) - todo
                    length = -(-todo // PAGE) * PAGE if direct else todo
                    todo -= os.pwrite(fd, view[within + done : within + done + length], offset + done)
        os.fsync(fd)
        return nbytes / (time.perf_counter() - start) / GIGABYTE
    finally:
        os.close(fd)


def bus_limit(device: torch.device) -> list[float]:
    """Gigabytes per second from 1 GiB of pinned memory to the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    seconds = [common.timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(6)]
    return [len(source) / each / GIGABYTE for each in seconds[1:]]


def is_right(target: torch.Tensor, block: torch.Tensor) -> bool:
    """Whether `target` holds numbered blocks. `block` is on the same device."""
    for number, part in enumerate(target.split(BLOCK)):
        if int.from_bytes(bytes(part[:8].tolist()), "little") != number or not torch.equal(
            part[8:], block[8 : len(part)]
        ):
            return False
    return True


def reads_alone(file: Path, nbytes: int, buffers: Sequence[torch.Tensor]) -> None:
    """Read the first bytes of a file, as many buffers at a time as there are."""
    from vllm_lora_reload.reads import reads_for

    reads, fd = reads_for(len(buffers), len(buffers)), os.open(file, os.O_RDONLY)
    todo, busy = iter(range(0, nbytes, len(buffers[0]))), set[int]()
    try:
        for slot, offset in zip(range(len(buffers)), todo, strict=False):
            reads.start(slot, fd, buffers[slot], offset)
            busy.add(slot)
        while busy:
            for slot in tuple(busy):
                if reads.done(slot) is None:
                    continue
                if (offset := next(todo, -1)) < 0:
                    busy.discard(slot)
                else:
                    reads.start(slot, fd, buffers[slot], offset)
    finally:
        reads.close()
        os.close(fd)


def run_case(case: Case, file: Path, target: torch.Tensor, block: torch.Tensor, rounds: int) -> dict[str, Any]:
    from vllm_lora_reload.ring import Piece, Pinned, Ring

    nbytes = int(case.gigabytes * GIGABYTE)
    target = target[:nbytes]
    pieces = [Piece(offset, part) for offset, part in zip(range(0, nbytes, PIECE), target.split(PIECE), strict=True)]
    reader: Any = case.reader
    rounds = rounds if case.warm or case.gigabytes <= 1 else 1
    ring = Ring(target.device, threads=case.threads, reader=reader)
    measured: dict[str, Any] = asdict(case) | {"seconds": [], "alone": [], "cached": [], "exact": True}
    try:
        if case.warm:
            for _ in range(2):  # they fill the page cache; a file's second read from there is slower than later ones
                ring.read({file: pieces})
        else:
            ring.prepare()
        buffers = Pinned(ring.threads * ring.chunk, target.device) if case.warm else None
        for _ in range(rounds):
            target.fill_(0xA5)
            if not case.warm:
                drop_from_cache(file)
            measured["cached"].append(cached(file, nbytes))
            measured["seconds"].append(common.timed(lambda: ring.read({file: pieces})))
            measured["exact"] &= is_right(target, block)
            if buffers is not None:
                alone = functools.partial(reads_alone, file, nbytes, buffers.memory.split(ring.chunk))
                measured["alone"].append(common.timed(alone))
        measured |= {"threads used": ring.threads, "chunk": ring.chunk, "pinned": ring.nbytes}
        if buffers is not None:
            buffers.close()
    finally:
        ring.close()
    return measured


def run_cases(config: dict[str, Any], parent: Parent) -> None:
    """Cases with one number of threads, as the parent tells them; None ends it."""
    file, device = Path(config["file"]), torch.device(config["device"])
    with file.open("rb") as content:
        block = torch.frombuffer(bytearray(content.read(BLOCK)), dtype=torch.uint8).to(device)
    target = torch.empty(config["bytes"], dtype=torch.uint8, device=device)
    parent.tell({})
    while (case := parent.wait()) is not None:
        parent.tell(run_case(case, file, target, block, config["rounds"]))


class Cases:
    """Runs cases: in a process for each number of threads, all of which start side by side."""

    def __init__(self, todo: Sequence[Case], file: Path, rounds: int, device: torch.device) -> None:
        self._children: dict[int, Child] = {}
        for threads in sorted({case.threads for case in todo}):
            most = max(case.gigabytes for case in todo if case.threads == threads)
            config = {"file": str(file), "device": str(device), "bytes": int(most * GIGABYTE), "rounds": rounds}
            self._children[threads] = Child(run_cases, config, {}, file.with_name(f"threads-{threads}.log"))
        self._failed: dict[int, str] = {}
        for threads, child in self._children.items():  # starting takes cores, so all wait for the last
            try:
                child.receive(60)
            except ChildError as error:
                self._failed[threads] = str(error)

    def run(self, case: Case) -> dict[str, Any]:
        child, problem = self._children[case.threads], self._failed.get(case.threads)
        if problem is None:
            try:
                child.go(case)
                found: dict[str, Any] = child.receive(120)
                return found
            except ChildError as error:
                self._failed[case.threads] = problem = str(error)
        return asdict(case) | {"seconds": [], "error": problem}

    def close(self) -> None:
        for child in self._children.values():
            child.close()


# --- Other loaders, each in its own process -------------------------------------------------------------------

Loaded = dict[str, torch.Tensor]
Loader = Callable[[Path, str], AbstractContextManager[Loaded]]


@contextmanager
def load_ring(file: Path, device: str) -> Iterator[Loaded]:
    from vllm_lora_reload.ring import Piece

    tensors, pieces = {}, []
    for name, dtype, shape, offset in layout(file):
        tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        pieces.append(Piece(offset, tensors[name].view(-1).view(torch.uint8)))
    _ring(device).read({file: pieces})
    yield tensors


@functools.cache
def _ring(device: str) -> Any:
    from vllm_lora_reload.ring import Ring

    return Ring(torch.device(device))


@contextmanager
def load_safetensors(file: Path, device: str) -> Iterator[Loaded]:
    from safetensors.torch import load_file

    yield load_file(file, device=device)


@contextmanager
def load_fastsafetensors(file: Path, device: str, nogds: bool) -> Iterator[Loaded]:
    loader: Any = importlib.import_module("fastsafetensors")
    with loader.fastsafe_open([str(file)], device=device, nogds=nogds) as opened:
        yield {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@contextmanager
def load_instanttensor(file: Path, device: str, buffered: bool) -> Iterator[Loaded]:
    loader: Any = importlib.import_module("instanttensor")
    more = {"backend": loader.BackendPolicy.BUFFERED} if buffered else {}
    with loader.safe_open(str(file), framework="pt", device=device, copy=True, **more) as opened:
        yield dict(opened.tensors())


@contextmanager
def load_runai(file: Path, device: str) -> Iterator[Loaded]:
    loader: Any = importlib.import_module("runai_model_streamer")
    with loader.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(file), device=device)
        yield dict(streamer.get_tensors())


OURS = "this package"
PEERS: dict[str, tuple[str, str, Loader]] = {  # the module that it needs, the distribution, how it loads
    OURS: ("vllm_lora_reload", "vllm-lora-reload", load_ring),
    "safetensors": ("safetensors", "safetensors", load_safetensors),
    "fastsafetensors": ("fastsafetensors", "fastsafetensors", functools.partial(load_fastsafetensors, nogds=False)),
    "fastsafetensors, no GDS": (
        "fastsafetensors",
        "fastsafetensors",
        functools.partial(load_fastsafetensors, nogds=True),
    ),
    "instanttensor": ("instanttensor", "instanttensor", functools.partial(load_instanttensor, buffered=False)),
    "instanttensor, buffered": ("instanttensor", "instanttensor", functools.partial(load_instanttensor, buffered=True)),
    "runai-model-streamer": ("runai_model_streamer", "runai-model-streamer", load_runai),
}


def run_peer(config: dict[str, Any], parent: Parent) -> None:
    """Load the file several times when told to, and tell the seconds of each."""
    _, _, load = PEERS[config["peer"]]
    file, device = Path(config["file"]), config["device"]
    torch.zeros(1, device=device)
    parent.tell({})
    parent.wait()
    for _ in range(config["rounds"] + 1):
        common.sync()
        start = time.perf_counter()
        with load(file, device) as tensors:
            common.sync()
            seconds = time.perf_counter() - start
            exact = common.digests(iter(tensors.items())) == config["digests"]
        del tensors
        parent.tell({"seconds": seconds, "exact": exact})


def make_safetensors(file: Path, gigabytes: float, device: torch.device) -> dict[str, int]:
    """A file of whole layers of a Qwen3-8B; digests of its tensors."""
    from safetensors.torch import save_file

    per_layer = Shape(layers=2).nbytes - Shape(layers=1).nbytes
    shape = Shape(layers=max(1, round(gigabytes * GIGABYTE / per_layer)), vocab=0)
    generator = torch.Generator(device).manual_seed(1)
    tensors = {
        name: torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for name, size in shape.parameters().items()
        if 0 not in size
    }
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, file)
    return common.digests(iter(tensors.items()))


def version(distribution: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def run_peers(file: Path, digests: dict[str, int], rounds: int, device: torch.device) -> dict[str, Any]:
    """All start side by side and load one after another."""
    children: dict[str, Child] = {}
    measured: dict[str, Any] = {}
    try:
        for name, (module, distribution, _) in PEERS.items():
            measured[name] = {"version": version(distribution), "seconds": [], "exact": [], "error": None}
            if importlib.util.find_spec(module) is None:
                measured[name]["error"] = "not installed"
                continue
            config = {"peer": name, "file": str(file), "digests": digests, "rounds": rounds, "device": str(device)}
            children[name] = Child(run_peer, config, {}, file.with_name(f"loader-{len(children)}.log"))
        for name, child in children.items():
            try:
                child.receive(60)
                child.go()
                for _ in range(rounds + 1):
                    told = child.receive(30)
                    measured[name]["seconds"].append(told["seconds"])
                    measured[name]["exact"].append(told["exact"])
            except ChildError as error:
                measured[name]["error"] = str(error)
            child.close()
    finally:
        for child in children.values():
            child.close()
    return measured


# --- What it shows --------------------------------------------------------------------------------------------


def rates(case: dict[str, Any]) -> list[float]:
    return [case["gigabytes"] / seconds for seconds in case["seconds"]]


def case_row(case: dict[str, Any], bus: float | None) -> list[str]:
    share = [each for each in case.get("cached", []) if each is not None]
    found = rates(case)
    return [
        f"{case['gigabytes']:g}",
        case["reader"],
        "warm" if case["warm"] else "cold",
        str(case.get("threads used", case["threads"])),
        middle(found, 1),
        f"{max(found):.1f}" if found else "-",
        f"{statistics.median(found) / bus:.0%}" if found and bus else "-",
        middle([case["gigabytes"] / seconds for seconds in case.get("alone", [])], 1),
        f"{statistics.median(share):.0%}" if share else "unknown",
        "yes" if case.get("exact") and found else case.get("error") or "NO",
    ]


def peer_row(name: str, peer: dict[str, Any], gigabytes: float, bus: float | None) -> list[str]:
    counted = [gigabytes / seconds for seconds in peer["seconds"][1:]]
    exact = peer["error"] or ("yes" if peer["exact"] and all(peer["exact"]) else "NO")
    share = f"{statistics.median(counted) / bus:.0%}" if counted and bus else "-"
    return [
        name,
        peer["version"] or "-",
        middle(peer["seconds"][:1]),
        middle(peer["seconds"][1:]),
        middle(counted, 1),
        share,
        exact,
    ]


def wrong(measured: dict[str, Any]) -> list[str]:
    """This package's reads that failed or brought other bytes."""
    cases = [f"{case['gigabytes']:g} GB {case['reader']}" for case in measured["cases"] if not case.get("exact")]
    ours = measured.get("peers", {}).get(OURS)
    return cases + ([OURS] if ours and (ours["error"] or not all(ours["exact"])) else [])


def ratios(measured: dict[str, Any]) -> list[dict[str, Any]]:
    peers = measured.get("peers", {})
    ours = peers.get(OURS, {}).get("seconds", [])[1:]
    found = [
        paired(f"{name} / {OURS}, seconds for the same file", peer["seconds"][1:], ours)
        for name, peer in peers.items()
        if name != OURS
    ]
    return found or [paired(f"safetensors / {OURS}, seconds for the same file", [], [])]


def render(measured: dict[str, Any]) -> str:
    bus = statistics.median(measured["bus"]) if measured.get("bus") else None
    header = ["GB", "reader", "page cache", "threads", "GB/s", "best", "of the bus", "reads alone", "cached", "exact"]
    lines = [
        common.in_words(measured["machine"]),
        f"bus, pinned memory to device: {middle(measured.get('bus', []), 1)} GB/s",
    ]
    for name, rate in measured.get("write", {}).items():
        lines.append(f"disk, write {name}: {'not possible' if rate is None else f'{rate:.2f} GB/s'}")
    for series, title in (("size", "By size"), ("threads", "By number of threads")):
        if rows := [case_row(case, bus) for case in measured["cases"] if case["series"] == series]:
            lines += ["", f"{title}, medians:", "", common.table(header, rows)]
    if measured.get("left out"):
        lines += ["", f"Left out: {'; '.join(measured['left out'])}"]
    if peers := measured.get("peers"):
        size = measured["peer bytes"] / GIGABYTE
        head = ["loader", "version", "first s", "s", "GB/s", "of the bus", "exact"]
        rows = [peer_row(name, peer, size, bus) for name, peer in peers.items()]
        lines += ["", f"One safetensors file of {size:.1f} GB, page cache warm:", "", common.table(head, rows)]
    return "\n".join([*lines, "", *(common.ratio_line(ratio) for ratio in ratios(measured))])


def draw(measured: dict[str, Any], panels: Sequence[Any]) -> None:
    bus = statistics.median(measured["bus"]) if measured.get("bus") else None
    for axes, series, key in zip(panels, ("size", "threads"), ("gigabytes", "threads"), strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in measured["cases"]:
            if case["series"] == series and case["seconds"]:
                name = f"{case['reader']}, {'warm' if case['warm'] else 'cold'}"
                lines.setdefault(name, []).append((case[key], statistics.median(rates(case))))
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        if bus:
            axes.axhline(bus, linestyle="--", color="gray", label="bus limit")
        places = sorted({place for points in lines.values() for place, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        title = "File to device, by size" if series == "size" else "File to device, by number of threads"
        axes.set(xlabel="GB" if series == "size" else "threads", ylabel="GB/s", ylim=(0, None), title=title)
        axes.legend()


def measure(args: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    deadline = time.monotonic() + args.seconds
    measured: dict[str, Any] = {
        "machine": common.machine(folder), "cases": [], "left out": [], "bus": bus_limit(device), "write": {}
    }  # fmt: skip
    file = folder / "scaling.bin"
    with mmap.mmap(-1, BLOCK) as memory:
        with memoryview(memory) as view:
            view[:] = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8).numpy().data
        trial = int(min(2, max(args.gigabytes)) * GIGABYTE)
        for name, direct in (("O_DIRECT, 16 MiB blocks", True), ("buffered, with fsync", False)):
            measured["write"][name] = write(file, trial, memory, direct)
        best = max(rate for rate in measured["write"].values() if rate)
        direct = best == measured["write"]["O_DIRECT, 16 MiB blocks"]
        room = min(shutil.disk_usage(folder).free * 0.95 / GIGABYTE, best * args.seconds * 0.4)
        sizes = [size for size in args.gigabytes if size <= room]
        measured["left out"] += [
            f"{size:g} GB: no time or no room to write it" for size in args.gigabytes if size > room
        ]
        if not sizes:
            raise SystemExit(f"there is room for {room:.1f} GB only")
        write(file, int(max(sizes) * GIGABYTE), memory, direct)
    at = args.threads_at if args.threads_at <= max(sizes) else max(sizes)
    todo = cases(sizes, at, len(os.sched_getaffinity(0)))
    peers_after = sum(case.warm for case in todo)  # cold cases are the first to go without
    runner = Cases(todo, file, args.rounds, device)
    try:
        for number, case in enumerate(todo):
            if number == peers_after:
                add_peers(args, folder, device, measured, deadline)
            if time.monotonic() > deadline:
                cache = "warm" if case.warm else "cold"
                threads = case.threads or "auto"
                measured["left out"].append(f"{case.gigabytes:g} GB {case.reader} {cache}, {threads} threads")
                continue
            measured["cases"].append(runner.run(case))
            common.save(args.out, measured, render(measured))
    finally:
        runner.close()
    file.unlink()
    return measured


def add_peers(
    args: argparse.Namespace, folder: Path, device: torch.device, measured: dict[str, Any], deadline: float
) -> None:
    if not args.peer_gigabytes or time.monotonic() > deadline:
        measured["left out"].append("other loaders")
        return
    torch.cuda.empty_cache()
    file = folder / "scaling.safetensors"
    try:
        digests = make_safetensors(file, args.peer_gigabytes, device)
        torch.cuda.empty_cache()
        measured["peer bytes"] = file.stat().st_size
        measured["peers"] = run_peers(file, digests, args.rounds, device)
    finally:
        file.unlink(missing_ok=True)
    common.save(args.out, measured, render(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--threads-at", type=float, default=4, help="gigabytes at which threads are varied")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-gigabytes", type=float, default=4, help="size of the file for other loaders; 0: none")
    parser.add_argument("--folder", type=Path, help="where files are made; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=300, help="cases that would start later are left out")
    parser.add_argument("--out", type=Path, default=Path("scaling"))
    args = parser.parse_args()
    common.need_gpu()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measured = measure(args, Path(folder), torch.device("cuda", 0))
    measured["ratios"] = ratios(measured)
    text = render(measured)
    common.save(args.out, measured, text)
    print(text)
    common.plot(args.out, lambda figure, panels: draw(measured, panels), panels=2)
    if names := wrong(measured):
        sys.exit(f"failed, or brought other bytes: {', '.join(names)}")


if __name__ == "__main__":
    main()
