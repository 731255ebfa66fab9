"""`AsyncLLM`: requests are refused while base weights are missing, the engine lives on, and adapters are updated."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import make_adapter, make_checkpoint
from tests.support.scenario import PROMPTS, Scenario, engine_args
from vllm_lora_reload import AdapterMissingError, AdapterRefusedError, WeightsMissingError, update_adapter

pytestmark = pytest.mark.engine


async def cycle(checkpoint: Path, adapter: Path) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(Scenario(), checkpoint)))
    numbers = iter(range(1000))

    async def ask(request: Any) -> list[int]:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        tokens: list[int] = []
        stream = engine.generate(PROMPTS[0], greedy, request_id=str(next(numbers)), lora_request=request)
        async for output in stream:
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        requests = (None, LoRARequest("adapter", 1, str(adapter)))
        before = [await ask(request) for request in requests]
        assert before[0] != before[1]
        await engine.sleep(level=2)
        await engine.wake_up(["weights"])
        await engine.wake_up(["kv_cache"])
        for request in requests:
            with pytest.raises(WeightsMissingError, match=r"base weights are missing: sleep\(level=2\)"):
                await ask(request)
        await engine.collective_rpc("reload_weights")
        assert [await ask(request) for request in requests] == before
        tensors = load_file(adapter / "adapter_model.safetensors")
        config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
        updated = await update_adapter(engine, "policy", tensors, config)
        assert await ask(updated.lora_request) == before[1]
        nothing = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        assert (await update_adapter(engine, "policy", nothing, config)).version == updated.version + 1
        assert await ask(updated.lora_request) == before[0]
        with pytest.raises(AdapterRefusedError, match="not finite"):
            await update_adapter(engine, "policy", {n: t / 0 for n, t in tensors.items()}, config)
        assert await ask(updated.lora_request) == before[0]
        await engine.remove_lora(updated.lora_int_id)
        with pytest.raises(AdapterMissingError, match="'policy' is not there"):
            await ask(updated.lora_request)
        running = (await update_adapter(engine, "policy", tensors, config)).lora_request
        assert running.lora_int_id != updated.lora_int_id
        answer = asyncio.ensure_future(ask(running))
        await asyncio.sleep(0)  # it is on its way, or runs, when its adapter goes
        await engine.remove_lora(running.lora_int_id)
        with contextlib.suppress(AdapterMissingError):  # or was not let in
            assert await answer == before[1]
        assert await ask(requests[1]) == before[1]
    finally:
        engine.shutdown()


def test_refusal_and_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    checkpoint = make_checkpoint(tmp_path / "model")
    asyncio.run(cycle(checkpoint, make_adapter(tmp_path / "adapter", checkpoint)))
