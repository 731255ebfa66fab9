# ruff: noqa: E402 - the stubs come before every import of vLLM
"""Every way to load weights, on one release in this process; what was seen goes to a file as JSON.

    PYTHONPATH=.venvs/matrix/0.24.0:. python -m tests.matrix.drive CHECKPOINTS out.json

The worker, the model runner, the model loader and the LoRA wrapping are the release's own, extended by the package as
in an engine. Sleep is simulated as in `tests.support.pool`; there is no forward pass.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import EQUAL, FAMILIES, NO_SUCH_PATH, PATHS
from .stubs import prepare

prepare()

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment

from tests.support.checkpoints import _FAMILIES
from tests.support.pool import PoolLoss
from tests.support.snapshots import take_snapshot
from vllm_lora_reload import plugin, session

from . import transfer

Weights = list[tuple[str, torch.Tensor]]


class MatrixWorker(PoolLoss, Worker):
    """The release's GPU worker around its CPU model runner."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.model_runner = CPUModelRunner(self.vllm_config, self.device)


class Case:
    """One model with two adapters, loaded and wrapped, and what its pool holds then."""

    def __init__(self, folder: Path, family: str, **settings: Any) -> None:
        self.folder, self.family = folder, family
        self.checkpoint = folder / family / "model"
        self.targets = _FAMILIES[family].targets
        self.config = make_config(self.checkpoint, **settings)
        with set_current_vllm_config(self.config):
            self.worker: Any = MatrixWorker(self.config, 0, 0, "", is_driver_worker=True)
            self.worker.init_device()
            self.worker.load_model()
        self.model = self.worker.model_runner.get_model()
        requests = [
            LoRARequest(f"adapter{number}", number, str(folder / family / f"adapter{number}")) for number in (1, 2)
        ]
        for request in requests:
            self.worker.add_lora(request)
        # As before a batch of three requests, so that punica metadata holds more than zeros.
        self.worker.model_runner._set_active_loras((1, 2, 0), (1, 1, 2, 2, 0), set(requests))
        tensors = self.worker._named_tensors().items()
        if empty := [n for n, t in tensors if "stacked" in n and ".gate." not in n and not t.any()]:
            raise RuntimeError(f"no adapter in {empty}")
        self.kernel_format = [(name, p.detach().clone()) for name, p in self.model.named_parameters()]
        self.wrappers = self.worker.wrapper_names()
        self.digests = self.worker.pool_digests()

    def weights(self) -> Weights:
        return [item for file in sorted(self.checkpoint.glob("*.safetensors")) for item in load_file(file).items()]

    def wrapped_names(self) -> Weights:
        """The weights with names as a walk over the wrapped model gives them."""
        named = []
        for name, tensor in self.weights():
            module, _, leaf = name.rpartition(".")
            named.append((f"{module}.base_layer.{leaf}" if module.rpartition(".")[2] in self.targets else name, tensor))
        return named

    def process(self) -> None:
        """As verl calls it: on the wrapped model."""
        process_weights_after_loading(self.model, self.config.model_config, self.worker.device)

    def cycle(self, load: Callable[[Case], Any]) -> str:
        """Sleep, wake up, load; then say whether every byte of the pool is as before."""
        try:
            with set_current_vllm_config(self.config):
                self.worker.sleep(2)
                self.worker.wake_up(["weights", "kv_cache"])
                load(self)
            now = self.worker.pool_digests()
            differ = [name for name, digest in self.digests.items() if now[name] != digest]
            if meta := self.worker.meta_tensors():
                return f"META: {len(meta)} tensors: {' '.join(meta)}"
            if self.worker.wrapper_names() != self.wrappers:
                return "WRAPPERS are not where they were"
            if differ:
                return f"DIFFERS: {len(differ)} of {len(now)}: {' '.join(differ)}"
            status = self.worker.lora_reload_status() if hasattr(self.worker, "lora_reload_status") else {}
            return f"REFUSES: {status['error']}" if status.get("error") else EQUAL
        except Exception as error:
            return f"ERROR: {type(error).__name__}: {error}\n{traceback.format_exc()}"


def make_config(checkpoint: Path, **settings: Any) -> Any:
    """As `tests.support.scenario` configures engines."""
    config = EngineArgs(
        model=str(checkpoint),
        enable_lora=True,
        max_loras=3,
        max_lora_rank=16,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        **settings,
    ).create_engine_config()
    config.weight_transfer_config = WeightTransferConfig()
    config.weight_transfer_config.backend = transfer.BACKEND
    return config


