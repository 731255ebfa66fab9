"""LoRA state brought back: exactly after a loss, and to something right after anything else."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.manager import make_manager
from tests.support.wrapped import Wrapper
from vllm_lora_reload import seams
from vllm_lora_reload.errors import SeamMissingError
from vllm_lora_reload.lora_state import LoRAState
from vllm_lora_reload.tensors import storage_key, whole_storage


class Marked(Wrapper):
    """A wrapper that marks in a small tensor which slots hold an adapter, as that of MoE experts does."""

    def __init__(self, base_layer: nn.Module, slots: int, width: int) -> None:
        super().__init__(base_layer, slots, width)
        self.adapter_enabled = torch.zeros(slots + 1, dtype=torch.int)

    def reset_lora(self, index: int) -> None:
        super().reset_lora(index)
        self.adapter_enabled[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        super().set_lora(index, lora_a, lora_b)
        self.adapter_enabled[index] = 1


@pytest.fixture
def manager() -> Any:
    made = make_manager()
    for number in (1, 2, 3):
        made.deactivate_adapter(number)
    made.modules["up"] = Marked(nn.Linear(2, 2), slots=3, width=4)
    for number in (2, 3):
        made.activate_adapter(number)
    return made


@pytest.fixture
def state(manager: Any) -> LoRAState:
    return LoRAState(nn.ModuleDict(manager.modules), manager, torch.device("cpu"))


def writer(manager: Any) -> Any:
    return lambda index, number, known: seams.write_slot(manager, index, seams.registered(manager)[number])


def wipe(state: LoRAState) -> None:
    for tensor in (*state.stacks, *state.metadata):
        whole_storage(tensor).fill_(0xFF)


def test_marks_and_stacks_are_told_apart(state: LoRAState, manager: Any) -> None:
    sizes = sorted(tensor.numel() for tensor in state.metadata), sorted(tensor.numel() for tensor in state.stacks)
    assert sizes == ([16], [48, 48])


def test_after_a_loss_marks_are_what_they_were_even_of_free_slots(state: LoRAState, manager: Any) -> None:
    """vLLM's warm-up forgets to take back the marks of its dummy adapters."""
    up = manager.modules["up"]
    up.adapter_enabled[2] = 1
    before = up.adapter_enabled.clone(), up.a_stacked.clone()
    state.save()
    state.lost = True
    wipe(state)
    state.reset(writer(manager))
    assert torch.equal(up.adapter_enabled, before[0]) and torch.equal(up.a_stacked, before[1])
    assert not state.lost


class Viewed(Wrapper):
    """A wrapper with other views of its stacks, made later, as those of experts and embeddings have."""

    def __init__(self, base_layer: nn.Module, slots: int, width: int) -> None:
        super().__init__(base_layer, slots, width)
        self.b_stacked = torch.zeros(slots, 2, width)
        self.views_stacked = [self.a_stacked[0], *self.b_stacked[:, 0], self.b_stacked[:, :1]]
        self.b_stacked_2d = self.b_stacked.view(-1, self.b_stacked.shape[-1])


def test_a_slot_is_cleared_and_no_other(manager: Any) -> None:
    viewed = manager.modules["up"] = Viewed(nn.Linear(2, 2), slots=3, width=4)
    state = LoRAState(nn.ModuleDict(manager.modules), manager, torch.device("cpu"))
    for index in range(3):
        viewed.a_stacked.fill_(7), viewed.b_stacked.fill_(7)
        state.clear_slot(index)
        for stack in (viewed.a_stacked, viewed.b_stacked):
            assert not stack[index].any()
            assert (stack == 7).sum() == stack.numel() * 2 // 3
    assert state.stack_of[storage_key(viewed.a_stacked)].slot == viewed.a_stacked.shape[1:]


def test_a_stack_without_slots_is_not_guessed_at(manager: Any) -> None:
    odd = manager.modules["up"] = Wrapper(nn.Linear(2, 2), slots=3, width=4)
    odd.a_stacked = torch.zeros(5, 4)
    with pytest.raises(SeamMissingError, match="a_stacked has 3 LoRA slots"):
        LoRAState(nn.ModuleDict(manager.modules), manager, torch.device("cpu"))


def test_without_a_save_free_slots_are_unmarked(state: LoRAState, manager: Any) -> None:
    up = manager.modules["up"]
    state.save()
    state.reset(writer(manager))
    manager.deactivate_adapter(3)
    up.adapter_enabled[2] = 1
    wipe(state)
    state.reset(writer(manager))
    assert up.adapter_enabled.tolist() == [1, 0, 0, 0]
    assert up.a_stacked[:, 0].tolist() == [2, 0, 0]
