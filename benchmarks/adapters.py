"""How long do adapters take to come back, and a new version of one to its first token?

    python -m benchmarks.adapters [--layers 36] [--adapters 4] [--rank 32] [--out adapters]
    python -m benchmarks.adapters --sweep [--layers 8] [--counts 1 2 4 8 16 32] [--ranks 8 32 64 128 256]

One engine with random weights in the shape of an 8-billion-parameter Qwen3, adapters on all projections. Three ways to
bring them back into their slots, in turn, medians: this package (from host memory, in one go), a loop over vLLM's
``activate_adapter`` (from host memory), and vLLM's way from 0.28 on (drop all, read each from disk again). Then two
ways from tensors on the device to the first token: ``update_adapter``, and a saved folder with
``add_lora(load_inplace)``.

The sweep takes the first two ways for many numbers of adapters and ranks, by default with 8 of the 36 layers, so that
adapters have 2/9 of their size. An engine for each rank, in a process of its own, has slots for the largest number of
adapters that fits into --gigabytes; this package clears all of them each time, also those that stay empty. The engines
start side by side and are measured one at a time.

Needs a GPU for figures that mean anything. Prints tables, writes OUT.json, OUT.md, and OUT.png with matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import common
from .common import Child, ChildError, Parent, middle, paired, ratio_line, timed
from .shapes import Shape, adapter_config, adapter_tensors, make_adapter, make_config

PACKAGE, LOOP, DROP = "this package", "loop over activate_adapter", "drop, read from disk"
UPDATE, SAVE = "update_adapter", "save a folder, add_lora(load_inplace)"
START_SECONDS, SWEEP_SECONDS = 180, 60  # more than this and a rank counts as failed


class Bench:
    """One engine in this process. Adapters come in with `add`."""

    def __init__(self, folder: Path, shape: Shape, rank: int, slots: int) -> None:
        from vllm import LLM

        self.folder, self.shape, self.rank = folder, shape, rank
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = adapter_config(shape, rank)
        on_gpu: dict[str, Any] = {}
        if self.device == "cuda":  # memory is not measured, so that engines can start side by side
            on_gpu = dict(enable_sleep_mode=True, gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30)
        self.llm = LLM(
            model=str(make_config(folder / "model", shape)),
            load_format="dummy",
            enable_lora=True,
            max_loras=slots,
            max_cpu_loras=slots + 1,
            max_lora_rank=rank,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            enable_prefix_caching=False,
            **on_gpu,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.worker = core.engine_core.model_executor.driver_worker.worker
        self.adapters = self.worker.lora_reload.adapters
        self.requests: list[Any] = []

    def add(self, path: Path) -> None:
        """One more adapter, into a slot of its own. Several can be read from one folder."""
        number = len(self.requests) + 1
        self.requests.append(self.request(f"adapter{number}", number, path))
        self.llm.llm_engine.add_lora(self.requests[-1])

    def request(self, name: str, number: int, path: Path, **more: Any) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, number, str(path), **more)

    # --- Back into the slots ----------------------------------------------------------------------------------

    def package(self) -> float:
        self.adapters.lora.save()
        return timed(self.adapters.put_back)

    def loop(self) -> float:
        manager = self.adapters.manager
        numbers = [request.lora_int_id for request in self.requests]
        for number in numbers:
            manager.deactivate_adapter(number)
        return timed(lambda: [manager.activate_adapter(number) for number in numbers])

    def drop(self) -> float:
        self.adapters.drop_all()
        return timed(lambda: [self.llm.llm_engine.add_lora(request) for request in self.requests])

    def measure(self, ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        """Seconds for all adapters together, the ways in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        self.package()  # it checks each adapter once
        for _ in range(rounds):
            for name, way in ways.items():
                if name == PACKAGE:
                    self.package()  # it checks again those that came back in another way
                seconds[name].append(way())
        return seconds

    # --- From the trainer's tensors to the first token --------------------------------------------------------

    def first_token(self, request: Any) -> None:
        from vllm import SamplingParams

        once = SamplingParams(temperature=0, max_tokens=1)
        self.llm.generate([{"prompt_token_ids": [5] * 32}], once, lora_request=request, use_tqdm=False)

    def update(self, seed: int) -> float:
        from vllm_lora_reload import update_adapter

        tensors = adapter_tensors(self.shape, self.rank, seed, self.device)

        def run() -> None:
            self.first_token(update_adapter(self.llm, "policy", tensors, self.config).lora_request)

        return timed(run)

    def save_and_add(self, seed: int) -> float:
        tensors = adapter_tensors(self.shape, self.rank, seed, self.device)
        path = self.folder / "saved"
        path.mkdir(exist_ok=True)

        def run() -> None:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
            (path / "adapter_config.json").write_text(json.dumps(self.config))
            self.llm.llm_engine.add_lora(self.request("saved", 77, path, load_inplace=True))
            self.first_token(self.request("saved", 77, path))

        return timed(run)


# --- One engine -----------------------------------------------------------------------------------------------


