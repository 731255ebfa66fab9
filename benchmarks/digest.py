"""How fast are digests of a model's weights? Beside the sum of the same memory, which shows how fast memory is read.

    python -m benchmarks.digest [--gigabytes 16.4] [--runs 20] [--out digest]

About 400 tensors with the shapes of an 8B model's, scaled to the given size. Each run measures both, one right after
the other; which one goes first alternates. Measured twice: by the device's own clock (kernels and copies, and gaps
while the device waits for Python), and by the wall clock, until results are on the host. Prints a table, writes
OUT.json, and OUT.png where there is matplotlib. Without a GPU it measures the CPU, with 0.2 GB unless told otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_lora_reload.checksum import digests

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


def plot(runs: list[dict[str, dict[str, float]]], size: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for kind, mark in zip(KINDS, "ox", strict=True):
        for clock, fill in zip(CLOCKS, ("full", "none"), strict=True):
            rates = [size / run[kind][clock] / 1e9 for run in runs]
            axes.plot(rates, mark, fillstyle=fill, label=f"{kind}, {clock} clock")
    axes.set(xlabel="run", ylabel="TB/s", ylim=(0, None), title=f"Reading {size / 1e9:.1f} GB of weights")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--gigabytes", type=float, default=16.4 if device == "cuda" else 0.2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("digest"))
    args = parser.parse_args()
    tensors, memory = model(args.gigabytes, device)
    size = sum(tensor.nbytes for tensor in tensors)
    work: dict[str, Callable[[], object]] = {"digests": lambda: digests(tensors), "sum": lambda: memory.sum().item()}
    for kind in KINDS * 2:
        work[kind]()  # compiles, and warms up
    runs = []
    for number in range(args.runs):
        runs.append({kind: measure(work[kind], device) for kind in (KINDS if number % 2 == 0 else KINDS[::-1])})

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}: {len(tensors)} tensors, {size / 1e9:.2f} GB, median of {len(runs)} runs\n")
    print("| | clock | ms | TB/s |\n| --- | --- | --- | --- |")
    medians = {kind: {clock: statistics.median(run[kind][clock] for run in runs) for clock in CLOCKS} for kind in KINDS}
    for kind in KINDS:
        for clock in CLOCKS:
            print(f"| {kind} | {clock} | {medians[kind][clock]:.2f} | {size / medians[kind][clock] / 1e9:.3f} |")
    ratios = {clock: statistics.median(run["sum"][clock] / run["digests"][clock] for run in runs) for clock in CLOCKS}
    print("\nrate of digests / rate of sum, median of pairs: " + ", ".join(f"{c} {r:.3f}" for c, r in ratios.items()))
    result = {"device": name, "bytes": size, "tensors": len(tensors), "runs": runs, "median ms": medians}
    args.out.with_suffix(".json").write_text(json.dumps(result | {"median ratio": ratios}))
    if importlib.util.find_spec("matplotlib"):
        plot(runs, size, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
