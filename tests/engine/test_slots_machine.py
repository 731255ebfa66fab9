"""Adapters added, removed, evicted, replaced and put to sleep in any order: no batch gets another one's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file
from vllm.lora.layers import LoRAMapping

from tests.support.engine import Engine
from vllm_lora_reload import AdapterRefusedError, update_adapter

pytestmark = pytest.mark.engine
SLOTS = 2
NAMES = ("a", "b", "c", "d")
RANK = 8
MODULE = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Fewer slots than adapters, and host memory for one adapter fewer than there are."""
    return Engine(tmp_path_factory.mktemp("machine"), max_loras=SLOTS, max_cpu_loras=len(NAMES) - 1)


def weights(template: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """An adapter that adds `version` times the sum of a row's first `RANK` inputs to the outputs of one layer."""
    a = torch.eye(RANK, template[MODULE.format("A")].shape[1])
    b = torch.full((template[MODULE.format("B")].shape[0], RANK), float(version))
    return {MODULE.format("A"): a, MODULE.format("B"): b}


def machine(engine: Engine) -> type[RuleBasedStateMachine]:
    manager = engine.runner.lora_manager
    layer = engine.model.model.layers[0].mlp.down_proj
    template = load_file(engine.folder / "adapter1" / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": ["down_proj"], "peft_type": "LORA"}
    inputs = torch.ones(4, template[MODULE.format("A")].shape[1], dtype=torch.bfloat16)

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            out = layer(inputs)
        return (out[0] if isinstance(out, tuple) else out).float()

    class Machine(RuleBasedStateMachine):
        """`wanted` is the simple model: which version each adapter has, whatever slots and caches do."""

        def __init__(self) -> None:
            super().__init__()
            self.wanted: dict[str, int] = {}
            self.requests: dict[str, Any] = {}
            self.next_version = 1
            self.asleep = False

        @rule(name=st.sampled_from(NAMES))
        def update(self, name: str) -> None:
            self.wanted[name] = self.next_version
            done = update_adapter(engine.llm, name, weights(template, self.next_version), config)
            self.requests[name] = done.lora_request
            self.next_version = 1 + self.next_version % 20  # small numbers are exact in bfloat16

        @rule(name=st.sampled_from(NAMES))
        def refused_update(self, name: str) -> None:
            bad = weights(template, 1) | {MODULE.format("B"): torch.zeros(3, RANK)}
            with pytest.raises(AdapterRefusedError):
                update_adapter(engine.llm, name, bad, config)

        @precondition(lambda self: self.wanted)
        @rule(data=st.data())
        def remove(self, data: Any) -> None:
            name = data.draw(st.sampled_from(sorted(self.wanted)))
            engine.llm.llm_engine.remove_lora(self.requests[name].lora_int_id)
            del self.wanted[name], self.requests[name]

        @precondition(lambda self: not self.asleep)
        @rule(level=st.sampled_from((1, 2)))
        def sleep(self, level: int) -> None:
            engine.llm.sleep(level=level)
            self.asleep = True

        @precondition(lambda self: self.asleep)
        @rule()
        def wake(self) -> None:
            engine.llm.wake_up()
            engine.reload()
            self.asleep = False

        @precondition(lambda self: self.wanted and not self.asleep)
        @rule(data=st.data())
        def step(self, data: Any) -> None:
            """A batch of four rows; often with the mapping of the last one, which vLLM then takes as done.

            Each row has an adapter: to those without, vLLM's CPU kernel adds the last slot.
            """
            names = data.draw(st.lists(st.sampled_from(sorted(self.wanted)), min_size=4, max_size=4))
            chosen = sorted(set(names))[:SLOTS]
            rows = [name if name in chosen else chosen[0] for name in names]
            ids = tuple(self.requests[name].lora_int_id for name in rows)
            manager.set_active_adapters(
                {self.requests[name] for name in chosen}, LoRAMapping(ids, ids, is_prefill=True)
            )
            got = outputs()
            manager.set_active_adapters(set(), LoRAMapping((0,) * 4, (0,) * 4, is_prefill=True))
            base = outputs()
            manager._adapter_manager._last_mapping = LoRAMapping(ids, ids, is_prefill=True)
            added = [RANK * self.wanted[name] for name in rows]
            assert torch.allclose(got - base, torch.tensor(added)[:, None].float(), rtol=0.02, atol=0.5)

        @invariant()
        def bookkeeping(self) -> None:
            slots = [number for number in manager._adapter_manager.lora_index_to_id if number is not None]
            assert len(slots) == len(set(slots)) and set(slots) <= set(manager.list_adapters())

        def teardown(self) -> None:
            if self.asleep:
                self.wake()
            for request in self.requests.values():
                engine.llm.llm_engine.remove_lora(request.lora_int_id)

    return Machine


def test_any_order(engine: Engine) -> None:
    run_state_machine_as_test(
        machine(engine),
        settings=settings(
            max_examples=30,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
