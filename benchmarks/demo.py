"""Does LoRA survive sleep(level=2), wake-up and reload? One cycle without the package, two with it.

    make demo            # or: python -m benchmarks.demo [--family qwen3] [--tensor-parallel-size 2]

Makes a tiny checkpoint with two adapters, starts real vLLM twice and prints what was right after each cycle. On a GPU
this is vLLM's own sleep mode. A CPU has none: there the loss of the weights pool is simulated (tests/support/pool.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch

from tests.support.checkpoints import FAMILIES
from tests.support.scenario import Cycle, Scenario, run

from .common import engine_release, table

STEPS = ("sleep", "wake weights", "reload", "wake kv_cache", "answers")
WHO = ("base", "adapter 1", "adapter 2")


def row(label: str, cycle: Cycle) -> list[str]:
    answers = [("same" if cycle.same[who] else "WRONG") if who in cycle.same else "none" for who in WHO]
    if cycle.bytes_differ is None:
        pool = "not reached"
    else:
        pool = f"{len(cycle.bytes_differ)} tensors differ" if cycle.bytes_differ else "all equal"
    times = [f"{cycle.seconds[step] * 1000:.1f}" if step in cycle.seconds else "-" for step in STEPS]
    return [label, *answers, pool, *times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="llama", choices=FAMILIES, help="architecture of the tiny model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    engine: dict[str, Any] = {"tensor_parallel_size": args.tensor_parallel_size}
    env: dict[str, Any] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if not on_gpu and args.tensor_parallel_size > 1:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(args.tensor_parallel_size))
    print(f"{engine_release()}, torch {torch.__version__}, {args.family} of random weights, 2 adapters")
    if on_gpu:
        print(f"{torch.cuda.get_device_name()}: vLLM's own sleep mode.")
    else:
        print(
            f"CPU, {os.cpu_count()} cores: no sleep mode here. SIMULATED: sleep(level=2) overwrites every tensor of the"
        )
        print("weights pool with 0xFF, and only what vLLM's own wake-up restores is restored.")
    print("Each cycle: sleep(level=2), wake_up(['weights']), reload_weights, wake_up(['kv_cache']), ask again.\n")

    scenario = Scenario(family=args.family, engine=engine, on_gpu=on_gpu)
    scenario.cycles = 1
    without = run(scenario, plugins="none", **env)
    scenario.cycles = 2
    package = run(scenario, **env)

    rows = [row("without, cycle 1", without.cycles[0])]
    rows += [row(f"with, cycle {number}", cycle) for number, cycle in enumerate(package.cycles, 1)]
    header = ["package", *WHO, f"pool ({package.pool_tensors} tensors)", *(f"{step} ms" for step in STEPS)]
    print(table(header, rows))
    for label, report in (("without", without), ("with", package)):
        for cycle in report.cycles:
            if cycle.error:
                print(f"\n{label} the package: {cycle.error}")
    print("\nAnswers: greedy tokens to 3 prompts, compared with those before the sleep. Pool: bytes after the reload.")
    print("With the package every row is right." if package.right else "WITH THE PACKAGE A ROW IS WRONG.")
    return 0 if package.right and len(package.cycles) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