def measure_one(args: argparse.Namespace, folder: Path, shape: Shape) -> dict[str, Any]:
    bench = Bench(folder, shape, args.rank, slots=args.adapters + 1)
    for number in range(1, args.adapters + 1):
        bench.add(make_adapter(folder / f"adapter{number}", shape, args.rank, number, bench.device))
    bench.first_token(None)
    bench.package()
    common.wait_for_turn(args.wait)
    reserved = torch.cuda.memory_reserved() if bench.device == "cuda" else 0
    seconds = bench.measure({PACKAGE: bench.package, LOOP: bench.loop, DROP: bench.drop}, args.rounds)
    more = (torch.cuda.memory_reserved() if bench.device == "cuda" else 0) - reserved
    to_token: dict[str, list[float]] = {UPDATE: [], SAVE: []}
    for seed in range(args.rounds + 1):
        for name, sync in ((UPDATE, bench.update), (SAVE, bench.save_and_add)):
            took = sync(100 + seed)
            if seed:  # the first one warms up
                to_token[name].append(took)
    return {
        "machine": common.machine(folder),
        "config": {"layers": args.layers, "adapters": args.adapters, "rank": args.rank},
        "megabytes": shape.adapter_bytes(args.rank) / 1e6,
        "seconds": {name: [each / args.adapters for each in values] for name, values in seconds.items()},
        "to first token": to_token,
        "reserved": more,
    }


def ratios_of_one(measured: dict[str, Any]) -> list[dict[str, Any]]:
    seconds, to_token = measured["seconds"], measured["to first token"]
    return [
        paired(f"{LOOP} / {PACKAGE}", seconds[LOOP], seconds[PACKAGE]),
        paired(f"{DROP} / {PACKAGE}", seconds[DROP], seconds[PACKAGE]),
        paired(f"{SAVE} / {UPDATE}", to_token[SAVE], to_token[UPDATE]),
    ]


def render_one(measured: dict[str, Any]) -> str:
    config, megabytes = measured["config"], measured["megabytes"]
    back = [
        [name, middle(values, 1, 1e3), f"{megabytes / 1e3 / statistics.median(values):.1f}"]
        for name, values in measured["seconds"].items()
    ]
    to_token = [[name, middle(values, 0, 1e3)] for name, values in measured["to first token"].items()]
    return "\n".join(
        [
            common.in_words(measured["machine"]),
            f"{config['layers']} layers, {config['adapters']} adapters of rank {config['rank']} on all projections, "
            f"{megabytes:.0f} MB each",
            "",
            common.table(["back into the slots", "ms per adapter", "GB/s"], back),
            "",
            common.table(["tensors to first token", "ms"], to_token),
            "",
            f"device memory that stayed reserved after putting back: {measured['reserved']} bytes",
            "",
            *map(ratio_line, ratios_of_one(measured)),
        ]
    )


def draw_one(measured: dict[str, Any], panels: Sequence[Any]) -> None:
    titles = (("seconds", "back into the slot, per adapter"), ("to first token", "tensors to first token"))
    for axes, (key, title) in zip(panels, titles, strict=True):
        names = list(measured[key])
        axes.bar(names, [statistics.median(measured[key][name]) * 1e3 for name in names])
        axes.set(ylabel="ms", title=title)
        axes.tick_params(axis="x", rotation=10)


# --- Sweep ----------------------------------------------------------------------------------------------------


def fitting(counts: Sequence[int], nbytes: int, limit: float) -> list[int]:
    """Numbers of adapters of `nbytes` each that take `limit` bytes at most, in order."""
    return sorted(count for count in counts if count * nbytes <= limit)


def sweep_rank(config: dict[str, Any], parent: Parent) -> None:
    """Start an engine; when told to go on, tell the seconds for every number of adapters."""
    shape, folder = Shape(**config["shape"]), Path(config["folder"])
    bench = Bench(folder, shape, config["rank"], slots=max(config["counts"]))
    path = make_adapter(folder / "adapter", shape, config["rank"], 1, bench.device)
    bench.first_token(None)
    parent.tell({})
    parent.wait()
    for count in config["counts"]:
        while len(bench.requests) < count:
            bench.add(path)
        bench.package()
        seconds = bench.measure({PACKAGE: bench.package, LOOP: bench.loop}, config["rounds"])
        parent.tell({"rank": config["rank"], "count": count, "bytes": shape.adapter_bytes(config["rank"]), **seconds})


