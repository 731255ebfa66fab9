"""Writing a slot: checked without writing, then copied; and slots that change hands."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.manager import adapter, make_manager
from tests.support.wrapped import Wrapper
from vllm_lora_reload import adapters as adapters_module
from vllm_lora_reload import seams
from vllm_lora_reload.adapters import Adapters, Staged
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


# --- What vLLM takes on trust ---------------------------------------------------------------------------------


def named(*modules: str) -> Any:
    """An adapter for these modules."""
    made = adapter(9)
    made.loras = dict.fromkeys(modules, made.loras["up"])
    return made


def test_modules_that_the_model_has_not(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong beginnings of names: of compiled or distributed models, or of the wrong part of a multimodal one."""
    place = lambda *modules: seams.modules_without_a_place(manager, named(*modules))  # noqa: E731
    manager.model = nn.ModuleDict({"model": nn.ModuleDict({"up": manager.modules["up"], "eye": nn.Linear(1, 1)})})
    manager.modules = {"model.up": manager.modules["up"]}
    assert place("model.up") == place("model.up.base_layer") == place("model.up", "model.eye") == []
    assert place("model.up", "module.model.up", "_orig_mod.x") == ["_orig_mod.x", "module.model.up"]
    assert place("model.eye") == ["model.eye"], "none of them has LoRA"
    assert place("up", "model.up") == []  # beside the model's own parts
    manager.is_pooling_model = True
    assert place("up") == []
    manager.is_pooling_model = False

    class Elsewhere(nn.Identity):
        """A layer of another pipeline stage."""

    find = seams._find
    monkeypatch.setattr(
        seams, "_find", lambda module, name: Elsewhere if name == "PPMissingLayer" else find(module, name)
    )
    manager.model["model"]["next"] = Elsewhere()
    assert place("model.next.attention.q_proj") == []
    assert place("model.up", "model.nextdoor.q_proj") == ["model.nextdoor.q_proj"]


def test_an_adapter_without_a_place_is_refused(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Awake and asleep."""
    adapters.worker_manager.load_unnoted = lambda request: named("module.up")
    monkeypatch.setattr(seams, "merge_packed_modules", lambda manager, adapter: None)
    monkeypatch.setattr(adapters_module, "_check_pair", lambda module, weights, experts: None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    request = seams.lora_request("a", 9, str(tmp_path))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no place for module\.up"):
            adapters._check("a", request, False)
        adapters.slept()
    adapters.woke()


@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern", "lora_bias", "use_qalora"])
def test_settings_that_vllm_leaves_out(
    setting: str, adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.32 it scales all modules by one number, say."""
    monkeypatch.setattr(seams, "peft_settings", lambda: {"r"})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 8, setting: {"up": 16}}))
    request = seams.lora_request("a", 9, str(tmp_path))
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {setting}.*: this vLLM would leave it out"):
        adapters._check("a", request, False)
    monkeypatch.setattr(seams, "peft_settings", lambda: {"r", setting})
    with pytest.raises(AssertionError, match="nothing is to be read"):
        adapters._check("a", request, False)


def test_settings_that_vllm_knows() -> None:
    assert {"r", "lora_alpha"} <= seams.peft_settings()


def test_an_id_that_has_gone_to_another_name(adapters: Adapters, manager: Any) -> None:
    """As two front ends can choose it: the first one has it."""
    adapters._staged = {name: Staged(name, adapter(5), None) for name in ("first", "second")}
    assert adapters.commit("first") == 1
    assert adapters.commit("second") == 0
    assert adapters.known() == {"first": {"lora_int_id": 5, "version": 1}}
    manager.remove_adapter(5)
    adapters._staged["third"] = Staged("third", adapter(5), None)
    assert adapters.commit("third") == 2


def test_a_rank_that_cannot_read_takes_part(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the decision about each adapter whose files have changed, as the first rank has seen."""
    said: list[bool] = []
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: said.append(value) or value)
    monkeypatch.setattr(seams, "same_on_all_ranks", lambda value: [2, 3])
    adapters.absent()
    assert said == [False, False]
