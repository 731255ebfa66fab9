"""Adapters of every kind over sleep cycles on one engine, in a process of its own.

Four adapters: ``pinned``; ``gone``, whose files are deleted once it is loaded; ``changed``, whose files become another
adapter's before each wake-up; ``tensors``, which has no files and is updated while the engine sleeps. Awake, an update
of it fails on the last rank while it writes, and every rank has to keep what it had.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

from .checkpoints import PEFT_CONFIG, make_adapter, make_checkpoint
from .scenario import Cycle, Report, Scenario, asker, engine_args, main

MODULE = "tests.support.adapter_cycles"


def observe(scenario: Scenario, folder: Path) -> Report:
    """Each cycle's ``same`` says of every adapter whether it answers as the weights that it should have now."""
    from safetensors.torch import load_file
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from vllm_lora_reload import AdapterRefusedError, update_adapter

    checkpoint = make_checkpoint(folder / "model", scenario.family)
    for seed in (1, 2):
        make_adapter(folder / f"weights{seed}", checkpoint, seed=seed)
    weights = {seed: load_file(folder / f"weights{seed}" / "adapter_model.safetensors") for seed in (1, 2)}
    names = ("pinned", "gone", "changed")
    for name in names:
        shutil.copytree(folder / "weights1", folder / name)
    llm = LLM(**engine_args(dataclasses.replace(scenario, adapters=6), checkpoint))
    ask = asker(llm, scenario)
    requests = {name: LoRARequest(name, number, str(folder / name)) for number, name in enumerate(names, 1)}
    requests["tensors"] = update_adapter(llm, "tensors", weights[1], PEFT_CONFIG).lora_request
    base = ask(None)
    for request in requests.values():
        ask(request)
    expected = {}
    for seed in (1, 2):
        reference = update_adapter(llm, "reference", weights[seed], PEFT_CONFIG).lora_request
        ask(reference)
        expected[seed] = ask(reference)
    llm.llm_engine.pin_lora(1)
    shutil.rmtree(folder / "gone")
    registered = sorted(llm.llm_engine.list_loras())

    def run_cycle(number: int) -> Cycle:
        cycle = Cycle(bytes_differ=[])
        now = 1 + (number + 1) % 2
        try:
            llm.sleep(level=2)
            new = folder / f"new{number}"
            shutil.copytree(folder / f"weights{now}", new)
            shutil.rmtree(folder / "changed")
            new.rename(folder / "changed")
            update_adapter(llm, "tensors", weights[now], PEFT_CONFIG)
            llm.wake_up(["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(["kv_cache"])
            should = {"pinned": 1, "gone": 1, "changed": now, "tensors": now}
            llm.collective_rpc("fail_at_commit", args=(llm.llm_engine.vllm_config.parallel_config.world_size - 1,))
            try:
                update_adapter(llm, "tensors", weights[3 - now], PEFT_CONFIG)
            except AdapterRefusedError as refused:
                cycle.same["commit failed on the last rank alone"] = str(refused).count("OutOfMemoryError: 2 GiB") == 1
            cycle.same |= {name: ask(requests[name]) == expected[seed] for name, seed in should.items()}
            cycle.same["base"] = ask(None) == base
            cycle.same["list_loras"] = sorted(llm.llm_engine.list_loras()) == registered
        except Exception as error:
            cycle.error = f"{type(error).__name__}: {error}"[:1000]
        return cycle

    cycles: list[Cycle] = []
    while len(cycles) < scenario.cycles and not (cycles and cycles[-1].error):
        cycles.append(run_cycle(len(cycles)))
    answers = [base, *expected.values()]
    return Report(0, [], len({json.dumps(answer) for answer in answers}), cycles)


if __name__ == "__main__":
    main(*sys.argv[1:], observe=observe)
