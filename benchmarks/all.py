"""All benchmarks one after another, and one summary of them.

    python -m benchmarks.all [--layers 36] [--out-dir results] [--quick] [--minutes 8] [--folder DIR]

Each is a process with a time limit of its own; --minutes limits all of them together, and what no longer fits is left
out, and named. Of the cycle's variants the one that reloads through vLLM's loader with this package is left out. A
benchmark that fails or runs into its limit is reported with what it had measured by then, and the rest go on. Writes
summary.md into --out-dir, and beside it the JSON and plots of each. With --quick fewer cycles, sizes and ranks. Needs a
GPU.
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
from dataclasses import dataclass, field
from pathlib import Path

from . import common

ROOT = Path(__file__).parents[1]
LEAST = 30  # seconds under which none is started
LAST = 40  # seconds that what a part has begun may take


@dataclass(frozen=True)
class Part:
    """One benchmark. `module` can be in here twice, `name` not.

    Attributes:
        seconds: after which it is stopped.
        told: the option by which it is told to begin nothing new some time before that; empty: it has none.
    """

    name: str
    module: str
    seconds: float
    arguments: list[str] = field(default_factory=list)
    told: str = ""


def parts(layers: int, quick: bool, folder: str) -> list[Part]:
    """In order of interest: time may run out."""
    variants = ["--variants", "level1", "level2_stock", "level2_snapshot", "level2_replay"]
    cycles = ["--layers", str(layers), "--cycles", "3" if quick else "4", "--together", "--folder", folder, *variants]
    sizes = ["1", "4", "8"] if quick else ["1", "4", "8", "16"]
    ranks = ["8", "32", "128"] if quick else ["8", "32", "128", "256"]
    files = ["--folder", folder, "--rounds", "2" if quick else "3", "--gigabytes", *sizes]
    return [
        Part("cycle", "benchmarks.cycle", 300, cycles),
        Part("digest", "benchmarks.digest", 60),
        Part("adapters-sweep", "benchmarks.adapters", 120, ["--sweep", "--ranks", *ranks]),
        Part("overhead", "benchmarks.overhead", 120, ["--starts", "1", "--pairs", "6" if quick else "12"]),
        Part("scaling", "benchmarks.scaling", 130, files, "--seconds"),
        Part("adapters", "benchmarks.adapters", 120, ["--layers", str(layers)]),
    ]


def run(part: Part, out: Path, seconds: float) -> str | None:
    """What went wrong, if anything. All that it prints goes to OUT.log."""
    log = out.with_suffix(".log")
    told = [part.told, str(round(max(seconds - LAST, 1)))] if part.told else []
    command = [sys.executable, "-m", part.module, *part.arguments, *told, "--out", str(out)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:  # engines are processes of the same group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit status {status}: {common.last_line(log.read_text(errors='replace'))}" if status else None


def shown(out: Path) -> str:
    """What it measured: OUT.md, or what it printed."""
    if (text := out.with_suffix(".md")).exists():
        return text.read_text().strip()
    log = out.with_suffix(".log")
    return log.read_text(errors="replace")[-4000:].strip() if log.exists() else ""


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
    deadline = time.monotonic() + args.minutes * 60
    out_dir: Path = args.out_dir.absolute()
    out_dir.mkdir(parents=True, exist_ok=True)
    results: list[tuple[str, str, str]] = []
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        machine = common.in_words(common.machine(Path(folder)))
        for part in parts(args.layers, args.quick, folder):
            if args.only and part.name not in args.only:
                continue
            left = deadline - time.monotonic()
            if left < LEAST:
                results.append((part.name, "Left out: no time was left.", ""))
                continue
            out, start = out_dir / part.name, time.monotonic()
            for suffix in (".md", ".json", ".png"):  # of an earlier run
                out.with_suffix(suffix).unlink(missing_ok=True)
            problem = run(part, out, min(part.seconds, left))
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