def init_distributed(folder: Path) -> None:
    """One rank. The config is that of an MoE model, or there is no expert parallel group."""
    config = make_config(folder / "qwen3_moe" / "model")
    with tempfile.TemporaryDirectory() as rendezvous, set_current_vllm_config(config):
        init_worker_distributed_environment(config, 0, f"file://{rendezvous}/store", 0, "gloo")


def reload_kernel_format(case: Case) -> None:
    case.worker.reload_weights(weights_iterator=iter(case.kernel_format), is_checkpoint_format=False)


def reload_by_loader(case: Case) -> None:
    state = getattr(case.worker, "lora_reload", None)  # there is none without the package
    plan, kept = (None, None) if state is None else (state.plan, state)
    if kept is not None:
        kept.plan = None
    try:
        case.worker.reload_weights()
    finally:
        if kept is not None:
            kept.plan = plan


def replay(case: Case) -> None:
    state = case.worker.lora_reload
    if not state.plan.usable:
        raise RuntimeError(f"no plan: {state.plan.reason}")
    case.worker.reload_weights()
    if not state.last_restore or state.last_restore["source"] != "checkpoint":
        raise RuntimeError("the plan was not used")


def restore_snapshot(case: Case) -> None:
    """Writes a snapshot of the reloaded weights, then loses them once more; the wake-up brings them back."""
    reload_by_loader(case)
    state = case.worker.lora_reload
    with tempfile.TemporaryDirectory() as folder:
        keeper = take_snapshot(case.worker, Path(folder))
        try:
            case.worker.sleep(2)
            case.worker.wake_up(["weights", "kv_cache"])
            if not state.last_restore or state.last_restore["source"] != "snapshot":
                raise RuntimeError("the snapshot was not used")
        finally:
            keeper.close()
            state.keeper = None


def load_one_a_call(case: Case) -> None:
    for item in case.weights():
        case.model.load_weights([item])


def load_after_failures(case: Case) -> None:
    """A stream that breaks off and a tensor of the wrong shape; then from disk, as if nothing had been."""
    weights = case.weights()
    # Not an expert's, which vLLM also takes if it is too small.
    wrong_shape = [(name, tensor[:-1] if ".q_proj." in name else tensor) for name, tensor in weights]

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:7]
        raise ConnectionError("the trainer is gone")

    for bad in (breaks_off(), iter(wrong_shape)):
        try:
            case.worker.reload_weights(weights_iterator=bad)
        except Exception:
            if case.worker.meta_tensors() or case.worker.wrapper_names() != case.wrappers:
                raise
            if not case.worker.lora_reload_status()["error"]:
                raise RuntimeError("a failed load counts as complete") from None
        else:
            raise RuntimeError("a bad load passes")
    reload_by_loader(case)


def load_as_verl(case: Case) -> None:
    """In buckets, with wrapped names, and vLLM's processing called on the model at the end."""
    weights = case.wrapped_names()
    for start in range(0, len(weights), 5):
        case.model.load_weights(weights[start : start + 5])
    case.process()


def start_with_dummy_weights(case: Case) -> None:
    """As verl does: nobody has seen what a load brings, and requests are refused until the last bucket is there."""
    case.worker.reload_weights()
    other = Case(case.folder, case.family, load_format="dummy")
    weights = other.wrapped_names()
    with set_current_vllm_config(other.config):
        if other.worker.lora_reload_status()["error"]:
            raise RuntimeError("dummy weights are refused, with which engines are measured")
        other.worker.sleep(2)
        other.worker.wake_up(["weights", "kv_cache"])
        for start in range(0, len(weights), 5):
            error = other.worker.lora_reload_status()["error"]
            if not error or "reload_weights" in error:
                raise RuntimeError(f"{start} of {len(weights)} tensors are there, and requests are told {error!r}")
            other.model.load_weights(weights[start : start + 5])
        if error := other.worker.lora_reload_status()["error"]:
            raise RuntimeError(error)
        if not cannot_be_processed(other):
            other.process()
        if error := other.worker.lora_reload_status()["error"]:
            raise RuntimeError(error)
    now = other.worker.pool_digests()
    if differ := [name for name, digest in case.digests.items() if now[name] != digest]:
        raise RuntimeError(f"other bytes in {differ}")


