"""One engine through several sleep cycles, in a process of its own; what was seen comes back as JSON.

    python -m tests.support.scenario '{"cycles": 2}' out.json

Which plugins the engine loads is the caller's choice (``VLLM_PLUGINS``), so the same scenario runs with the package and
without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = ("The quick brown fox", "What is the capital of France?", "def add(left: int")
NO_NCCL = "vLLM cannot use NCCL here"
ROOT = Path(__file__).parents[2]


@dataclass
class Scenario:
    """What to run.

    `control` names a part of the package to disable for one more cycle (`PoolInspector.take_out`), or several, joined
    by ``+``, for one each; the first that is not right is reported, else the last. `ways` are taken in
    turn to bring the weights back: ``reload`` (from disk), ``direct`` (one tensor a call), ``kernel`` (kernel format),
    ``ipc``, ``nccl`` (weight transfer), ``sparse`` (from disk, then single elements there and back by transfer),
    ``snapshot`` (they come back by themselves), ``interrupted`` (a transfer over which the engine sleeps, then a whole
    one) or ``allocator`` (from disk, twice: in between the allocator is told to discard everything, not the worker).
    `quantization` is one of `quantized.METHODS`: the checkpoint's own, not one that vLLM applies while loading.
    """

    family: str = "llama"
    adapters: int = 2
    cycles: int = 2
    max_tokens: int = 16
    engine: dict[str, Any] = field(default_factory=dict)
    control: str | None = None
    on_gpu: bool = False
    ways: tuple[str, ...] = ("reload",)
    quantization: str | None = None


@dataclass
class Cycle:
    """What one cycle showed.

    `same`: answers equal to those before the first sleep, by who answered. `restored`: what this package brought the
    weights back from, by rank, where it was not vLLM's loader.
    """

    same: dict[str, bool] = field(default_factory=dict)
    bytes_differ: list[str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    restored: list[str | None] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.error is None and self.bytes_differ == [] and bool(self.same) and all(self.same.values())


@dataclass
class Report:
    pool_tensors: int
    logits_mappings: list[int]
    distinct_answers: int
    cycles: list[Cycle]
    control: Cycle | None = None

    @property
    def right(self) -> bool:
        return all(cycle.right for cycle in self.cycles)


def run(
    scenario: Scenario,
    plugins: str = "lora_reload",
    timeout: float = 500,
    module: str = "tests.support.scenario",
    **env: str,
) -> Report:
    """Run `scenario` in a fresh process.

    Args:
        plugins: value of ``VLLM_PLUGINS``.
        timeout: seconds.
        module: what to run; another one than this takes the same arguments.
        env: more environment variables.

    Raises:
        RuntimeError: the process failed before it could report; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "report.json"), Path(folder, "log.txt")
        environ = os.environ | {"VLLM_PLUGINS": plugins, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | env
        paths = [str(ROOT), environ.get("PYTHONPATH")]
        if importlib.util.find_spec("ray") is None:  # vLLM 0.24's IPC backend imports it, for trainers in Ray only
            Path(folder, "ray.py").touch()
            paths.append(folder)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", module, json.dumps(dataclasses.asdict(scenario)), str(out)]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                sink.write(f"\nstill running after {timeout} s\n".encode())
            finally:  # the engine core and its workers are processes of the same group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not out.exists():
            raise RuntimeError(f"exit status {process.returncode}\n{log.read_text(errors='replace')[-8000:]}")
        report = json.loads(out.read_text())
    report["cycles"] = [Cycle(**cycle) for cycle in report["cycles"]]
    report["control"] = Cycle(**report["control"]) if report["control"] else None
    return Report(**report)


def engine_args(scenario: Scenario, checkpoint: Path) -> dict[str, Any]:
    """Arguments for ``LLM``.

    One LoRA slot more than adapters: on the CPU, vLLM's logits kernel adds the last slot to requests without adapter.
    """
    args: dict[str, Any] = dict(
        model=str(checkpoint),
        enable_lora=True,
        max_loras=scenario.adapters + 1,
        max_lora_rank=16,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    if scenario.on_gpu:
        args |= dict(
            worker_extension_cls="tests.support.pool.PoolExtension",
            enable_sleep_mode=True,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1 << 28,  # not measured, so that several engines can start side by side
        )
    else:
        args |= dict(worker_cls="tests.support.pool.PoolLossWorker")
    return args | scenario.engine


def asker(llm: Any, scenario: Scenario) -> Callable[[Any], list[list[int]]]:
    """What gives the greedy tokens of every prompt, for a ``LoRARequest`` or None."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=scenario.max_tokens, ignore_eos=True)

    def ask(request: Any) -> list[list[int]]:
        outputs = llm.generate(list(PROMPTS), greedy, lora_request=request, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return ask


def differing(before: list[dict[str, str]], now: list[dict[str, str]]) -> list[str]:
    """Tensors of which ranks' ``pool_digests`` differ."""
    return [
        f"rank {rank}: {name}"
        for rank, (old, new) in enumerate(zip(before, now, strict=True))
        for name in old
        if new[name] != old[name]
    ]


def observe(scenario: Scenario, folder: Path) -> Report:
    """Make checkpoint and adapters in `folder`, start the engine, run the cycles."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from .checkpoints import make_adapter, make_checkpoint

    checkpoint = make_checkpoint(folder / "model", scenario.family)
    requests: dict[str, Any] = {"base": None}
    for number in range(1, scenario.adapters + 1):
        path = make_adapter(folder / f"adapter{number}", checkpoint, seed=number)
        requests[f"adapter {number}"] = LoRARequest(f"adapter{number}", number, str(path))
    if scenario.quantization:
        from .quantized import quantize

        checkpoint = quantize(checkpoint, folder / "quantized", scenario.quantization)
    llm = LLM(**engine_args(scenario, checkpoint))
    ask = asker(llm, scenario)

    def answers() -> dict[str, list[list[int]]]:
        return {name: ask(request) for name, request in requests.items()}

    answers()  # adapters load here, so that every later call finds the engine in the same state
    before = answers()
    pool_tensors = len(llm.collective_rpc("pool_digests")[0])
    llm.collective_rpc("keep_kernel_format", args=("kernel" in scenario.ways,))
    if "snapshot" in scenario.ways:
        taken = llm.collective_rpc("lora_reload_take_snapshot")
        assert all(snapshot["state"] == "valid" for snapshot in taken), taken
    trainer = functools.cache(lambda: NcclTrainer(llm))
    mappings = llm.collective_rpc("logits_mapping_sizes")[0]
    steps: dict[str, Callable[[], Any]] = {
        "sleep": lambda: llm.sleep(level=2),
        "wake weights": lambda: llm.wake_up(["weights"]),
        "reload": lambda: load(scenario.ways[len(cycles) % len(scenario.ways)]),
        "wake kv_cache": lambda: llm.wake_up(["kv_cache"]),
    }

    def load(way: str) -> None:
        if way == "reload":
            llm.collective_rpc("reload_weights")
        elif way == "kernel":
            llm.collective_rpc("reload_kernel_format")
        elif way == "direct":
            llm.collective_rpc("load_one_by_one", args=(str(checkpoint),))
        elif way == "ipc":
            send_by_ipc(llm, checkpoint)
        elif way == "nccl":
            trainer().send(checkpoint)
        elif way == "sparse":
            llm.collective_rpc("reload_weights")
            trainer().patch_and_patch_back(checkpoint)
        elif way == "interrupted":
            interrupted_transfer(llm, checkpoint)
            send_by_ipc(llm, checkpoint)
        elif way == "allocator":
            llm.collective_rpc("reload_weights")
            llm.wake_up(["kv_cache"])
            for step, state in (("sleep", "discarded"), ("wake_up", "missing")):
                llm.collective_rpc("drive_allocator", args=(step,))
                expect_state(llm, state)
            llm.collective_rpc("reload_weights")
            expect_state(llm, "complete")
        elif way != "snapshot":
            raise ValueError(way)

    guarded = "lora_reload" in os.environ.get("VLLM_PLUGINS", "")
    waking = {"interrupted", "allocator"}  # these wake the KV cache by themselves

    def refused_without_cache() -> None:
        """Weights are back, and the KV cache sleeps: vLLM alone would spin for ever."""
        try:
            ask(None)
        except Exception as error:
            if 'wake_up(["kv_cache"])' not in str(error):
                raise
        else:
            raise RuntimeError("answered while the KV cache sleeps")

    def run_cycle() -> Cycle:
        cycle = Cycle()
        try:
            digests = llm.collective_rpc("pool_digests")  # punica metadata is that of the last batch, which may vary
            for step, action in steps.items():
                if step == "wake kv_cache" and guarded and not waking & set(scenario.ways):
                    refused_without_cache()
                start = time.perf_counter()
                action()
                cycle.seconds[step] = time.perf_counter() - start
            now = llm.collective_rpc("pool_digests")
            if guarded:
                found = [status["last_restore"] for status in llm.collective_rpc("lora_reload_status")]
                cycle.restored = [last and last["source"] for last in found]
            cycle.bytes_differ = differing(digests, now)
            start = time.perf_counter()
            after = answers()
            cycle.seconds["answers"] = time.perf_counter() - start
            cycle.same = {name: after[name] == before[name] for name in requests}
        except Exception as error:
            cycle.error = f"{type(error).__name__}: {error}"[:1000]
        return cycle

    cycles: list[Cycle] = []
    while len(cycles) < scenario.cycles and not (cycles and cycles[-1].error):
        cycles.append(run_cycle())
    control = None
    for part in scenario.control.split("+") if scenario.control else ():
        llm.collective_rpc("take_out", args=(part,))
        control = run_cycle()
        if not control.right:
            break
        if part == "unwritten":
            taken = llm.collective_rpc("lora_reload_take_snapshot")
            assert all(snapshot["state"] == "valid" for snapshot in taken), taken
    return Report(
        pool_tensors=pool_tensors,
        logits_mappings=mappings,
        distinct_answers=len({json.dumps(answer) for answer in before.values()}),
        cycles=cycles,
        control=control,
    )


def checkpoint_tensors(checkpoint: Path, device: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor.to(device) for file in files for name, tensor in load_file(file).items()}


def update_info(tensors: dict[str, Any]) -> dict[str, Any]:
    """What every transfer backend wants to know of the tensors."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def expect_state(llm: Any, state: str) -> None:
    if (found := [status["state"] for status in llm.collective_rpc("lora_reload_status")]) != [state] * len(found):
        raise RuntimeError(f"{found} where {state} is right")


def interrupted_transfer(llm: Any, checkpoint: Path) -> None:
    """Sleep at both levels in the middle of a session. Every call that goes on with it is refused, with what to do."""
    import torch

    for level in (1, 2):
        llm.wake_up(["kv_cache"])
        send_by_ipc(llm, checkpoint)
        tensors = dict(list(checkpoint_tensors(checkpoint, "cuda:0").items())[:5])
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", kwargs={"update_info": ipc_info(tensors)})
        if not all(status["apart"] for status in llm.collective_rpc("lora_reload_status")):
            raise RuntimeError("no layer is apart")
        llm.sleep(level=level)
        llm.wake_up()
        for method, kwargs in (("update_weights", {"update_info": ipc_info(tensors)}), ("finish_weight_update", {})):
            try:
                llm.collective_rpc(method, kwargs=kwargs)
            except Exception as error:
                if f"sleep(level={level}) has ended the session" not in str(error):
                    raise
            else:
                raise RuntimeError(f"{method} goes on after sleep(level={level})")
        expect_state(llm, "missing")
        if level == 2 and any(map(bool, llm.collective_rpc("meta_tensors"))):
            raise RuntimeError("tensors are left on the meta device")
        torch.cuda.synchronize()


def send_by_ipc(llm: Any, checkpoint: Path) -> None:
    """A weight transfer session with the IPC engine; this process is the trainer.

    The update info is what vLLM's own trainer side makes for one rank, unpacked.
    """
    import torch

    tensors = checkpoint_tensors(checkpoint, "cuda:0")
    info = ipc_info(tensors)
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": info})
    llm.collective_rpc("finish_weight_update")
    torch.cuda.synchronize()


def ipc_info(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of tensors on this process's device, which have to live until the call is over."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return update_info(tensors) | {"ipc_handles": [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors.values()]}


class NcclTrainer:
    """This process as a trainer on the second GPU, for vLLM's NCCL backends; the engine has one rank on the first."""

    DEVICE = "cuda:1"

    def __init__(self, llm: Any) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.network_utils import get_open_port

        self.llm = llm
        self._side = ThreadPoolExecutor(1)
        torch.cuda.set_device(self.DEVICE)
        meeting = {"master_address": "127.0.0.1", "master_port": get_open_port(), "world_size": 2}
        joined = self._call("init_weight_transfer_engine", init_info=meeting | {"rank_offset": 1})
        group = StatelessProcessGroup.create("127.0.0.1", meeting["master_port"], rank=0, world_size=2)
        self._group = PyNcclCommunicator(group, device=torch.device(self.DEVICE))
        joined.result()
        if self._group.disabled:  # then its broadcasts do nothing
            raise RuntimeError(NO_NCCL)

    def _call(self, method: str, **kwargs: Any) -> Any:
        """Both sides meet in NCCL calls, so the engine's side runs in a thread."""
        return self._side.submit(self.llm.collective_rpc, method, kwargs=kwargs)

    def _session(self, info: dict[str, Any], tensors: list[Any], **start: Any) -> None:
        import torch

        self._call("start_weight_update", **start).result()
        received = self._call("update_weights", update_info=info)
        for tensor in tensors:
            self._group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        received.result()
        self._call("finish_weight_update").result()

    def send(self, checkpoint: Path) -> None:
        """All tensors, one after another."""
        tensors = checkpoint_tensors(checkpoint, self.DEVICE)
        self._session(update_info(tensors), list(tensors.values()))

    def patch_and_patch_back(self, checkpoint: Path) -> None:
        """Change three elements of a wrapped layer, then restore them, under its name in the wrapped model."""
        import torch

        name = "model.layers.0.self_attn.o_proj.weight"
        weight = checkpoint_tensors(checkpoint, self.DEVICE)[name]
        indices = torch.tensor([3, 1, 200], dtype=torch.int32, device=self.DEVICE)
        old = weight.flatten()[indices.long()]
        wrapped = {name.replace(".weight", ".base_layer.weight"): weight}
        info = update_info(wrapped) | {"num_updates_list": [len(indices)]}
        start = {}
        if importlib.util.find_spec("vllm.distributed.weight_transfer.sparse_nccl_engine") is None:
            info["update_kind"] = "sparse_flat"  # a form of the NCCL backend, before it had a backend of its own
            start = {"is_checkpoint_format": False}
        before = self.llm.collective_rpc("pool_digests")[0]
        self._session(info, [indices, old + 1], **start)
        after = self.llm.collective_rpc("pool_digests")[0]
        if len(changed := [key for key in before if before[key] != after[key]]) != 1:
            raise RuntimeError(f"a patch of one tensor changed {changed}")
        self._session(info, [indices, old], **start)


def main(config: str, out: str, *, observe: Callable[[Scenario, Path], Report] = observe) -> None:
    """What `run` starts; other modules have an `observe` of their own."""
    with tempfile.TemporaryDirectory() as folder:
        report = observe(Scenario(**json.loads(config)), Path(folder))
    Path(out).write_text(json.dumps(dataclasses.asdict(report)))
    # An engine whose model is broken can hang on its way out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
