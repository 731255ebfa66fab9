"""What does the package cost while the engine serves? Throughput with and without it, as a ratio of pairs.

    python -m benchmarks.overhead [--starts 5] [--pairs 20] [--requests 64] [--max-tokens 64] [--out overhead]

Two engines, one with and one without the package, each in a process of its own, answer the same requests in turn: a
third for the base model, the rest for two adapters. A pair is two rounds right after each other; which one goes first
alternates. Two engines of one kind can differ by some per cent for as long as they live, so both are started several
times. Prints a table, writes OUT.json, and OUT.png where there is matplotlib.
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
MARK = "rate: "
KINDS = ("none", "lora_reload")  # values of VLLM_PLUGINS


def serve(config: dict[str, Any]) -> None:
    """Start an engine, then for every line on standard input answer all requests and print tokens per second."""
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
        for _ in sys.stdin:
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            print(f"{MARK}{tokens / (time.perf_counter() - start)}", flush=True)


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
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        raise SystemExit(f"the engine failed, exit status {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(config: dict[str, Any], pairs: int, order: tuple[str, ...]) -> list[tuple[float, float]]:
    """Tokens per second without and with the package, of engines that are started in this order."""
    engines = {plugins: Served(config, plugins) for plugins in order}
    measured = []
    try:
        for engine in engines.values():
            engine.round(), engine.round()  # they warm up
        for number in range(pairs):
            rate = {plugins: engines[plugins].round() for plugins in (KINDS if number % 2 == 0 else KINDS[::-1])}
            measured.append((rate["none"], rate["lora_reload"]))
    finally:
        for engine in engines.values():
            engine.close()
    return measured


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
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20, help="in each start")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("overhead"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(json.loads(args.serve))
        return
    config = {"requests": args.requests, "max_tokens": args.max_tokens}
    pairs = []
    print("| start | ratio with / without, median |\n| --- | --- |")
    for start in range(args.starts):
        of_start = measure(config, args.pairs, KINDS if start % 2 == 0 else KINDS[::-1])
        pairs += of_start
        print(f"| {start + 1} | {statistics.median(b / a for a, b in of_start):.3f} |", flush=True)
    ratios = sorted(with_package / without for without, with_package in pairs)
    low, median, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
    print("\n| | tokens/s, median |\n| --- | --- |")
    for column, name in enumerate(("without", "with")):
        print(f"| {name} | {statistics.median(pair[column] for pair in pairs):.0f} |")
    print(f"\nratio with / without of {len(pairs)} pairs: median {median:.3f}, quartiles {low:.3f} to {high:.3f}")
    args.out.with_suffix(".json").write_text(json.dumps({"config": config, "pairs": pairs, "median ratio": median}))
    if importlib.util.find_spec("matplotlib"):
        plot(pairs, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
