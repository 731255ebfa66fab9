"""How fast are digests of a model's weights? Beside the sum of the same memory, which shows how fast memory is read.

    python -m benchmarks.digest [--gigabytes 16.4] [--runs 20] [--out digest]

About 400 tensors with the shapes of an 8B model's, scaled to the given size. Each run measures both, one right after
the other; which one goes first alternates. Measured twice: by the device's own clock (kernels and copies, and gaps
while the device waits for Python), and by the wall clock, until results are on the host. Without a GPU it measures the
CPU, with 0.2 GB unless told otherwise. Prints a table, writes OUT.json, OUT.md, and OUT.png with matplotlib.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_lora_reload.checksum import digests

from . import common
from .common import middle, paired, ratio_line

HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
KINDS = ("digests", "sum")
CLOCKS = ("device", "wall")


def shapes() -> list[tuple[int, ...]]:
    """As in a checkpoint: projections are not fused. 16.06 GB in bfloat16."""
    layer: list[tuple[int, ...]] = [(HIDDEN, HIDDEN), (KEY_VALUE, HIDDEN), (KEY_VALUE, HIDDEN), (HIDDEN, HIDDEN)]
    layer += [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (HIDDEN,), (HIDDEN,)]
    layer += [(HIDDEN,), (KEY_VALUE,), (KEY_VALUE,)]  # biases
    return [(VOCABULARY, HIDDEN), *layer * LAYERS, (HIDDEN,), (VOCABULARY, HIDDEN)]


def model(gigabytes: float, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """bfloat16 tensors, their rows scaled to `gigabytes`, and the memory they lie in one after the other, as int64."""
    scale = gigabytes * 1e9 / sum(2 * torch.Size(shape).numel() for shape in shapes())
    scaled = [torch.Size((max(1, round(rows * scale)) if rest else rows, *rest)) for rows, *rest in shapes()]
    memory = torch.empty(sum(shape.numel() for shape in scaled) // 4, dtype=torch.int64, device=device).random_()
    parts = memory.view(torch.bfloat16).split([shape.numel() for shape in scaled])
    return [part.view(shape) for part, shape in zip(parts, scaled, strict=True)], memory


def measure(work: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds, by both clocks; without a GPU they are the same."""
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return dict.fromkeys(CLOCKS, (time.perf_counter() - begin) * 1e3)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return {"wall": (time.perf_counter() - begin) * 1e3, "device": first.elapsed_time(last)}


def times(measured: dict[str, Any], kind: str, clock: str) -> list[float]:
    return [run[kind][clock] for run in measured["runs"]]


def ratios(measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        paired(
            f"sum / digests, ms of the {clock} clock", times(measured, "sum", clock), times(measured, "digests", clock)
        )
        for clock in CLOCKS
    ]


def render(measured: dict[str, Any]) -> str:
    size = measured["bytes"]
    rows = []
    for kind in KINDS:
        for clock in CLOCKS:
            found = times(measured, kind, clock)
            rows.append([kind, clock, middle(found, 2), middle([size / ms / 1e9 for ms in found])])
    return "\n".join(
        [
            common.in_words(measured["machine"]),
            f"{measured['tensors']} tensors, {size / 1e9:.2f} GB, medians of {len(measured['runs'])} runs",
            "",
            common.table(["", "clock", "ms", "TB/s"], rows),
            "",
            *map(ratio_line, ratios(measured)),
        ]
    )


def draw(measured: dict[str, Any], panels: Sequence[Any]) -> None:
    size, axes = measured["bytes"], panels[0]
    for kind, mark in zip(KINDS, "ox", strict=True):
        for clock, fill in zip(CLOCKS, ("full", "none"), strict=True):
            rates = [size / ms / 1e9 for ms in times(measured, kind, clock)]
            axes.plot(rates, mark, fillstyle=fill, label=f"{kind}, {clock} clock")
    axes.set(xlabel="run", ylabel="TB/s", ylim=(0, None), title=f"Reading {size / 1e9:.1f} GB of weights")
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--gigabytes", type=float, default=16.4 if device == "cuda" else 0.2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("digest"))
    args = parser.parse_args()
    tensors, memory = model(args.gigabytes, device)
    work: dict[str, Callable[[], object]] = {"digests": lambda: digests(tensors), "sum": lambda: memory.sum().item()}
    for kind in KINDS * 2:
        work[kind]()  # compiles, and warms up
    measured: dict[str, Any] = {
        "machine": common.machine(args.out.absolute().parent),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "tensors": len(tensors),
        "runs": [],
    }
    for number in range(args.runs):
        turn = KINDS if number % 2 == 0 else KINDS[::-1]
        measured["runs"].append({kind: measure(work[kind], device) for kind in turn})
    measured["ratios"] = ratios(measured)
    text = render(measured)
    common.save(args.out, measured, text)
    print(text)
    common.plot(args.out, lambda _, panels: draw(measured, panels))


if __name__ == "__main__":
    main()
