"""What does one cycle of sleep and wake-up cost?

    python -m benchmarks.cycle [--layers 36] [--cycles 5] [--variants level1 ...] [--folder DIR] [--together] [--wait]

A checkpoint of random weights in the shape of an 8-billion-parameter Qwen3 and four adapters of rank 32 on all
projections. Each variant is an engine in a process of its own:

- ``level1``: vLLM without this package; sleep(level=1) keeps a copy of everything in pinned host memory.
- ``level2_stock``: vLLM without this package; sleep(level=2), then `reload_weights`. Before 0.28 vLLM cannot do that
  with LoRA: there it runs with LoRA off, without adapters, and the table says so.
- ``level2``: this package, `reload_weights` with the engine's own loader.
- ``level2_replay``: this package, `reload_weights` by its faster path.
- ``level2_snapshot``: this package, base weights from the local snapshot as part of the wake-up.
- ``restart``: no sleep at all, the engine is started anew. Taken from the start of a process that started alone.

A cycle: sleep, wake weights, reload where needed, wake KV cache, first token of adapter 1, of the base model, and of
the other adapters, one request after another. `total` is the time from the start of the sleep to the first token of
adapter 1. The first cycle, whose sleep allocates memory, is shown on its own. `exact`: cycles after which all
parameters and buffers of the model had the bytes from before; `slots`: the same of the memory that adapters are brought
into. `answers`: first tokens that had been answered to one of four questions before the first sleep; one can differ in
a correct engine, since LoRA kernels add in no fixed order. `in s`: what the package says a restore took, its
verification included. `pinned`: most bytes of page-locked host memory, those of torch's allocator and those of this
package's ring. `resident +`: how much the resident host memory of the process grew at most over the cycles.

With --together the engines start side by side, which takes less time, and are measured one at a time while the others
idle; the last one starts alone. Needs a GPU. Prints tables, writes OUT.json, OUT.md, and OUT.png with matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import common
from .common import Child, ChildError, Parent, middle, paired
from .shapes import Shape, make_adapter, make_checkpoint

STEPS = ("sleep", "wake weights", "reload", "wake kv_cache")
FIRST, BASE = "adapter 1", "base"


@dataclass(frozen=True)
class Variant:
    level: int
    plugins: str = "none"
    reload: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "level1": Variant(1, reload=False),
    "level2_stock": Variant(2),
    "level2": Variant(2, "lora_reload", settings={"replay": "off"}),
    "level2_replay": Variant(2, "lora_reload", settings={"replay": "on"}),
    "level2_snapshot": Variant(2, "lora_reload", reload=False, settings={"snapshot_dir": "snapshot"}),
}
START_SECONDS, CYCLE_SECONDS = 180, 60  # more than this and a variant counts as failed


# --- In the process of a variant ------------------------------------------------------------------------------


def run_variant(config: dict[str, Any], parent: Parent) -> None:
    """Start the engine, tell how long that took, and when told to go on run the cycles and tell each."""
    variant = VARIANTS[config["variant"]]
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    lora = variant.level == 1 or variant.plugins != "none" or hasattr(LoRAModelRunnerMixin, "reset_lora_state")
    llm = LLM(**engine_arguments(config, variant, lora))
    common.sync()
    started = time.time() - config["spawned"]
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    prompt = {"prompt_token_ids": [3 + 7 * n % 500 for n in range(32)]}
    who: dict[str, Any] = {}
    if lora:
        who = {
            f"adapter {n}": LoRARequest(f"adapter{n}", n, path) for n, path in enumerate(config["adapters"], start=1)
        }
    who = {name: request for name, request in who.items() if name == FIRST} | {BASE: None} | who

    def first_token(name: str) -> int:
        outputs = llm.generate([prompt], once, lora_request=who[name], use_tqdm=False)
        return int(outputs[0].outputs[0].token_ids[0])

    tokens_of_start = {name: common.timed(partial(first_token, name)) for name in who}
    expected: dict[str, set[int]] = {name: set() for name in who}
    for turn in range(5):
        for name in who:
            token = first_token(name)
            if turn:  # kernels are compiled, allocators have what they need
                expected[name].add(token)
    snapshot = None
    if "snapshot_dir" in variant.settings:
        snapshot = dict(llm.collective_rpc("lora_reload_take_snapshot")[0])
        if snapshot.get("state") != "valid":
            raise RuntimeError(f"the snapshot is {snapshot.get('state')}: {snapshot.get('reason')}")
    parent.tell({"start": started, "first tokens": tokens_of_start, "lora": lora, "snapshot": snapshot})
    parent.wait()

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model

    def bytes_of_model() -> dict[str, int]:
        return common.digests(model.named_parameters()) | common.digests(model.named_buffers())

    before, slots_before = bytes_of_model(), common.digests(slots(model))
    memory_before = common.host_memory()
    sampler = common.MemorySampler()
    ring = 0
    for _ in range(config["cycles"] + 1):
        cycle, tokens = run_cycle(llm, variant, {name: partial(first_token, name) for name in who})
        now = bytes_of_model()
        cycle["differ"] = sorted(name for name in before if now.get(name) != before[name])[:20]
        cycle["exact"] = now == before
        cycle["slots"] = common.digests(slots(model)) == slots_before if lora else None
        cycle["same"] = {name: tokens[name] in expected[name] for name in who}
        if variant.plugins != "none":
            status = llm.collective_rpc("lora_reload_status")[0]
            cycle["restore"] = status.get("last_restore")
            ring = max(ring, status.get("ring_bytes") or 0)
            if status["state"] != "complete":
                raise RuntimeError(f"after the cycle base weights are {status['state']}: {status['error']}")
        parent.tell(cycle)
    peak = sampler.stop()
    parent.tell({"before": memory_before, "peak": peak, "torch pinned": common.pinned_by_torch(), "ring": ring})


def slots(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What adapters have brought into the memory of LoRA layers."""
    for owner, module in model.named_modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            for number, tensor in enumerate(getattr(module, name, ())):
                yield f"{owner}.{name}.{number}", tensor


