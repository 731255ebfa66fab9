"""What does the package cost while the engine serves? Throughput with and without it, as a ratio of pairs.

    python -m benchmarks.overhead [--pairs 5] [--requests 64] [--max-tokens 64] [--out overhead]

Engines with and without the package start in turn, each in a process of its own, and answer the same requests: a third
for the base model, the rest for two adapters. Prints a table, writes OUT.json, and OUT.png where there is matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def measure(config: dict[str, Any], out: Path) -> None:
    """Start an engine and write its throughput in generated tokens per second, one value a round."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from tests.support.checkpoints import make_adapter, make_checkpoint
    from tests.support.scenario import PROMPTS

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder, "model"))
        adapters = [make_adapter(Path(folder, f"adapter{n}"), checkpoint, seed=n) for n in (1, 2)]
        who = [None, *(LoRARequest(f"adapter{n}", n, str(path)) for n, path in enumerate(adapters, 1))]
        on_gpu = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {}
        llm = LLM(
            model=str(checkpoint),
            enable_lora=True,
            max_loras=3,
            max_lora_rank=16,
            max_model_len=512,
            max_num_seqs=32,
            enable_prefix_caching=False,
            enforce_eager=not on_gpu,
            **on_gpu,
        )
        sampling = SamplingParams(temperature=0, max_tokens=config["max_tokens"], ignore_eos=True)
        prompts = [PROMPTS[n % len(PROMPTS)] for n in range(config["requests"])]
        lora = [who[n % len(who)] for n in range(config["requests"])]
        rates = []
        for _ in range(config["rounds"] + 1):
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            rates.append(tokens / (time.perf_counter() - start))
        out.write_text(json.dumps(rates[1:]))  # the first round warms up


def run(config: dict[str, Any], plugins: str) -> float:
    """Median throughput of an engine in a fresh process, in tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        env = os.environ | {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        env = env | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        command = [sys.executable, "-m", "benchmarks.overhead", "--measure", json.dumps(config), str(out)]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(f"the engine failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return float(statistics.median(json.loads(out.read_text())))


def plot(pairs: list[tuple[float, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([without for without, _ in pairs], "o", label="without")
    axes.plot([with_package for _, with_package in pairs], "x", label="with")
    axes.set(xlabel="pair", ylabel="tokens per second", ylim=(0, None), title="Throughput with and without the package")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in each engine; their median counts")
    parser.add_argument("--out", type=Path, default=Path("overhead"))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(json.loads(args.measure[0]), Path(args.measure[1]))
        return
    config = {"requests": args.requests, "max_tokens": args.max_tokens, "rounds": args.rounds}
    pairs = []
    print("| pair | without, tokens/s | with, tokens/s | ratio |\n| --- | --- | --- | --- |")
    for number in range(args.pairs):
        # Which one goes first alternates, so that a machine that slows down favours neither.
        order = ("none", "lora_reload") if number % 2 == 0 else ("lora_reload", "none")
        rate = {plugins: run(config, plugins) for plugins in order}
        pairs.append((rate["none"], rate["lora_reload"]))
        without, with_package = pairs[-1]
        print(f"| {number + 1} | {without:.1f} | {with_package:.1f} | {with_package / without:.3f} |", flush=True)
    ratio = statistics.median(with_package / without for without, with_package in pairs)
    args.out.with_suffix(".json").write_text(json.dumps({"config": config, "pairs": pairs, "median ratio": ratio}))
    if importlib.util.find_spec("matplotlib"):
        plot(pairs, args.out.with_suffix(".png"))
    print(f"\nmedian ratio with / without: {ratio:.3f}")


if __name__ == "__main__":
    main()
