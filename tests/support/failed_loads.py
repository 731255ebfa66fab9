"""Loads that fail on every rank of one engine, in a process of its own, and what the engine says afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpoints import PEFT_CONFIG, make_adapter, make_checkpoint
from .scenario import Cycle, Report, Scenario, asker, differing, engine_args, main

MODULE = "tests.support.failed_loads"
IN_A_ROW = 12  # vLLM's queues hold ten replies


def observe(scenario: Scenario, folder: Path) -> Report:
    """One cycle for every fault. ``same`` says what was as it should be; so does the key of what was not, in words."""
    import torch
    from safetensors.torch import load_file
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from vllm_lora_reload import AdapterRefusedError, WeightsMissingError, update_adapter

    checkpoint = make_checkpoint(folder / "model", scenario.family, shards=3)
    make_adapter(folder / "adapter", checkpoint, seed=1)
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    request = LoRARequest("adapter", 1, str(folder / "adapter"))
    llm = LLM(**engine_args(scenario, checkpoint))
    ranks = range(scenario.engine["tensor_parallel_size"])
    ask = asker(llm, scenario)
    requests = {"base": None, "adapter": request}
    for who in requests.values():
        ask(who)
    before = {name: ask(who) for name, who in requests.items()}
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    whole = shard.read_bytes()

    def told(call: Callable[[], Any], kind: type[Exception]) -> str:
        try:
            return f"no error: {call()}"
        except kind as error:
            return str(error)
        except Exception as error:
            return f"wrong error: {type(error).__name__}: {error}"

    def failing_load(**kwargs: Any) -> str:
        return told(lambda: llm.collective_rpc("reload_weights", kwargs=kwargs), RuntimeError)

    def refused_update() -> str:
        spoiled = weights | {name: torch.full_like(weights[name], torch.nan) for name in list(weights)[:1]}
        return told(lambda: update_adapter(llm, "spoiled", spoiled, PEFT_CONFIG), AdapterRefusedError)

    def expect(cycle: Cycle, what: str, seen: Any, right: bool) -> None:
        cycle.same[what if right else f"{what}, not: {seen}"[:500]] = right

    def judge(cycle: Cycle, state: str) -> None:
        """Calls in between are what mixed-up replies would be taken for."""
        for _ in range(2):
            found = llm.collective_rpc("lora_reload_status")
            states = [answer.get("state") if isinstance(answer, dict) else answer for answer in found]
            expect(cycle, f"all ranks say {state}", states, states == [state for _ in ranks])
        why = refused_update()
        expect(cycle, "every rank's refusal is told", why, all(f"rank {rank}: " in why for rank in ranks))

    def finish(cycle: Cycle, digests: list[dict[str, str]]) -> None:
        cycle.bytes_differ = differing(digests, llm.collective_rpc("pool_digests"))
        for name, who in requests.items():
            cycle.same[name] = ask(who) == before[name]

    def corrupt_shard(cycle: Cycle) -> None:
        shard.unlink()  # others may have it mapped
        shard.write_bytes(b"\xff" * len(whole))
        error = failing_load()
        expect(cycle, "the file is named", error, shard.name in error)
        judge(cycle, "missing")
        why = told(lambda: ask(request), WeightsMissingError)
        expect(cycle, "requests are refused", why, why.startswith("rank 0: "))
        shard.unlink()
        shard.write_bytes(whole)
        llm.collective_rpc("reload_weights")
        judge(cycle, "complete")

    def no_such_path(cycle: Cycle) -> None:
        """Nothing is written, so the engine goes on answering."""
        for _ in range(IN_A_ROW):
            error = failing_load(weights_path=str(folder / "nowhere"))
            expect(cycle, "the folder is named", error, "nowhere" in error)
        judge(cycle, "complete")

    cycles = []
    for fault in (corrupt_shard, no_such_path):
        cycles.append(cycle := Cycle())
        try:
            digests = llm.collective_rpc("pool_digests")  # anew, as punica metadata is that of the last batch
            fault(cycle)
            finish(cycle, digests)
        except Exception as error:
            cycle.error = f"{type(error).__name__}: {error}"[:1000]
    return Report(0, [], len({json.dumps(answer) for answer in before.values()}), cycles)


if __name__ == "__main__":
    main(*sys.argv[1:], observe=observe)
