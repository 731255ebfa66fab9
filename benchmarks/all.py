"""All benchmarks one after another, and one summary of them.

    python -m benchmarks.all [--layers 36] [--out-dir results] [--quick] [--minutes 8] [--folder DIR]

Each is a process with a time limit of its own; --minutes limits all of them together, and what no longer fits is left
out, and named. Starting engines takes longest, so those of several benchmarks start side by side; then one after
another measures, while the engines of the others idle. Of the cycle's variants the one that reloads through vLLM's
loader with this package is left out. A benchmark that fails or runs into its limit is reported with what it had
measured by then, and the rest go on. Writes summary.md into --out-dir, and beside it the JSON and plots of each. With
--quick fewer cycles, sizes and ranks. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import common

ROOT = Path(__file__).parents[1]
LEAST = 30  # seconds under which none is started
LAST = 40  # seconds that what a part has begun may take
TAIL = 1 << 16  # bytes of a log that are looked at
START = 200  # seconds after which engines that still start are waited for no longer; half of --minutes at the most


@dataclass(frozen=True)
class Part:
    """One benchmark. `module` can be in here twice, `name` not.

    Attributes:
        seconds: after which it is stopped, counted from its turn.
        told: the option by which it is told to begin nothing new some time before that; empty: it has none.
        early: its engines start before the first part's turn (`common.add_wait`).
    """

    name: str
    module: str
    seconds: float
    arguments: list[str] = field(default_factory=list)
    told: str = ""
    early: bool = False


def parts(layers: int, quick: bool, folder: str) -> list[Part]:
    """In order of interest: time may run out."""
    variants = ["--variants", "level1", "level2_stock", "level2_snapshot", "level2_replay"]
    cycles = ["--layers", str(layers), "--cycles", "3" if quick else "4", "--together", "--folder", folder, *variants]
    sizes = ["1", "4", "8"] if quick else ["1", "4", "8", "16", "32"]
    ranks = ["8", "32", "128"] if quick else ["8", "32", "128", "256"]
    files = ["--folder", folder, "--rounds", "2" if quick else "3", "--peer-gigabytes", "2", "--gigabytes", *sizes]
    pairs = ["--pairs", "40" if quick else "80", "--step-pairs", "20" if quick else "40"]
    rounds = ["--starts", "1", *pairs, "--requests", "32", "--max-tokens", "32"]
    return [
        Part("cycle", "benchmarks.cycle", 300, cycles, early=True),
        Part("digest", "benchmarks.digest", 60),
        Part("adapters-sweep", "benchmarks.adapters", 120, ["--sweep", "--ranks", *ranks]),
        Part("overhead", "benchmarks.overhead", 90, rounds, early=True),
        Part("adapters", "benchmarks.adapters", 60, ["--layers", str(layers)], early=True),
        Part("scaling", "benchmarks.scaling", 200, files, "--seconds"),  # last: it makes use of all time that is left
    ]


class Run:
    """A part that has been started. All that it prints goes to OUT.log."""

    def __init__(self, part: Part, out: Path, seconds: float) -> None:
        self._part, self._log, self._killed = part, common.beside(out, ".log"), False
        for suffix in (".md", ".json", ".png"):  # of an earlier run
            common.beside(out, suffix).unlink(missing_ok=True)
        command = [sys.executable, "-m", part.module, *part.arguments, "--out", str(out)]
        if part.told:
            command += [part.told, str(round(max(seconds - LAST, 1)))]
        if part.early:
            command.append("--wait")
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self) -> bool:
        """Whether it waits for its turn, or never will; then its engines end."""
        if self._process.poll() is not None:
            self.kill()
        return self._killed or common.READY in tail(self._log)

    def go(self, seconds: float) -> str | None:
        """It is its turn. What went wrong, if anything."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit status tells
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            self.kill()
        return f"exit status {status}: {common.last_line(tail(self._log))}" if status else None

    def kill(self) -> None:
        """Engines are processes of the same group."""
        if not self._killed:  # later another group may have the number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._killed = True


def tail(log: Path, nbytes: int = TAIL) -> str:
    """The end of what was printed."""
    with log.open("rb") as file:
        file.seek(-min(log.stat().st_size, nbytes), os.SEEK_END)
        return file.read().decode(errors="replace")


@contextmanager
def started(todo: Sequence[Part], out_dir: Path, seconds: float) -> Iterator[dict[str, Run]]:
    """Those that start early, when all of them are ready or after some time."""
    runs: dict[str, Run] = {}
    try:
        for part in todo:
            if part.early:
                runs[part.name] = Run(part, out_dir / part.name, part.seconds)
        until = time.monotonic() + seconds
        while not all(each.ready() for each in runs.values()) and time.monotonic() < until:
            time.sleep(0.2)
        yield runs
    finally:
        for each in runs.values():
            each.kill()


def shown(out: Path) -> str:
    """What it measured: OUT.md, or what it printed."""
    if (text := common.beside(out, ".md")).exists():
        return text.read_text().strip()
    log = common.beside(out, ".log")
    return tail(log, 4000).strip() if log.exists() else ""


def summary(machine: str, results: list[tuple[str, str, str]]) -> str:
    """`results`: name, what it took or why it is missing, what it measured."""
    lines = ["# Benchmarks", "", machine]
    for name, note, text in results:
        lines += ["", f"## {name}", "", note]
        if text:
            lines += ["", text]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--out-dir", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, help="where large files are made; default: a temporary folder")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="not all of them")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    common.need_gpu()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that engines end too
    deadline = time.monotonic() + args.minutes * 60
    out_dir: Path = args.out_dir.absolute()
    out_dir.mkdir(parents=True, exist_ok=True)
    results: list[tuple[str, str, str]] = []
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, ExitStack() as stack:
        machine = common.in_words(common.machine(Path(folder)))
        todo = [part for part in parts(args.layers, args.quick, folder) if not args.only or part.name in args.only]
        begun = time.monotonic()
        early = stack.enter_context(started(todo, out_dir, min(START, args.minutes * 30)))
        took = f"{time.monotonic() - begun:.0f} s: {', '.join(early) or 'none'}."
        if late := [name for name, each in early.items() if not each.ready()]:
            took += f" Not ready, so that they start while others measure: {', '.join(late)}."
        results.append(("engines that started side by side", took, ""))
        print(took, flush=True)
        for part in todo:
            left = deadline - time.monotonic()
            if left < LEAST:
                results.append((part.name, "Left out: no time was left.", ""))
                continue
            out, start, seconds = out_dir / part.name, time.monotonic(), min(part.seconds, left)
            problem = (early.get(part.name) or Run(part, out, seconds)).go(seconds)
            failed |= problem is not None
            took = f"{time.monotonic() - start:.0f} s" + (f". FAILED: {problem}" if problem else "")
            results.append((part.name, took, shown(out)))
            (out_dir / "summary.md").write_text(summary(machine, results))
            print(f"{part.name}: {took}", flush=True)
    text = summary(machine, results)
    (out_dir / "summary.md").write_text(text)
    print(f"\n{text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
