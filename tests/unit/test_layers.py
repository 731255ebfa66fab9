"""LoRA layers that can reload: only what the release lacks is added."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.lora import utils as lora_utils
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA

from tests.support.wrapped import Wrapper
from vllm_lora_reload.layers import DelegatesLoading, RebuildsLogitsMapping, registered, reloadable

CLASSES = sorted(lora_utils._all_lora_classes, key=lambda cls: cls.__name__)
MAPPING = [0, 1, 4, 6, 2, 3, 5, 7]


def method_of(cls: type) -> str:
    """The method that a reloadable class must have."""
    return "reset_sharded_to_full_mapping" if issubclass(cls, LogitsProcessorWithLoRA) else "load_weights"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_reloadable_adds_what_this_release_lacks(cls: type) -> None:
    method = method_of(cls)
    lacking = not hasattr(cls, method)
    made = reloadable(cls)
    assert (made is cls) == (not lacking)
    assert issubclass(made, cls) and hasattr(made, method)
    assert made.__name__ == cls.__name__ and made.__doc__ == cls.__doc__
    assert reloadable(made) is made


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_reloadable_on_a_release_without_any(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BaseLayerWithLoRA, "load_weights", raising=False)
    monkeypatch.delattr(LogitsProcessorWithLoRA, "reset_sharded_to_full_mapping", raising=False)
    made = reloadable(cls)
    assert made is not cls and issubclass(made, cls) and made.__name__ == cls.__name__
    mixin = RebuildsLogitsMapping if issubclass(cls, LogitsProcessorWithLoRA) else DelegatesLoading
    assert getattr(made, method_of(cls)) is getattr(mixin, method_of(cls))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_reloadable_on_a_release_with_all(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseLayerWithLoRA, "load_weights", lambda self, weights: (), raising=False)
    monkeypatch.setattr(LogitsProcessorWithLoRA, "reset_sharded_to_full_mapping", lambda self: None, raising=False)
    assert reloadable(cls) is cls


def test_logits_processor_gets_no_load_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It owns no weight, and its base layer is not in the checkpoint."""
    monkeypatch.delattr(BaseLayerWithLoRA, "load_weights", raising=False)
    assert not hasattr(reloadable(LogitsProcessorWithLoRA), "load_weights")


def test_registered_is_for_the_length_of_the_block() -> None:
    before = lora_utils._all_lora_classes, lora_utils.LogitsProcessorWithLoRA
    with registered():
        inside = (*lora_utils._all_lora_classes, lora_utils.LogitsProcessorWithLoRA)
        assert [cls for cls in inside if not hasattr(cls, method_of(cls))] == []
        assert [cls.__name__ for cls in inside] == [cls.__name__ for cls in (*before[0], before[1])]
    assert lora_utils._all_lora_classes is before[0] and lora_utils.LogitsProcessorWithLoRA is before[1]


# --- Delegation ---------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """A base layer with a loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.given += weights
        return {"qkv.weight"}


def delegating(base_layer: nn.Module) -> Any:
    """A wrapper with our mixin, also on releases that would not need it."""
    return type("Wrapper", (DelegatesLoading, Wrapper), {})(base_layer)


def test_base_layer_with_a_loader_is_asked() -> None:
    base, weights = Fused(), [("q.weight", torch.ones(1))]
    assert delegating(base).load_weights(weights) == {"qkv.weight"}
    assert base.given == weights


def test_base_layer_without_a_loader_is_walked() -> None:
    base = nn.Linear(2, 3)
    loaded = delegating(base).load_weights([("weight", torch.full((3, 2), 5.0)), ("bias", torch.full((3,), 6.0))])
    assert set(loaded) == {"weight", "bias"}
    assert (base.weight == 5).all() and (base.bias == 6).all()


def test_weight_loader_of_a_parameter_is_used() -> None:
    base, calls = nn.Linear(2, 3, bias=False), []  # type: ignore[var-annotated]
    base.weight.weight_loader = lambda param, weight: calls.append(weight.shape)  # type: ignore[assignment]
    set(delegating(base).load_weights([("weight", torch.ones(6, 2))]))
    assert calls == [(6, 2)]


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no_such_tensor"):
        set(delegating(nn.Linear(2, 3)).load_weights([("no_such_tensor", torch.ones(1))]))


# --- Logits mapping -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["release", "mixin"])
def make_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the real logits wrapper of two ranks: as this release needs it, and with our mixin in any case."""
    monkeypatch.setattr("vllm.lora.layers.logits_processor.get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr("vllm.lora.layers.logits_processor.get_tensor_model_parallel_rank", lambda: 0)
    cls = reloadable(LogitsProcessorWithLoRA)
    if request.param == "mixin":
        cls = type("LogitsProcessorWithLoRA", (RebuildsLogitsMapping, LogitsProcessorWithLoRA), {})

    def make(mapping: list[int] | None) -> Any:
        base = nn.Module()
        base.vocab_size = 6  # type: ignore[assignment]
        processor = cls(base, 4, torch.float32, torch.device("cpu"), mapping)
        config = type("Config", (), {"max_lora_rank": 8, "lora_dtype": torch.float32})
        processor.create_lora_weights(2, config)
        return processor

    return make


def test_garbage_in_the_mapping_is_repaired_in_place(make_processor: Callable[..., Any]) -> None:
    processor = make_processor(MAPPING)
    mapping = processor.sharded_to_full_mapping_gpu
    address = mapping.data_ptr()
    mapping.view(torch.uint8).fill_(0xFF)
    processor.reset_sharded_to_full_mapping()
    assert processor.sharded_to_full_mapping_gpu is mapping and mapping.data_ptr() == address
    assert mapping.dtype == torch.int64 and mapping.tolist() == MAPPING


def test_no_mapping_stays_none(make_processor: Callable[..., Any]) -> None:
    processor = make_processor(None)
    processor.reset_sharded_to_full_mapping()
    assert processor.sharded_to_full_mapping_gpu is None
