"""Writing a slot: checked without writing, then copied; and slots that change hands."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.manager import adapter, make_manager
from tests.support.wrapped import Wrapper
from vllm_lora_reload import seams
from vllm_lora_reload.adapters import Adapters
from vllm_lora_reload.lora_state import LoRAState
from vllm_lora_reload.slots import SlotWrite, Stack
from vllm_lora_reload.tensors import storage_key


class Worker:
    """A ``WorkerLoRAManager`` that reads nothing."""

    lora_config = SimpleNamespace(max_lora_rank=16)

    def _load_adapter(self, request: Any) -> Any:
        raise AssertionError("nothing is to be read")


@pytest.fixture
def manager() -> Any:
    return make_manager()


@pytest.fixture
def adapters(manager: Any) -> Adapters:
    lora = LoRAState(nn.ModuleDict(manager.modules), manager, torch.device("cpu"))
    return Adapters(Worker(), manager, lora)


def stacks(manager: Any) -> dict[int, Stack]:
    return {
        storage_key(wrapper.a_stacked): Stack(name, -1, wrapper.a_stacked.shape[1:])
        for name, wrapper in manager.modules.items()
    }


def test_check_writes_nothing_and_the_copies_write_what_vllm_would(manager: Any) -> None:
    up = manager.modules["up"]
    before = up.a_stacked.clone()
    write = SlotWrite(manager, 1, adapter(9), stacks(manager), set(), strict=True)
    assert torch.equal(up.a_stacked, before)
    up.a_stacked[1] = 0
    write.into_zeroed_slot()
    before[1] = 9
    assert torch.equal(up.a_stacked, before)


@pytest.mark.parametrize("width", [2, 1, 6])
def test_weights_that_do_not_fill_the_slot_are_refused(manager: Any, width: int) -> None:
    """vLLM slices the slot to the size of what comes, and copies."""
    up = manager.modules["up"]

    def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
        up.reset_lora(index)
        up.a_stacked[index, : lora_a.shape[0]].copy_(lora_a)

    up.set_lora = set_lora
    wrong = adapter(9)
    wrong.loras["up"].lora_a = torch.ones(width)
    with pytest.raises(ValueError, match=rf"up: weights of shape \[{width}\] do not fit into a slot of \[4\]"):
        SlotWrite(manager, 1, wrong, stacks(manager), set(), strict=True)
    if width <= 4:  # vLLM takes it, and so it is brought back
        SlotWrite(manager, 1, wrong, stacks(manager), set(), strict=False).into_zeroed_slot()
        assert up.a_stacked[1, 0] == 1


def test_check_leaves_lists_of_the_wrappers_alone(manager: Any) -> None:
    """Classification heads keep the label count of each slot in one."""
    up = manager.modules["up"]
    up.labels = [5, 4, 3]
    write = up.set_lora

    def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
        write(index, lora_a, lora_b)
        up.labels[index] = 9

    up.set_lora = set_lora
    SlotWrite(manager, 1, adapter(9), stacks(manager), set(), strict=True)
    assert up.labels == [5, 4, 3]


def test_layer_that_does_more_than_copy_does_it_itself(manager: Any) -> None:
    up = manager.modules["up"]

    def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
        up.a_stacked[index].copy_(lora_a)
        up.a_stacked[index].mul_(2)

    up.set_lora = set_lora
    write = SlotWrite(manager, 0, adapter(9), stacks(manager), set(), strict=True)
    write.into_zeroed_slot()
    assert up.a_stacked[:, 0].tolist() == [18, 3, 1]


def test_slot_given_away_forgets_the_mapping(adapters: Adapters, manager: Any) -> None:
    """Before 0.26 vLLM takes a batch like the last one as done, whatever has happened to the slots."""
    manager._last_mapping = "mapping"
    manager.activate_adapter(2)
    assert manager._last_mapping == "mapping", "it has its slot"
    manager.activate_adapter(4)
    assert manager._last_mapping is None
    manager._last_mapping = "mapping"
    manager.remove_all_adapters()
    seams.register_adapter(manager, adapter(5))
    manager.activate_adapter(5)
    assert manager._last_mapping is None, "the table is watched after it was made anew"


def test_slots_assigned_while_unmapped_are_written_at_wake_up(adapters: Adapters, manager: Any) -> None:
    up = manager.modules["up"]
    adapters.slept()
    before = up.a_stacked.clone()
    manager.activate_adapter(4)
    assert torch.equal(up.a_stacked, before) and seams.slots(manager) == [2, 3, 4]
    adapters.woke()
    assert torch.equal(up.a_stacked, before)
    adapters.put_pending()
    assert up.a_stacked[:, 0].tolist() == [2, 3, 4]


def test_put_back_copies_what_was_checked_once(
    adapters: Adapters, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = manager.modules["up"]
    for _ in range(2):
        adapters.lora.save()
        up.a_stacked.fill_(-1)
        adapters.put_back()
        assert up.a_stacked[:, 0].tolist() == [2, 3, 1]
        monkeypatch.setattr(seams, "write_slot", lambda *args: pytest.fail("the second time needs no vLLM code"))
    monkeypatch.undo()
    seams.register_adapter(manager, replaced := adapter(2))
    replaced.loras["up"].lora_a.fill_(7)
    adapters.lora.save()
    adapters.put_back()
    assert up.a_stacked[:, 0].tolist() == [7, 3, 1], "another adapter under the same id is another adapter"


def test_slot_that_fails_is_zero_and_told_of(adapters: Adapters, manager: Any) -> None:
    up: Wrapper = manager.modules["up"]
    write = up.set_lora

    def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
        write(index, lora_a, lora_b)
        if index == 1:
            raise RuntimeError("no room")

    up.set_lora = set_lora  # type: ignore[method-assign]
    adapters.put_back()
    assert adapters.broken == {3: "RuntimeError: no room"}
    assert up.a_stacked[:, 0].tolist() == [2, 0, 1]
    up.set_lora = write  # type: ignore[method-assign]
    adapters.put_back()
    assert adapters.broken == {} and up.a_stacked[:, 0].tolist() == [2, 3, 1]
