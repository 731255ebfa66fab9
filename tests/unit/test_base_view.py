"""The base view: names without LoRA inside, and the very same tree outside."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.support.wrapped import Block, Wrapper
from vllm_lora_reload.base_view import base_view, checkpoint_names


class Model(nn.Module):
    """Two blocks. `up` of the second is a wrapper whose base layer holds another; `down` of the first is a head too."""

    def __init__(self, wrapped: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(wrapped), Block(wrapped)])
        inner = nn.Sequential(self.layers[1].up, nn.Linear(3, 3))
        self.layers[1].up = Wrapper(inner) if wrapped else inner
        self.head = self.layers[0].down
        self.same_head = self.head


def tree(model: nn.Module) -> list[tuple[str, int]]:
    """Every (name, module) in order, aliases included."""
    return [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]


PLAIN = Model(wrapped=False)
PLAIN_MODULES = [name for name, _ in PLAIN.named_modules(remove_duplicate=False)]
PLAIN_PARAMETERS = [name for name, _ in PLAIN.named_parameters(remove_duplicate=False)]


def test_names_inside_are_those_without_lora() -> None:
    model = Model()
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] != PLAIN_MODULES
    with base_view(model) as same:
        assert same is model
        assert [name for name, _ in model.named_modules(remove_duplicate=False)] == PLAIN_MODULES
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == PLAIN_PARAMETERS
        assert list(model.state_dict()) == list(PLAIN.state_dict())


def test_every_parent_of_a_wrapper_sees_its_base_layer() -> None:
    model = Model()
    wrapper = model.head
    with base_view(model):
        places = model.head, model.same_head, model.layers[0].down, model.layers[0].alias.proj
        assert all(module is wrapper.base_layer for module in places)
    places = model.head, model.same_head, model.layers[0].down, model.layers[0].alias.proj
    assert all(module is wrapper for module in places)


def test_wrapper_inside_a_base_layer_is_swapped_too() -> None:
    model = Model()
    outer = model.layers[1].up
    inner = outer.base_layer[0]
    with base_view(model):
        assert model.layers[1].up is outer.base_layer
        assert model.layers[1].up[0] is inner.base_layer
    assert model.layers[1].up is outer and outer.base_layer[0] is inner


def test_tree_is_the_same_after_normal_exit() -> None:
    model = Model()
    before = tree(model)
    with base_view(model):
        assert tree(model) != before
    assert tree(model) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_tree_is_the_same_after_an_exception(error: type[BaseException]) -> None:
    model = Model()
    before = tree(model)
    with pytest.raises(error), base_view(model):
        raise error
    assert tree(model) == before


def test_inner_view_does_not_end_the_outer_one() -> None:
    model = Model()
    before = tree(model)
    with base_view(model):
        with base_view(model):
            pass
        with pytest.raises(RuntimeError), base_view(model):
            raise RuntimeError
        assert [name for name, _ in model.named_modules(remove_duplicate=False)] == PLAIN_MODULES
    assert tree(model) == before


def test_order_of_children_is_kept() -> None:
    model = Model()
    modules = list(model.modules())
    before = [list(module._modules) for module in modules]
    with base_view(model):
        assert [list(module._modules) for module in modules] == before
    assert [list(module._modules) for module in modules] == before


def test_no_method_of_the_module_is_overridden() -> None:
    methods = ("named_modules", "named_parameters", "state_dict", "get_parameter", "modules", "parameters")
    model = Model()
    everything = list(model.modules())
    with base_view(model):
        for method in methods:
            assert getattr(type(model), method) is getattr(nn.Module, method)
            assert not [module for module in everything if method in vars(module)]
    assert not [module for module in everything for method in methods if method in vars(module)]


def test_checkpoint_names_resolve_inside_only() -> None:
    model = Model()
    name = "layers.0.up.weight"
    weight = model.layers[0].up.base_layer.weight
    assert name not in dict(model.named_parameters())
    with base_view(model):
        assert model.get_parameter(name) is weight
        assert dict(model.named_parameters())[name] is weight
    assert name not in dict(model.named_parameters())


def test_what_is_written_inside_is_there_outside() -> None:
    model = Model()
    with base_view(model), torch.no_grad():
        model.get_parameter("layers.1.down.weight").fill_(7)
    assert (model.layers[1].down.base_layer.weight == 7).all()


def test_model_without_wrappers_is_left_alone() -> None:
    before = tree(PLAIN)
    with base_view(PLAIN):
        assert tree(PLAIN) == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("layers.0.up.base_layer.weight", "layers.0.up.weight"),
        ("layers.0.up.weight", "layers.0.up.weight"),
        ("a.base_layer.experts.base_layer.weight", "a.experts.weight"),
        ("base_layer_norm.weight", "base_layer_norm.weight"),
        ("my_base_layer.weight", "my_base_layer.weight"),
    ],
)
def test_checkpoint_name(given: str, expected: str) -> None:
    assert list(checkpoint_names([(given, 1)])) == [(expected, 1)]


def test_checkpoint_names_takes_one_weight_at_a_time() -> None:
    taken = []

    def weights() -> Iterator[tuple[str, int]]:
        for number in range(3):
            taken.append(number)
            yield f"{number}.base_layer.weight", number

    names = checkpoint_names(weights())
    assert taken == []
    assert next(names) == ("0.weight", 0) and taken == [0]


def test_experts_expect_plain_names_inside() -> None:
    """A wrapped MoE layer tells its experts to look for ``base_layer.`` in checkpoint names."""
    model = Block()
    experts = nn.Module()
    experts.lora_base_layer_prefix = "base_layer."  # type: ignore[assignment]
    model.up.base_layer.add_module("routed_experts", experts)
    for _ in range(2):
        with pytest.raises(RuntimeError), base_view(model):
            assert experts.lora_base_layer_prefix == ""
            with base_view(model):
                assert experts.lora_base_layer_prefix == ""
            assert experts.lora_base_layer_prefix == ""
            raise RuntimeError
        assert experts.lora_base_layer_prefix == "base_layer."