def engine_arguments(config: dict[str, Any], variant: Variant, lora: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(
        model=config["checkpoint"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=True,
        gpu_memory_utilization=0.25,
        kv_cache_memory_bytes=config["kv_bytes"],  # not measured, so that engines can start side by side
        enable_sleep_mode=True,
    )
    if lora:
        count = len(config["adapters"])
        arguments |= dict(enable_lora=True, max_loras=count, max_cpu_loras=count, max_lora_rank=config["rank"])
    if variant.plugins != "none":
        settings = dict(variant.settings)
        if "snapshot_dir" in settings:
            settings["snapshot_dir"] = config["snapshot_dir"]
        arguments["additional_config"] = {"lora_reload": settings}
    arguments |= config.get("engine", {})
    return arguments


def run_cycle(
    llm: Any, variant: Variant, ask: Mapping[str, Callable[[], int]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Seconds of every step, and the tokens that were answered."""
    steps: dict[str, Callable[[], Any]] = {
        "sleep": lambda: llm.sleep(level=variant.level),
        "wake weights": lambda: llm.wake_up(["weights"]),
        "reload": lambda: llm.collective_rpc("reload_weights"),
        "wake kv_cache": lambda: llm.wake_up(["kv_cache"]),
    }
    if not variant.reload:
        del steps["reload"]
    cycle: dict[str, Any] = {"tokens": {}}
    answers: dict[str, int] = {}
    common.sync()
    start = time.perf_counter()
    for name, step in steps.items():
        cycle[name] = common.timed(step)
    for name, question in ask.items():
        begin = time.perf_counter()
        answers[name] = question()  # a token is on the host
        cycle["tokens"][name] = time.perf_counter() - begin
        cycle.setdefault("total", time.perf_counter() - start)  # of the first that is asked
    return cycle, answers


def make_files(config: dict[str, Any], parent: Parent) -> None:
    """Checkpoint and adapters, on the GPU if there is one, which is free again when the process ends."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, folder = Shape(**config["shape"]), Path(config["folder"])
    make_checkpoint(folder / "model", shape, device)
    for number in range(1, config["count"] + 1):
        # Values as large as those of the base weights, so that answers of adapters differ.
        path = folder / f"adapter{number}-{config['rank']}"
        make_adapter(path, shape, config["rank"], number, device, std=0.05)
    parent.tell({})


# --- In this process ------------------------------------------------------------------------------------------


class Run:
    """One variant from outside. What it measured so far is in `measured`, also after a failure."""

    def __init__(self, name: str, config: dict[str, Any], logs: Path) -> None:
        self.name = name
        self.measured: dict[str, Any] = {"cycles": [], "error": None}
        env = common.QUIET | {"VLLM_PLUGINS": VARIANTS[name].plugins}
        config = config | {"variant": name, "spawned": time.time()}
        self._child = Child(run_variant, config, env, logs / f"{name}.log")

    def started(self, alone: bool) -> None:
        self._guarded(lambda: self.measured.update(self._child.receive(START_SECONDS), **{"started alone": alone}))

    def cycle(self, count: int) -> None:
        def run() -> None:
            self._child.go()
            for _ in range(count + 1):
                self.measured["cycles"].append(self._child.receive(CYCLE_SECONDS))
            self.measured["memory"] = self._child.receive(CYCLE_SECONDS)

        if not self.measured["error"]:
            self._guarded(run)
        self._child.close()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except ChildError as error:
            self.measured["error"] = str(error)

    def close(self) -> None:
        self._child.close()


def batches(names: Sequence[str], together: bool) -> list[list[str]]:
    """Which engines start side by side. The last one always starts alone, for the time that a restart takes."""
    if not together or len(names) < 3:
        return [[name] for name in names]
    last = "level2_replay" if "level2_replay" in names else names[-1]
    return [[name for name in names if name != last], [last]]


# --- What it shows --------------------------------------------------------------------------------------------


def later(variant: dict[str, Any], *path: str) -> list[float | None]:
    """One measured value of every cycle after the first."""
    found = []
    for cycle in variant.get("cycles", [])[1:]:
        value = cycle
        for key in path:
            value = value.get(key) if value is not None else None
        found.append(value)
    return found


def ready(variant: dict[str, Any]) -> list[float | None]:
    """Seconds from mapped to filled weights, after the first cycle."""
    return [cycle["wake weights"] + cycle.get("reload", 0) for cycle in variant.get("cycles", [])[1:]]


def restore_rates(variant: dict[str, Any]) -> list[float | None]:
    """GB/s of restores after the first cycle, verification included."""
    pairs = zip(later(variant, "restore", "bytes"), later(variant, "restore", "seconds"), strict=True)
    return [nbytes / seconds / 1e9 if nbytes and seconds else None for nbytes, seconds in pairs]


def gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def label(name: str, variant: dict[str, Any]) -> str:
    return name if variant.get("lora", True) else f"{name} (LoRA off, no adapters)"


def time_row(name: str, variant: dict[str, Any]) -> list[str]:
    others = [
        [value for who, value in cycle["tokens"].items() if who not in (FIRST, BASE)]
        for cycle in variant.get("cycles", [])[1:]
    ]
    flat = [value for values in others for value in values]
    first = variant["cycles"][0] if variant.get("cycles") else {}
    return [
        label(name, variant),
        middle([first.get("sleep")]),
        middle([first.get("total")]),
        *(middle(later(variant, step)) for step in STEPS),
        middle(later(variant, "tokens", FIRST)),
        middle(later(variant, "tokens", BASE)),
        middle(flat),
        middle(later(variant, "total")),
    ]


def right_row(name: str, variant: dict[str, Any]) -> list[str]:
    cycles, memory = variant.get("cycles", []), variant.get("memory") or {}
    slots_right = [cycle.get("slots") for cycle in cycles]
    same = [each for cycle in cycles for each in cycle["same"].values()]
    pinned = None
    if memory:
        pinned = (memory["torch pinned"] or 0) + memory["ring"]
    before, peak = memory.get("before", {}), memory.get("peak", {})
    grown = {kind: peak[kind] - before.get(kind, 0) for kind in peak}
    sources = sorted({(cycle.get("restore") or {}).get("source", "-") for cycle in cycles})
    return [
        label(name, variant),
        f"{sum(cycle['exact'] for cycle in cycles)} of {len(cycles)}",
        "-" if None in slots_right else f"{sum(slots_right)} of {len(slots_right)}",
        f"{sum(same)} of {len(same)}",
        ", ".join(sources) or "-",
        middle(later(variant, "restore", "seconds")),
        middle(restore_rates(variant), 1),
        gigabytes(pinned),
        gigabytes(grown.get("VmRSS")),
        "/".join(gigabytes(grown.get(kind)) for kind in ("RssAnon", "RssFile", "RssShmem")),
        gigabytes(peak.get("VmHWM")),
        variant.get("error") or "",
    ]


def restart(variants: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The variant whose start stands for a restart: the last that started alone, when all caches were filled."""
    alone = [(name, each) for name, each in variants.items() if each.get("started alone") and "start" in each]
    return alone[-1] if alone else None


def restart_row(variants: dict[str, Any]) -> list[str]:
    found = restart(variants)
    if found is None:
        return ["restart", *["-"] * 10]
    name, variant = found
    tokens = variant["first tokens"]
    others = [value for who, value in tokens.items() if who not in (FIRST, BASE)]
    total = variant["start"] + tokens.get(FIRST, tokens[BASE])
    cells = [middle([tokens.get(FIRST)]), middle([tokens[BASE]]), middle(others), middle([total])]
    return [f"restart (of {name})", "-", "-", "-", "-", "-", "-", *cells]


def wrong(variants: dict[str, Any]) -> list[str]:
    """Those that failed, or had other bytes after a cycle."""
    return [
        name
        for name, found in variants.items()
        if found["error"] or not all(cycle["exact"] for cycle in found["cycles"])
    ]


def ratios(variants: dict[str, Any]) -> list[dict[str, Any]]:
    def of(name: str) -> dict[str, Any]:
        found: dict[str, Any] = variants.get(name, {})
        return found

    def first_sleep(name: str) -> list[float | None]:
        return [cycle["sleep"] for cycle in of(name).get("cycles", [])[:1]]

    snapshot, stock, level1 = of("level2_snapshot"), of("level2_stock"), of("level1")
    found = [
        paired(
            "level2_stock reload / restore of level2_snapshot",
            later(stock, "reload"),
            later(snapshot, "restore", "seconds"),
        ),
        paired(
            "level2_stock reload / level2_snapshot wake weights",
            later(stock, "reload"),
            later(snapshot, "wake weights"),
        ),
        paired("level2_stock wake weights + reload / level2_snapshot wake weights", ready(stock), ready(snapshot)),
        paired(
            "level2_stock reload / level2_replay reload", later(stock, "reload"), later(of("level2_replay"), "reload")
        ),
        paired("level1 total / level2_snapshot total", later(level1, "total"), later(snapshot, "total")),
        paired(
            "level1 first sleep / level2_snapshot first sleep", first_sleep("level1"), first_sleep("level2_snapshot")
        ),
    ]
    if again := restart(variants):
        tokens = again[1]["first tokens"]
        total = again[1]["start"] + tokens.get(FIRST, tokens[BASE])
        totals = later(snapshot, "total")
        found.append(paired("restart / level2_snapshot total", [total] * len(totals), totals))
    return found


def render(measured: dict[str, Any]) -> str:
    variants, config = measured["variants"], measured["config"]
    times = [time_row(name, variant) for name, variant in variants.items()] + [restart_row(variants)]
    headers = [
        ["variant", "first sleep", "first total", *STEPS, "adapter 1", "base", "other adapters", "total"],
        [
            "variant",
            "exact",
            "slots",
            "answers",
            "restored from",
            "in s",
            "GB/s",
            "pinned GB",
            "resident + GB",
            "anon/file/shmem + GB",
            "VmHWM GB",
            "error",
        ],
    ]
    lines = [
        common.in_words(measured["machine"]),
        f"{config['layers']} layers, {config['checkpoint_bytes'] / 1e9:.1f} GB, {config['adapters']} adapters of rank "
        f"{config['rank']}, {config['adapter_bytes'] / 1e6:.0f} MB each. Seconds, medians of {config['cycles']} cycles "
        "after the first.",
        "",
        common.table(headers[0], times),
        "",
        common.table(headers[1], [right_row(name, variant) for name, variant in variants.items()]),
    ]
    for name, variant in variants.items():
        if snapshot := variant.get("snapshot"):
            took, size = snapshot.get("seconds"), snapshot.get("bytes")
            lines += ["", f"{name}: snapshot of {gigabytes(size)} GB, written in {middle([took], 1)} s"]
    return "\n".join([*lines, "", *(common.ratio_line(ratio) for ratio in ratios(variants))])


def draw(variants: dict[str, Any], axes: Any) -> None:
    bottom = [0.0] * len(variants)
    parts = [*((step, (step,)) for step in STEPS), ("first token", ("tokens", FIRST))]
    for name, path in parts:
        measured = [[value for value in later(variant, *path) if value is not None] for variant in variants.values()]
        heights = [statistics.median(values) if values else 0.0 for values in measured]
        axes.bar(list(variants), heights, bottom=bottom, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for number, height in enumerate(bottom):
        axes.text(number, height, f"{height:.2f}", ha="center", va="bottom")
    axes.set(ylabel="seconds", title="One cycle, from the start of the sleep to an adapter's first token")
    axes.tick_params(axis="x", rotation=15)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--cycles", type=int, default=5, help="after the first")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--kv-gigabytes", type=float, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, help="where checkpoint and adapters are kept; default: a temporary one")
    parser.add_argument("--together", action="store_true", help="start engines side by side")
    common.add_wait(parser)
    parser.add_argument("--out", type=Path, default=Path("cycle"))
    args = parser.parse_args()
    common.need_gpu()
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(args, args.folder or Path(temporary), Path(temporary))
    if names := wrong(measured["variants"]):
        sys.exit(f"failed, or with other bytes after a cycle: {', '.join(names)}")


def measure(args: argparse.Namespace, folder: Path, logs: Path, **more: Any) -> dict[str, Any]:
    """Run all variants. `more` goes into their config."""
    shape: Shape = more.pop("shape", None) or Shape(layers=args.layers)
    files = {"shape": dataclasses.asdict(shape), "folder": str(folder), "count": args.adapters, "rank": args.rank}
    maker = Child(make_files, files, common.QUIET, logs / "files.log")
    try:
        maker.receive(START_SECONDS)
    finally:
        maker.close()
    measured: dict[str, Any] = {
        "machine": common.machine(folder),
        "config": {
            "layers": shape.layers,
            "checkpoint_bytes": shape.nbytes,
            "adapters": args.adapters,
            "adapter_bytes": shape.adapter_bytes(args.rank),
            "rank": args.rank,
            "cycles": args.cycles,
            "together": args.together,
        },
        "variants": {},
    }
    with tempfile.TemporaryDirectory(dir=folder) as snapshots:  # a snapshot of an earlier run would not be written anew
        config = {
            "checkpoint": str(folder / "model"),
            "adapters": [str(folder / f"adapter{n}-{args.rank}") for n in range(1, args.adapters + 1)],
            "rank": args.rank,
            "cycles": args.cycles,
            "kv_bytes": int(args.kv_gigabytes * (1 << 30)),
            "snapshot_dir": snapshots,
        } | more
        for batch in batches(args.variants, args.together):
            runs: list[Run] = []
            try:
                runs += [Run(name, config, logs) for name in batch]
                for run in runs:
                    run.started(alone=len(batch) == 1)
                common.wait_for_turn(args.wait and not measured["variants"])
                for run in runs:
                    run.cycle(args.cycles)
                    measured["variants"][run.name] = run.measured
                    common.save(args.out, measured, render(measured))
                    print(f"{run.name}: {run.measured['error'] or 'measured'}", flush=True)
            finally:
                for run in runs:
                    run.close()
    measured["ratios"] = ratios(measured["variants"])
    text = render(measured)
    common.save(args.out, measured, text)
    print(f"\n{text}")
    common.plot(args.out, lambda figure, panels: draw(measured["variants"], panels[0]))
    return measured


if __name__ == "__main__":
    main()
