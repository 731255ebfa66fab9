"""Other ways in, other models, with real sleep mode."""

import dataclasses
import importlib.util

import pytest
import torch

from tests.support.quantized import METHODS
from tests.support.scenario import NO_NCCL, Scenario, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
IPC = {"weight_transfer_config": {"backend": "ipc"}}


def test_mixture_of_experts() -> None:
    """From disk and one tensor a call; LoRA on every expert. In one process: vLLM 0.24 hangs in a forked core."""
    scenario = Scenario(family="qwen3_moe", cycles=2, ways=("reload", "direct"), on_gpu=True, max_tokens=8)
    report = run(scenario, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert len(report.cycles) == 2 and report.distinct_answers == 3
    assert report.right, report


def test_mixture_of_experts_by_transfer() -> None:
    """CUDA hands memory over only to another process."""
    scenario = Scenario(family="qwen3_moe", cycles=2, ways=("ipc",), on_gpu=True, engine=IPC, max_tokens=8)
    report = run(scenario, VLLM_WORKER_MULTIPROC_METHOD="spawn", **ENV)
    assert len(report.cycles) == 2 and report.distinct_answers == 3
    assert report.right, report


def test_a_transfer_over_a_sleep() -> None:
    """With vLLM's own sleep, which copies buffers first: layers of the open session are on the meta device."""
    report = run(Scenario(cycles=2, ways=("interrupted",), on_gpu=True, engine=IPC, max_tokens=8), **ENV)
    assert len(report.cycles) == 2 and report.distinct_answers == 3
    assert report.right, report


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_pool_that_others_discard(runner: str) -> None:
    """The allocator is driven without the worker."""
    scenario = Scenario(cycles=2, ways=("allocator",), on_gpu=True, max_tokens=8)
    report = run(scenario, VLLM_USE_V2_MODEL_RUNNER="1" if runner == "V2" else "0", **ENV)
    assert len(report.cycles) == 2 and report.distinct_answers == 3
    assert report.right, report


def test_online_fp8() -> None:
    """Kernel tensors are made from what is loaded: reload and transfer go layer by layer."""
    engine = IPC | {"quantization": "fp8"}
    report = run(Scenario(cycles=2, ways=("reload", "ipc"), on_gpu=True, engine=engine, max_tokens=8), **ENV)
    assert len(report.cycles) == 2 and report.distinct_answers == 3
    assert report.right, report


@pytest.mark.parametrize("method", METHODS)
def test_quantized_checkpoint(method: str) -> None:
    """Repacked kernel tensors, from disk and in kernel format."""
    ways = ("reload", "kernel")
    scenario = Scenario(cycles=2, quantization=method, ways=ways, on_gpu=True, max_tokens=8)
    try:
        report = run(scenario, **ENV)
    except RuntimeError:
        try:
            run(dataclasses.replace(scenario, cycles=0), plugins="none", **ENV)
        except RuntimeError as error:
            pytest.skip(f"vLLM itself does not start with it here: {str(error)[-300:]}")
        raise
    assert len(report.cycles) == 2 and report.distinct_answers == 3
    assert report.right, report


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["nccl", "sparse"])
def test_transfer_from_another_gpu(way: str) -> None:
    """All tensors, and single elements; for these, later releases have a backend of their own."""
    own_backend = importlib.util.find_spec("vllm.distributed.weight_transfer.sparse_nccl_engine") is not None
    engine = {"weight_transfer_config": {"backend": "sparse_nccl" if way == "sparse" and own_backend else "nccl"}}
    report = run(Scenario(cycles=2, ways=(way,), on_gpu=True, engine=engine, max_tokens=8), **ENV)
    if NO_NCCL in (report.cycles[0].error or ""):
        pytest.skip(NO_NCCL)
    assert len(report.cycles) == 2 and report.right, report
