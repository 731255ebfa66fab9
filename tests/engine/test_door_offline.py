"""`LLM`: a refused request ends alone and leaves nothing behind, with the core in this process and in its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.checkpoints import make_adapter, make_checkpoint
from tests.support.scenario import PROMPTS, Scenario, engine_args
from vllm_lora_reload import AdapterMissingError, WeightsMissingError, update_adapter

pytestmark = pytest.mark.engine

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


class Offline:
    """An `LLM`, and what it answers at first."""

    def __init__(self, llm: Any, adapter: Path) -> None:
        self.llm, self.adapter = llm, adapter
        self.base, self.adapted = self.ask(), self.ask(self.request())
        assert self.base != self.adapted

    def request(self, name: str = "adapter1", number: int = 1, path: Path | None = None) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, number, str(path or self.adapter))

    def ask(self, lora: Any = None, n: int = 1) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=float(n > 1), max_tokens=8, ignore_eos=True, n=n)
        outputs = self.llm.generate(list(PROMPTS), sampling, lora_request=lora, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def policy(self) -> Any:
        tensors = load_file(self.adapter / "adapter_model.safetensors")
        return update_adapter(self.llm, "policy", tensors, CONFIG).lora_request


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "in a process of its own"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offline]:
    from vllm import LLM, envs

    folder = tmp_path_factory.mktemp("offline")
    checkpoint = make_checkpoint(folder / "model")
    # Not of the logits: on the CPU, vLLM's kernel adds the last slot's to requests without adapter.
    adapter = make_adapter(folder / "adapter", checkpoint, target_modules=["q_proj", "o_proj", "down_proj"])
    with pytest.MonkeyPatch.context() as patched:
        # Not by the environment: vLLM remembers that once an engine runs in this process.
        patched.setattr(envs, "VLLM_ENABLE_V1_MULTIPROCESSING", request.param, raising=False)
        llm = LLM(**engine_args(Scenario(), checkpoint))
    assert hasattr(llm.llm_engine.engine_core, "engine_core") != request.param
    yield Offline(llm, adapter)
    if request.param:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def offline(started: Offline) -> Iterator[Offline]:
    """Whole before and after each test."""
    offline = started
    yield offline
    assert not offline.llm.llm_engine.has_unfinished_requests()
    assert not offline.llm.llm_engine.output_processor.request_states
    assert offline.ask() == offline.base and offline.ask(offline.request()) == offline.adapted


@pytest.mark.parametrize("n", [1, 2])
def test_refused_while_missing(offline: Offline, n: int) -> None:
    offline.llm.sleep(level=2)
    offline.llm.wake_up()
    for lora in (None, offline.request()):
        with pytest.raises(WeightsMissingError, match=r"rank 0: base weights are missing: sleep\(level=2\)"):
            offline.ask(lora, n)
    offline.llm.collective_rpc("reload_weights")


def test_nothing_waits_for_a_wake_up_that_cannot_come(offline: Offline) -> None:
    """vLLM alone goes round and round, or sits there, for ever."""
    offline.llm.sleep(level=1)
    with pytest.raises(WeightsMissingError, match="sleeps at level 1"):
        offline.ask()
    offline.llm.wake_up(["weights"])
    with pytest.raises(WeightsMissingError, match=r"KV cache sleeps\. Call wake_up\(\[\"kv_cache\"\]\)"):
        offline.ask()
    offline.llm.wake_up(["kv_cahce"])
    with pytest.raises(WeightsMissingError, match="KV cache sleeps"):
        offline.ask()
    offline.llm.wake_up(["kv_cache"])


@pytest.mark.parametrize("n", [1, 2])
def test_a_straggler_of_a_removed_adapter(offline: Offline, n: int) -> None:
    lora = offline.policy()
    assert offline.ask(lora) == offline.adapted
    offline.llm.llm_engine.remove_lora(lora.lora_int_id)
    with pytest.raises(AdapterMissingError, match="adapter 'policy' is not there"):
        offline.ask(lora, n)


def test_one_bad_request_among_good_ones(offline: Offline, tmp_path: Path) -> None:
    from vllm import SamplingParams

    loras = [None, offline.request("bad", 99, tmp_path / "nothing"), offline.request()]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with pytest.raises(AdapterMissingError, match="adapter 'bad' is not there"):
        offline.llm.generate([PROMPTS[0]] * 3, greedy, lora_request=loras, use_tqdm=False)


def test_an_adapter_is_removed_while_its_requests_run(offline: Offline, tmp_path: Path) -> None:
    """They go on with it, though its files are gone; then it is gone too."""
    from vllm import SamplingParams

    shutil.copytree(offline.adapter, tmp_path / "adapter")
    lora = offline.request("short-lived", 77, tmp_path / "adapter")
    engine = offline.llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("running", PROMPTS[0], greedy, lora_request=lora)
    found: list[Any] = engine.step()
    engine.remove_lora(77)
    shutil.rmtree(tmp_path / "adapter")
    while engine.has_unfinished_requests():
        found += engine.step()
    assert list(found[-1].outputs[0].token_ids) == offline.adapted[0]
    with pytest.raises(AdapterMissingError):
        offline.ask(lora)


def test_level_2_with_mode_keep(offline: Offline) -> None:
    from vllm import SamplingParams

    engine = offline.llm.llm_engine
    engine.add_request("kept", PROMPTS[0], SamplingParams(max_tokens=8))
    with pytest.raises(ValueError, match="kept over"):
        engine.sleep(level=2, mode="keep")
    while engine.has_unfinished_requests():
        engine.step()
    engine.sleep(level=2, mode="keep")
    engine.wake_up()
    engine.collective_rpc("reload_weights")
