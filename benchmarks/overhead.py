"""What does the package cost while the engine serves? Throughput and steps with and without it, as ratios of pairs.

    python -m benchmarks.overhead [--starts 5] [--pairs 20] [--requests 64] [--max-tokens 64] [--wait] [--out overhead]

Two engines, one with and one without the package, each in a process of its own, answer the same requests in turn: a
third for the base model, the rest for two adapters. A pair is two rounds right after each other; which one goes first
alternates. Two engines of one kind can differ by some per cent for as long as they live, so both are started several
times. Between them stand rounds that time single steps of the engine while it only decodes a full batch: wall time, and
CPU time of all threads of the process. Prints tables, writes OUT.json, OUT.md, and OUT.png with matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import common
from .common import middle, paired, ratio_line

ROOT = Path(__file__).parents[1]
MARK = "measured: "
KINDS = ("none", "lora_reload")  # values of VLLM_PLUGINS
BATCH = 32
WARM_STEPS = 4  # prompts are read in them


def serve(config: dict[str, Any]) -> None:
    """Start an engine, then do what each line of standard input says: ``round`` or ``steps``.

    A round answers all requests and prints tokens per second. ``steps`` prints the seconds of single steps.
    """
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from tests.support.checkpoints import make_adapter, make_checkpoint
    from tests.support.scenario import PROMPTS

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder, "model"))
        adapters = [make_adapter(Path(folder, f"adapter{n}"), checkpoint, seed=n) for n in (1, 2)]
        who = [None, *(LoRARequest(f"adapter{n}", n, str(path)) for n, path in enumerate(adapters, 1))]
        on_gpu: dict[str, Any] = {}
        if torch.cuda.is_available():  # memory is not measured, so that engines can start side by side
            on_gpu = dict(enable_sleep_mode=True, gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30)
        llm = LLM(
            model=str(checkpoint),
            enable_lora=True,
            max_loras=3,
            max_lora_rank=16,
            max_model_len=512,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
            enforce_eager=not on_gpu,
            **on_gpu,
        )
        sampling = SamplingParams(temperature=0, max_tokens=config["max_tokens"], ignore_eos=True)
        prompts = [PROMPTS[n % len(PROMPTS)] for n in range(config["requests"])]
        lora = [who[n % len(who)] for n in range(config["requests"])]
        for line in sys.stdin:
            if line.strip() == "steps":
                requests = list(zip(prompts, lora, strict=True))[:BATCH]
                print(f"{MARK}{json.dumps(decode_steps(llm.llm_engine, requests, sampling))}", flush=True)
                continue
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            print(f"{MARK}{tokens / (time.perf_counter() - start)}", flush=True)


def decode_steps(engine: Any, requests: Sequence[tuple[str, Any]], sampling: Any) -> dict[str, list[float]]:
    """Wall and CPU seconds of every step in which all requests decode."""
    import torch

    for number, (prompt, lora) in enumerate(requests):
        engine.add_request(f"step{number}", prompt, sampling.clone(), lora_request=lora)
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    seconds: dict[str, list[float]] = {"wall": [], "cpu": []}
    for _ in range(sampling.max_tokens - 2 * WARM_STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        engine.step()
        seconds["cpu"].append(time.process_time() - cpu)
        seconds["wall"].append(time.perf_counter() - wall)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


class Served:
    """An engine in a process of its own, with the given ``VLLM_PLUGINS``."""

    def __init__(self, config: dict[str, Any], plugins: str) -> None:
        env = os.environ | {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.overhead", "--serve", json.dumps(config)],
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self) -> float:
        """Tokens per second of one round."""
        return float(self._ask("round"))

    def steps(self) -> dict[str, list[float]]:
        """Wall and CPU seconds of single steps."""
        found: dict[str, list[float]] = json.loads(self._ask("steps"))
        return found

    def _ask(self, what: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        raise SystemExit(f"the engine failed, exit status {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


Steps = dict[str, dict[str, list[float]]]  # seconds of single steps by kind of time, by VLLM_PLUGINS


def measure(
    config: dict[str, Any], pairs: int, step_pairs: int, order: tuple[str, ...], wait: bool = False
) -> tuple[list[tuple[float, float]], list[Steps]]:
    """Tokens per second without and with the package, and steps, of engines that are started in this order."""
    engines = {plugins: Served(config, plugins) for plugins in order}
    measured, steps = [], []
    try:
        for engine in engines.values():
            engine.round(), engine.round(), engine.steps()  # they warm up
        common.wait_for_turn(wait)
        for number in range(max(pairs, step_pairs)):
            turn = KINDS if number % 2 == 0 else KINDS[::-1]
            if number < pairs:
                rate = {plugins: engines[plugins].round() for plugins in turn}
                measured.append((rate["none"], rate["lora_reload"]))
            if number < step_pairs:
                steps.append({plugins: engines[plugins].steps() for plugins in turn})
    finally:
        for engine in engines.values():
            engine.close()
    return measured, steps


def of_steps(measured: dict[str, Any], plugins: str, kind: str) -> list[float]:
    """The median step of each round."""
    return [statistics.median(steps[plugins][kind]) for steps in measured["steps"]]


def ratios(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """With the package over without it."""
    pairs = measured["pairs"]
    found = [paired("tokens per second, with / without", [b for _, b in pairs], [a for a, _ in pairs])]
    for kind, name in (("wall", "wall time"), ("cpu", "CPU time")):
        with_package, without = (of_steps(measured, plugins, kind) for plugins in ("lora_reload", "none"))
        found.append(paired(f"{name} of a decode step, with / without", with_package, without))
    return found


def render(measured: dict[str, Any]) -> str:
    starts = [[str(number), middle([b / a for a, b in pairs])] for number, pairs in enumerate(measured["starts"], 1)]
    rows = []
    for column, (plugins, name) in enumerate(zip(KINDS, ("without", "with"), strict=True)):
        rate = middle([pair[column] for pair in measured["pairs"]], 0)
        rows.append([name, rate, *(middle(of_steps(measured, plugins, kind), 3, 1e3) for kind in ("wall", "cpu"))])
    every = sorted(b / a for a, b in measured["pairs"])
    low, median, high = every[len(every) // 4], statistics.median(every), every[-1 - len(every) // 4]
    return "\n".join(
        [
            common.in_words(measured["machine"]),
            "",
            common.table(["start", "tokens/s with / without, median"], starts),
            "",
            common.table(["", "tokens/s", "wall ms a step", "CPU ms a step"], rows),
            "",
            f"ratio with / without of {len(every)} pairs: median {median:.3f}, quartiles {low:.3f} to {high:.3f}",
            *map(ratio_line, ratios(measured)),
        ]
    )


def draw(measured: dict[str, Any], panels: Sequence[Any]) -> None:
    throughput, steps = panels
    for column, (plugins, name, mark) in enumerate(zip(KINDS, ("without", "with"), ("o", "x"), strict=True)):
        throughput.plot([pair[column] for pair in measured["pairs"]], mark, label=name)
        for kind, word in (("wall", "wall"), ("cpu", "CPU")):
            steps.plot([seconds * 1e3 for seconds in of_steps(measured, plugins, kind)], mark, label=f"{word}, {name}")
    throughput.set(xlabel="pair", ylabel="tokens per second", ylim=(0, None), title="Throughput")
    steps.set(xlabel="pair", ylabel="ms", ylim=(0, None), title="One decode step, medians")
    throughput.legend()
    steps.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20, help="in each start")
    parser.add_argument("--step-pairs", type=int, default=4, help="of rounds that time single steps, in each start")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("overhead"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    common.add_wait(parser)
    args = parser.parse_args()
    if args.serve:
        serve(json.loads(args.serve))
        return
    config = {"requests": args.requests, "max_tokens": args.max_tokens}
    measured: dict[str, Any] = {
        "machine": common.machine(Path(tempfile.gettempdir())),
        "config": config,
        "starts": [],
        "pairs": [],
        "steps": [],
    }
    for start in range(args.starts):
        order = KINDS if start % 2 == 0 else KINDS[::-1]
        pairs, steps = measure(config, args.pairs, args.step_pairs, order, args.wait and start == 0)
        measured["starts"].append(pairs)
        measured["pairs"] += pairs
        measured["steps"] += steps
        common.save(args.out, measured, render(measured))
        print(f"start {start + 1}: {middle([b / a for a, b in pairs])}", flush=True)
    measured["ratios"] = ratios(measured)
    text = render(measured)
    common.save(args.out, measured, text)
    print(f"\n{text}")
    common.plot(args.out, lambda _, panels: draw(measured, panels), panels=2)


if __name__ == "__main__":
    main()