def sweep(args: argparse.Namespace, folder: Path, shape: Shape) -> dict[str, Any]:
    measured: dict[str, Any] = {
        "machine": common.machine(folder),
        "config": {"layers": shape.layers, "gigabytes": args.gigabytes, "rounds": args.rounds},
        "sweep": [],
        "left out": [],
    }
    children: dict[int, tuple[Child, list[int]]] = {}
    env = common.QUIET | {"VLLM_PLUGINS": "lora_reload"}
    try:
        for rank in args.ranks:
            counts = fitting(args.counts, shape.adapter_bytes(rank), args.gigabytes * 1e9)
            if more := sorted(set(args.counts) - set(counts)):
                measured["left out"].append(f"rank {rank}, {more} adapters: more than {args.gigabytes:g} GB")
            if counts:
                (place := folder / f"rank{rank}").mkdir()
                config = {"shape": vars(shape), "folder": str(place), "rank": rank, "counts": counts}
                child = Child(sweep_rank, config | {"rounds": args.rounds}, env, folder / f"rank{rank}.log")
                children[rank] = (child, counts)
        for rank, (child, counts) in children.items():
            try:
                child.receive(START_SECONDS)
                child.go()
                for _ in counts:
                    measured["sweep"].append(child.receive(SWEEP_SECONDS))
            except ChildError as error:
                measured["left out"].append(f"rank {rank}: {error}")
            child.close()
            common.save(args.out, measured, render_sweep(measured))
    finally:
        for child, _ in children.values():
            child.close()
    return measured


def sweep_row(entry: dict[str, Any]) -> list[str]:
    package, loop = ([each / entry["count"] for each in entry[way]] for way in (PACKAGE, LOOP))
    return [
        str(entry["rank"]),
        str(entry["count"]),
        f"{entry['bytes'] / 1e6:.0f}",
        middle(entry[PACKAGE], 1, 1e3),
        middle(package, 2, 1e3),
        f"{entry['bytes'] / 1e9 / statistics.median(package):.1f}",
        middle(loop, 2, 1e3),
    ]


def ratios_of_sweep(measured: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = sorted({entry["rank"] for entry in measured["sweep"]})
    of = {rank: [entry for entry in measured["sweep"] if entry["rank"] == rank] for rank in ranks}

    def every(entries: list[dict[str, Any]], way: str) -> list[float]:
        return [seconds for entry in entries for seconds in entry[way]]

    label = f"{LOOP} / {PACKAGE}"
    return [
        *(paired(f"{label}, rank {rank}", every(of[rank], LOOP), every(of[rank], PACKAGE)) for rank in ranks),
        paired(f"{label}, all", every(measured["sweep"], LOOP), every(measured["sweep"], PACKAGE)),
    ]


def render_sweep(measured: dict[str, Any]) -> str:
    header = ["rank", "adapters", "MB each", "all ms", "ms per adapter", "GB/s", "loop: ms per adapter"]
    return "\n".join(
        [
            common.in_words(measured["machine"]),
            f"{measured['config']['layers']} layers, adapters on all projections, back into their slots, medians",
            "",
            common.table(header, [sweep_row(entry) for entry in measured["sweep"]]),
            "",
            *(f"Left out: {reason}" for reason in measured["left out"]),
            *map(ratio_line, ratios_of_sweep(measured)),
        ]
    )


def draw_sweep(measured: dict[str, Any], panels: Sequence[Any]) -> None:
    for rank in sorted({entry["rank"] for entry in measured["sweep"]}):
        entries = [entry for entry in measured["sweep"] if entry["rank"] == rank]
        counts = [entry["count"] for entry in entries]
        each = [statistics.median(entry[PACKAGE]) / entry["count"] for entry in entries]
        panels[0].plot(counts, [seconds * 1e3 for seconds in each], "o-", label=f"rank {rank}")
        rates = [entry["bytes"] / 1e9 / seconds for entry, seconds in zip(entries, each, strict=True)]
        panels[1].plot(counts, rates, "o-", label=f"rank {rank}")
    for axes, name in zip(panels, ("ms per adapter", "GB/s"), strict=True):
        axes.set(xlabel="adapters", ylabel=name, ylim=(0, None), title="Adapters back into their slots")
        counts = sorted({entry["count"] for entry in measured["sweep"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, help="default: 36, or 8 with --sweep")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="many numbers of adapters and ranks")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128, 256])
    parser.add_argument("--gigabytes", type=float, default=5, help="most bytes of adapters of one rank in the sweep")
    parser.add_argument("--out", type=Path, default=Path("adapters"))
    common.add_wait(parser)
    args = parser.parse_args()
    if args.sweep and args.wait:
        parser.error("the engines of a sweep do not wait")
    args.layers = args.layers or (8 if args.sweep else Shape.layers)
    shape = Shape(layers=args.layers)
    os.environ.update(common.QUIET)
    os.environ.setdefault("VLLM_PLUGINS", "lora_reload")
    with tempfile.TemporaryDirectory() as folder:
        measured = (sweep if args.sweep else measure_one)(args, Path(folder), shape)
    measured["ratios"] = (ratios_of_sweep if args.sweep else ratios_of_one)(measured)
    text = (render_sweep if args.sweep else render_one)(measured)
    common.save(args.out, measured, text)
    print(text, flush=True)
    common.plot(args.out, lambda _, panels: (draw_sweep if args.sweep else draw_one)(measured, panels), panels=2)
    os._exit(0)


if __name__ == "__main__":
    main()