def cannot_be_processed(case: Case) -> bool:
    """See `cannot_process`."""
    return case.family in _not_processed


_not_processed: set[str] = set()


def patch_and_patch_back(case: Case) -> None:
    """Patches bring no lost tensor back; afterwards they change the elements that they name and nothing else."""
    name = "model.layers.0.self_attn.o_proj.weight"
    shape, weight = (full := dict(case.weights())[name]).shape, full.flatten()
    patch = transfer.Patch(name, shape, torch.tensor([3, 1, 200], dtype=torch.int32), weight[:3] + 1)
    case.model.load_weights([item for item in case.weights() if item[0] != name])
    transfer.send_patch(case.worker, patch)
    if not case.worker.lora_reload_status()["error"]:
        raise RuntimeError("a patch counts as the whole tensor")
    case.worker.reload_weights()
    running = next(p for n, p in case.model.named_parameters() if n.replace(".base_layer", "") == name).view(-1)
    transfer.send_patch(case.worker, patch)
    changed = weight.clone()
    changed[patch.indices.long()] = patch.values
    if not torch.equal(running, changed):
        raise RuntimeError("the patch did not do what it says")
    wrapped = name.replace(".weight", ".base_layer.weight")
    back = weight[patch.indices.long()]
    transfer.send_patch(case.worker, dataclasses.replace(patch, name=wrapped, values=back))


# Keys are those of `tests.matrix.PATHS`.
LOADS: dict[str, Callable[[Case], Any]] = {
    "disk": reload_by_loader,
    "replay": replay,
    "snapshot": restore_snapshot,
    "iterator": lambda case: case.worker.reload_weights(weights_iterator=iter(case.weights())),
    "kernel format": reload_kernel_format,
    "load_weights": lambda case: case.model.load_weights(case.weights()),
    "one a call": load_one_a_call,
    "base_layer names": lambda case: case.model.load_weights(case.wrapped_names()),
    "as verl": load_as_verl,
    "dummy": start_with_dummy_weights,
    "after failures": load_after_failures,
    "transfer": lambda case: transfer.send(case.worker, case.weights()),
    "sparse": patch_and_patch_back,
}


def cell(
    folder: Path,
    family: str,
    load: Callable[[Case], Any],
    case: Case | None = None,
    take_out: str | None = None,
) -> tuple[str, Case | None]:
    """Run one path; the case comes back if it is still whole."""
    view = vars(session)["base_view"]
    try:
        case = case or Case(folder, family)
        if take_out:
            case.worker.take_out(take_out)
        result = case.cycle(load)
        return result, case if result == EQUAL else None
    except Exception as error:
        return f"NOT BUILT: {type(error).__name__}: {error}\n{traceback.format_exc()}", None
    finally:
        vars(session)["base_view"] = view


def cannot_process(folder: Path, family: str) -> str | None:
    """What vLLM says when `Case.process` is called on a model that has just been loaded (0.33, wrapped experts)."""
    try:
        case = Case(folder, family)
    except Exception:  # counted where its paths are
        return None
    try:
        case.process()
    except AttributeError as error:
        return str(error)
    return None


def drive(folder: Path) -> dict[str, dict[str, str]]:
    """Result by family and path, controls among them."""
    results: dict[str, dict[str, str]] = {}
    init_distributed(folder)
    refused: dict[str, str] = {}
    for family in FAMILIES:  # before the plugin: vLLM as it is
        results[family] = {"without": cell(folder, family, LOADS["disk"])[0]}
        if error := cannot_process(folder, family):
            _not_processed.add(family)
            refused[family] = f"{NO_SUCH_PATH}: vLLM itself cannot process a wrapped model: {error}"
    plugin.register()
    for family in FAMILIES:
        case: Case | None = None
        for path in PATHS:
            if path == "as verl" and family in refused:
                results[family][path] = refused[family]
                continue
            if path == "sparse" and not transfer.SPARSE:
                results[family][path] = f"{NO_SUCH_PATH}: the release has no sparse transfer"
                continue
            results[family][path], case = cell(folder, family, LOADS[path], case)
        results[family]["no reset"] = cell(folder, family, LOADS["disk"], case, "reset")[0]
        results[family]["no view"] = cell(folder, family, LOADS["disk"], None, "view")[0]
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(drive(Path(sys.argv[1]))))
    os._exit(0)  # without waiting for what a broken model leaves behind
