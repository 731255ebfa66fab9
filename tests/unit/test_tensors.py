"""Finding tensors in plain attributes, and carrying them over the loss of their memory."""

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from vllm_lora_reload.tensors import UnregisteredTensors, modules_beside, storage_key, tensors_of, whole_storage

CPU = torch.device("cpu")


def ramp(start: float = 1) -> torch.Tensor:
    return torch.arange(4.0) + start


@dataclass
class Metadata:
    indices: torch.Tensor
    count: int = 3
    absent: torch.Tensor | None = None
    late: torch.Tensor = field(init=False)


class Helper:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Slotted:
    __slots__ = ("tensor",)


def wipe(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        whole_storage(tensor).fill_(0xFF)


# --- tensors_of ---------------------------------------------------------------------------------------------------


def test_tensors_in_attributes_and_containers() -> None:
    one, two, three, four, five = (ramp(n) for n in range(5))
    owner = nn.Module()
    owner.plain = one
    owner.pair = (two, "text")
    owner.listed = [[three], None]
    owner.mapped = {"key": {"inner": (four,)}}
    owner.metadata = Metadata(five)
    found = [(name, id(tensor)) for name, tensor in tensors_of(owner)]
    expected = [("plain", one), ("pair", two), ("listed", three), ("mapped", four), ("metadata", five)]
    assert found == [(name, id(tensor)) for name, tensor in expected]


def test_dataclass_in_a_container() -> None:
    tensor = ramp()
    assert [t is tensor for _, t in tensors_of(Helper([Metadata(tensor)]))] == [True]  # type: ignore[arg-type]


def test_dataclass_type_holds_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metadata, "indices", ramp(), raising=False)
    assert list(tensors_of(Helper(Metadata))) == []  # type: ignore[arg-type]


def test_registered_tensors_and_submodules_are_left_out() -> None:
    owner = nn.Linear(2, 2)
    owner.register_buffer("buffer", ramp())
    owner.child = nn.Linear(2, 2)
    owner.child.plain = ramp()
    owner.children_too = [owner.child]
    assert list(tensors_of(owner)) == []


def test_plain_objects_are_looked_into_one_level_only() -> None:
    assert [name for name, _ in tensors_of(Helper(ramp()))] == ["tensor"]
    assert list(tensors_of(Helper(Helper(ramp())))) == []  # type: ignore[arg-type]


# --- Storages -----------------------------------------------------------------------------------------------------


def test_views_share_a_storage_key() -> None:
    tensor = ramp()
    assert storage_key(tensor[1:]) == storage_key(tensor.view(2, 2)) == storage_key(tensor)
    assert storage_key(tensor.clone()) != storage_key(tensor)


def test_whole_storage_is_all_bytes_of_a_view_in_place() -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    flat = whole_storage(tensor[2:4])
    assert flat.dtype == torch.uint8 and flat.shape == (12,)
    assert torch.equal(flat.view(torch.int16), tensor)
    flat.zero_()
    assert not tensor.any()


# --- UnregisteredTensors ------------------------------------------------------------------------------------------


def owner_with(**attributes: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(model[0], name, value)
    return model


@pytest.mark.parametrize("attribute", ["anything", "quant_method", "impl", "scheme"])
def test_tensors_are_restored(attribute: str) -> None:
    tensor = ramp()
    model = owner_with(**{attribute: tensor if attribute == "anything" else Helper(tensor)})
    unregistered = UnregisteredTensors(model, CPU, known=set())
    unregistered.save()
    wipe(tensor)
    assert tensor.isnan().all()
    unregistered.restore()
    assert torch.equal(tensor, ramp())


def test_other_helpers_and_those_without_attributes_are_left_alone() -> None:
    tensor = ramp()
    unregistered = UnregisteredTensors(owner_with(impl=Slotted(), friend=Helper(tensor)), CPU, known=set())
    unregistered.save()
    wipe(tensor)
    unregistered.restore()
    assert tensor.isnan().all()


def test_what_is_saved_is_the_value_at_that_time() -> None:
    tensor = ramp()
    unregistered = UnregisteredTensors(owner_with(t=tensor), CPU, known=set())
    for start in (10, 20):
        tensor.copy_(ramp(start))
        unregistered.save()
        wipe(tensor)
        unregistered.restore()
        assert torch.equal(tensor, ramp(start))


def test_restoring_twice_does_not_bring_old_values_back() -> None:
    tensor = ramp()
    unregistered = UnregisteredTensors(owner_with(t=tensor), CPU, known=set())
    unregistered.save()
    unregistered.restore()
    tensor.fill_(9)
    unregistered.restore()
    assert (tensor == 9).all()


def test_known_storages_are_skipped() -> None:
    known, other = ramp(), ramp()
    model = owner_with(a=known[2:], b=other)
    unregistered = UnregisteredTensors(model, CPU, known={storage_key(known)})
    unregistered.save()
    wipe(known, other)
    unregistered.restore()
    assert known.isnan().all() and torch.equal(other, ramp())


def test_registered_storages_are_skipped() -> None:
    model = owner_with()
    model[0].register_buffer("buffer", ramp())
    model[0].of_parameter, model[0].of_buffer = model[0].weight.data, model[0].buffer[1:]
    unregistered = UnregisteredTensors(model, CPU, known=set())
    unregistered.save()
    wipe(model[0].weight, model[0].buffer)
    unregistered.restore()
    assert model[0].weight.isnan().all() and model[0].buffer.isnan().all()


def test_modules_in_plain_attributes_only() -> None:
    """The transformers backend keeps attention layers in a dict; vLLM saves no buffers of theirs at sleep."""
    model = owner_with()
    attention, inner = nn.Linear(2, 2), nn.Module()
    inner.register_buffer("scale", ramp())
    inner.plain = ramp(5)
    attention.children_too = [(inner,)]
    model[0].instances = {0: attention, 1: model}
    assert modules_beside(model) == [attention, inner]
    unregistered = UnregisteredTensors(model, CPU, known=set())
    before = attention.weight.detach().clone()
    unregistered.save()
    wipe(attention.weight, inner.scale, inner.plain, model[0].weight)
    unregistered.restore()
    assert torch.equal(inner.scale, ramp()) and torch.equal(inner.plain, ramp(5))
    assert torch.equal(attention.weight, before) and model[0].weight.isnan().all()


def test_what_parameters_hold_in_attributes() -> None:
    """As bitsandbytes' quantization states do, one in another."""
    model = owner_with()
    weight: Any = model[0].weight
    inner, outer, plain = ramp(), ramp(5), ramp(9)
    state = Helper(outer)
    state.nested = Helper(inner)  # type: ignore[attr-defined]
    weight.quant_state, weight.plain, weight.weight_loader, weight.layer = {0: state}, [plain], Helper, model
    unregistered = UnregisteredTensors(model, CPU, known=set())
    unregistered.save()
    wipe(inner, outer, plain, weight)
    unregistered.restore()
    assert torch.equal(inner, ramp()) and torch.equal(outer, ramp(5)) and torch.equal(plain, ramp(9))
    assert weight.isnan().all()


def test_the_known_set_of_the_caller_is_not_changed() -> None:
    known: set[int] = set()
    UnregisteredTensors(owner_with(), CPU, known)
    assert known == set()


def test_a_view_brings_back_its_whole_storage() -> None:
    tensor = ramp()
    model = owner_with(view=tensor[2:3])
    unregistered = UnregisteredTensors(model, CPU, known=set())
    unregistered.save()
    wipe(tensor)
    unregistered.restore()
    assert torch.equal(tensor, ramp())


def test_a_shared_storage_is_saved_once() -> None:
    tensor = ramp()
    unregistered = UnregisteredTensors(owner_with(a=tensor, b=tensor[1:], c=[tensor]), CPU, known=set())
    unregistered.save()
    assert [saved.numel() for _, saved in unregistered._saved] == [16]


def test_tensors_elsewhere_and_empty_ones_are_skipped() -> None:
    model = owner_with(a=ramp().to("meta"), b=torch.empty(0), c=ramp())
    for device, sizes in ((CPU, [16]), (torch.device("cuda"), [])):
        unregistered = UnregisteredTensors(model, device, known=set())
        unregistered.save()
        assert [saved.numel() for _, saved in unregistered._saved] == sizes


def test_a_tensor_freed_before_sleep_is_ignored() -> None:
    model = owner_with(old=ramp(), kept=ramp())
    unregistered = UnregisteredTensors(model, CPU, known=set())
    model[0].old = new = ramp(50)
    gc.collect()
    unregistered.save()
    wipe(new, model[0].kept)
    unregistered.restore()
    assert new.isnan().all() and torch.equal(model[0].kept, ramp())


def test_nothing_is_kept_alive_between_cycles() -> None:
    model = owner_with(t=ramp())
    unregistered = UnregisteredTensors(model, CPU, known=set())
    unregistered.save()
    unregistered.restore()
    del model[0].t
    gc.collect()
    unregistered.save()
    assert unregistered._saved == []


def test_a_tensor_replaced_while_asleep_stays_replaced() -> None:
    model = owner_with(t=ramp())
    unregistered = UnregisteredTensors(model, CPU, known=set())
    unregistered.save()
    model[0].t = ramp(50)
    unregistered.restore()
    assert torch.equal(model[0].t, ramp(50))
