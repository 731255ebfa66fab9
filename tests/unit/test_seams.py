"""What the package does to vLLM's own classes and modules, tried on the real ones."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.lora import utils as lora_utils
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    get_layerwise_info,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tests.support.manager import adapter, make_manager
from vllm_lora_reload import SeamMissingError, seams

WORKER_SEAMS = [
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin",
    "vllm.lora.layers.BaseLayerWithLoRA",
    "vllm.lora.layers.LogitsProcessorWithLoRA",
    "vllm.model_executor.models.utils.AutoWeightsLoader",
    "vllm.lora.utils._all_lora_classes",
    "vllm.lora.utils.LogitsProcessorWithLoRA",
    "vllm.lora.model_manager.LoRAModelManager",
    "vllm.model_executor.model_loader.reload.layerwise.LAYERWISE_INFO",
    "vllm.model_executor.model_loader.reload.layerwise._place_kernel_tensors",
    "vllm.model_executor.model_loader.reload.layerwise.materialize_layer",
    "vllm.model_executor.model_loader.base_loader.process_weights_after_loading",
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",
    "vllm.lora.request.LoRARequest",
    "vllm.config.lora.MaxLoRARanks",
    "vllm.distributed.parallel_state.get_pp_group",
    "vllm.distributed.parallel_state.get_tp_group",
]


# --- Looking for seams --------------------------------------------------------------------------------------------


def test_check_passes_on_this_release() -> None:
    seams.check()


@pytest.mark.parametrize("seam", WORKER_SEAMS)
def test_check_names_a_missing_attribute(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(seam)
    with pytest.raises(SeamMissingError) as failure:
        seams.check()
    assert f"vLLM {seams.release()}: {seam} is missing" in str(failure.value)


@pytest.mark.parametrize("module", sorted({seam.rpartition(".")[0] for seam in WORKER_SEAMS}))
def test_check_names_a_missing_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(SeamMissingError) as failure:
        seams.check()
    assert f"vLLM {seams.release()}: {module}." in str(failure.value)


def test_missing_seam_says_what_to_do_and_keeps_its_cause() -> None:
    with pytest.raises(SeamMissingError, match=r"vllm\.config\.NoSuchThing is missing.*VLLM_PLUGINS") as failure:
        seams._find("vllm.config", "NoSuchThing")
    assert isinstance(failure.value.__cause__, AttributeError)


def test_release_is_that_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "9.8.7")
    assert seams.release() == "9.8.7"


# --- Extending one object -----------------------------------------------------------------------------------------


class Base:
    def __init__(self, value: int = 0, *, fail: bool = False) -> None:
        """Base's own."""
        if fail:
            raise ValueError("no")
        self.value = value

    def who(self) -> str:
        return "base"


class Derived(Base):
    def __init__(self) -> None:
        super().__init__(5)
        self.more = True


class Mixin:
    def who(self) -> str:
        return f"mixin over {super().who()}"  # type: ignore[misc]


def test_extend_puts_the_mixin_in_front_of_one_object() -> None:
    extended: Any = Base(3)
    other = Base(4)
    seams.extend(extended, Mixin)
    assert extended.who() == "mixin over base" and extended.value == 3
    assert isinstance(extended, Base) and isinstance(extended, Mixin)
    assert type(other) is Base and type(Base()) is Base


def test_extend_keeps_the_names_of_the_class() -> None:
    extended = Base()
    seams.extend(extended, Mixin)
    cls = type(extended)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (Base.__name__, Base.__qualname__, Base.__module__)


def test_extend_again_changes_nothing() -> None:
    extended: Any = Base()
    seams.extend(extended, Mixin)
    cls = type(extended)
    seams.extend(extended, Mixin)
    assert type(extended) is cls


# --- Hooking a constructor ----------------------------------------------------------------------------------------


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`Base` with a hook that notes the objects it is given."""
    monkeypatch.setattr(Base, "__init__", Base.__init__)
    seen: list[Any] = []
    seams.after_init(Base, seen.append)
    yield seen


def test_hook_runs_after_the_constructor(hooked: list[Any]) -> None:
    made = Base(value=7)
    assert hooked == [made] and made.value == 7


def test_hook_runs_once_for_a_subclass(hooked: list[Any]) -> None:
    made = Derived()
    assert hooked == [made] and made.more


def test_hook_does_not_run_for_an_object_that_was_not_made(hooked: list[Any]) -> None:
    with pytest.raises(ValueError):
        Base(fail=True)
    assert hooked == []


def test_hooked_constructor_looks_like_the_old_one(hooked: list[Any]) -> None:
    assert Base.__init__.__name__ == "__init__" and Base.__init__.__doc__ == "Base's own."


def test_second_hook_changes_nothing(hooked: list[Any]) -> None:
    init, second = Base.__init__, []  # type: ignore[var-annotated]
    seams.after_init(Base, second.append)
    made = Base()
    assert Base.__init__ is init and hooked == [made] and second == []


# --- Tables of wrapper classes ------------------------------------------------------------------------------------


class Chosen:
    """Makes any wrapper class accept any layer."""

    def __init__(self, *args: Any) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]

    def create_lora_weights(self, *args: Any) -> None:
        pass

    @classmethod
    def can_replace_layer(cls, **kwargs: Any) -> bool:
        return True


def choose(cls: type) -> type:
    return type(cls.__name__, (Chosen, cls), {})


def test_vllm_picks_from_the_replaced_classes() -> None:
    head = SimpleNamespace(embedding_dim=2, weight=torch.zeros(1), get_sharded_to_full_mapping=lambda: None)
    with seams.wrapper_classes_replaced(choose):
        assert isinstance(lora_utils.from_layer(nn.Identity(), 1, None, []), Chosen)
        assert isinstance(lora_utils.from_layer_logits_processor(nn.Identity(), head, 1, None), Chosen)
    assert isinstance(
        lora_utils.from_layer(nn.Identity(), 1, SimpleNamespace(fully_sharded_loras=False), []), nn.Identity
    )


def test_replaced_table_keeps_type_and_order() -> None:
    classes = lora_utils._all_lora_classes
    with seams.wrapper_classes_replaced(choose):
        replaced = lora_utils._all_lora_classes
        assert type(replaced) is type(classes) and len(replaced) == len(classes)
        assert [cls.__mro__[2] for cls in replaced] == list(classes)


def test_logits_processor_is_the_same_class_in_both_places() -> None:
    assert lora_utils.LogitsProcessorWithLoRA in lora_utils._all_lora_classes
    with seams.wrapper_classes_replaced(choose):
        assert lora_utils.LogitsProcessorWithLoRA in lora_utils._all_lora_classes


@pytest.mark.parametrize("kind", [set, list, tuple])
def test_type_of_the_table_is_kept(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set up to 0.19, a tuple since."""
    classes = kind(lora_utils._all_lora_classes)
    monkeypatch.setattr(lora_utils, "_all_lora_classes", classes)
    with seams.wrapper_classes_replaced(choose):
        assert type(lora_utils._all_lora_classes) is kind
    assert lora_utils._all_lora_classes is classes


@pytest.mark.parametrize("fails", [False, True])
def test_tables_are_put_back(fails: bool) -> None:
    before = lora_utils._all_lora_classes, lora_utils.LogitsProcessorWithLoRA
    try:
        with seams.wrapper_classes_replaced(choose):
            assert lora_utils.LogitsProcessorWithLoRA is not before[1]
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert lora_utils._all_lora_classes is before[0] and lora_utils.LogitsProcessorWithLoRA is before[1]


def test_tables_stay_when_a_class_cannot_be_replaced() -> None:
    before = lora_utils._all_lora_classes, lora_utils.LogitsProcessorWithLoRA

    def refuse(cls: type) -> type:
        raise TypeError(cls.__name__)

    with pytest.raises(TypeError), seams.wrapper_classes_replaced(refuse):
        pass
    assert lora_utils._all_lora_classes is before[0] and lora_utils.LogitsProcessorWithLoRA is before[1]


# --- Adapter manager ----------------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> Any:
    return make_manager()


def bookkeeping(manager: Any) -> Any:
    """All that decides which adapter goes next and where."""
    caches = [manager._registered_adapters, manager._active_adapters]
    return copy.copy(manager.lora_index_to_id), [(list(c.order), list(c.cache), set(c.pinned_items)) for c in caches]


def test_fixture_has_an_order_worth_keeping(manager: Any) -> None:
    slots, ((registered, _, pinned), (active, _, active_pinned)) = bookkeeping(manager)
    assert slots == [2, 3, 1] and pinned == active_pinned == {3}
    assert registered != sorted(registered) and active != [2, 3, 1]


@pytest.mark.parametrize(("index", "number"), [(0, 2), (1, 3), (2, 1)])
def test_write_slot_writes_that_slot_only(manager: Any, index: int, number: int) -> None:
    for wrapper in manager.modules.values():
        wrapper.a_stacked.fill_(-1)
    seams.write_slot(manager, index, seams.registered(manager)[number])
    expected = torch.full((3, 4), -1.0)
    expected[index] = number
    assert torch.equal(manager.modules["up"].a_stacked, expected)
    expected[index] = 0  # the adapter has nothing for this module
    assert torch.equal(manager.modules["down"].a_stacked, expected)


@pytest.mark.parametrize(("index", "number"), [(0, 2), (1, 3), (2, 1), (0, 4)])
def test_write_slot_leaves_the_bookkeeping(manager: Any, index: int, number: int) -> None:
    before = bookkeeping(manager)
    tables = manager.lora_index_to_id, manager._active_adapters, manager._registered_adapters
    seams.write_slot(manager, index, seams.registered(manager)[number])
    assert bookkeeping(manager) == before
    after = manager.lora_index_to_id, manager._active_adapters, manager._registered_adapters
    assert all(new is old for new, old in zip(after, tables, strict=True))


def test_slots_is_a_copy(manager: Any) -> None:
    slots = seams.slots(manager)
    assert slots == [2, 3, 1]
    slots.clear()
    assert manager.lora_index_to_id == [2, 3, 1]


def test_punica_wrapper_of_two_towers_is_listed_once() -> None:
    shared, own = object(), object()
    manager = SimpleNamespace(punica_wrapper_mapping={"a": shared, "b": own, "c": shared})
    assert seams.punica_wrappers(manager) == [shared, own]


def test_registry(manager: Any) -> None:
    assert sorted(seams.registered(manager)) == [1, 2, 3, 4]
    new = adapter(2)
    seams.register_adapter(manager, new)
    assert seams.registered(manager)[2] is new and len(manager) == 4
    for number in (5, 6):
        seams.register_adapter(manager, adapter(number))
    assert len(manager) == 5 and 3 in seams.registered(manager), "a pinned adapter stays"


def test_activate_if_possible_leaves_pinned_adapters_alone(manager: Any) -> None:
    seams.activate_if_possible(manager, 4)
    assert 4 in seams.slots(manager) and 3 in seams.slots(manager)
    for number in seams.slots(manager):
        manager.pin_adapter(number)
    (left_out,) = {1, 2, 3, 4} - set(seams.slots(manager))
    before = bookkeeping(manager)
    seams.activate_if_possible(manager, left_out)
    assert bookkeeping(manager)[0] == before[0] and not seams.is_active(manager, left_out)


def test_without_modules_the_manager_writes_nothing(manager: Any) -> None:
    manager.deactivate_adapter(2)
    before = manager.modules["up"].a_stacked.clone()
    modules = seams.take_modules(manager)
    manager.activate_adapter(4)
    seams.give_modules(manager, modules)
    assert seams.slots(manager)[0] == 4 and torch.equal(manager.modules["up"].a_stacked, before)


def test_slots_that_change_are_told_of(manager: Any) -> None:
    changed: list[int] = []
    seams.watch_slots(manager, changed.append)
    manager.activate_adapter(2)  # it has a slot
    assert changed == [] and seams.slots(manager) == [2, 3, 1]
    manager.activate_adapter(4)  # 1 has to go
    assert changed == [2, 2] and seams.slots(manager) == [2, 3, 4]


def test_forget_mapping() -> None:
    old, new = SimpleNamespace(_last_mapping=1), SimpleNamespace(_last_mapping=1, _last_slot_layout=(2,))
    seams.forget_mapping(old)
    seams.forget_mapping(new)
    assert vars(old) == {"_last_mapping": None}
    assert vars(new) == {"_last_mapping": None, "_last_slot_layout": None}


@pytest.mark.parametrize("resets", [False, True])
def test_engine_resets_lora(resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mixin = seams.lora_model_runner_mixin()
    if resets:
        monkeypatch.setattr(mixin, "reset_lora_state", lambda self: None, raising=False)
    else:
        monkeypatch.delattr(mixin, "reset_lora_state", raising=False)
    assert seams.engine_resets_lora() is resets


# --- Layerwise reload ---------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A layer with a parameter that has a loader of its own, one that has none, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[assignment]
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("zeros", torch.zeros(2))

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        default_weight_loader(param, loaded_weight)


def model_on_meta() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Three layers, one nested in another, in the midst of vLLM's layerwise reload; and their tensors before it."""
    model = nn.Sequential(Linear(), Linear())
    model[0].add_module("inner", Linear())
    record_metadata_for_reloading(model)
    before = tensors(model)
    initialize_layerwise_reload(model)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    return model, before


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def load(model: nn.Module, names: list[str], value: float) -> None:
    """As a model's ``load_weights`` does it: each name looked up, its loader called."""
    for name in names:
        param = tensors(model)[name]
        getattr(param, "weight_loader", default_weight_loader)(param, torch.full(param.shape, value))


def loader_names(model: nn.Module) -> set[str]:
    return {getattr(tensor, "weight_loader", default_weight_loader).__name__ for tensor in tensors(model).values()}


PARTS: list[list[str]] = [
    [],
    ["0.weight"],
    ["1.weight", "1.scale"],
    ["1.weight", "1.scale", "1.zeros"],
    ["0.weight", "0.inner.scale", "1.weight", "1.scale", "1.zeros"],
]


@pytest.mark.parametrize("loaded", PARTS)
def test_abort_puts_the_same_tensors_back(loaded: list[str]) -> None:
    model, before = model_on_meta()
    load(model, loaded, 2)
    seams.abort_layerwise_reload(model)
    after = tensors(model)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert not [name for name, tensor in after.items() if tensor.is_meta]
    assert model[0].weight.weight_loader == model[0].load


@pytest.mark.parametrize("loaded", PARTS)
def test_abort_leaves_layers_that_were_not_finished_as_they_were(loaded: list[str]) -> None:
    model, _ = model_on_meta()
    load(model, loaded, 2)
    seams.abort_layerwise_reload(model)
    assert (model[0].weight == 1).all() and (model[0].zeros == 0).all() and (model[0].inner.scale == 1).all()
    finished = "1.zeros" in loaded
    assert (model[1].weight == (2 if finished else 1)).all()


def test_abort_unwraps_weight_loaders() -> None:
    model, _ = model_on_meta()
    assert loader_names(model) == {"online_process_loader"}
    load(model, ["0.weight"], 2)
    seams.abort_layerwise_reload(model)
    assert loader_names(model) == {"load", "default_weight_loader"}
    load(model, list(tensors(model)), 3)
    assert all((tensor == 3).all() for tensor in tensors(model).values())


@pytest.mark.parametrize("loaded", PARTS)
def test_layerwise_reload_after_an_abort(loaded: list[str]) -> None:
    model, before = model_on_meta()
    load(model, loaded, 2)
    seams.abort_layerwise_reload(model)
    initialize_layerwise_reload(model)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    load(model, list(before), 3)
    finalize_layerwise_processing(model, SimpleNamespace(dtype=torch.float32))
    after = tensors(model)
    assert all(after[name] is before[name] and (after[name] == 3).all() for name in before)


def test_abort_after_a_failure_while_a_layer_is_processed() -> None:
    class Method(seams._find("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase")):  # type: ignore[misc]
        create_weights = apply = None

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.weight = nn.Parameter(torch.zeros(1, device="meta"), requires_grad=False)
            raise RuntimeError("repacking failed")

    Method.__abstractmethods__ = frozenset()
    model, before = model_on_meta()
    model[1].quant_method = Method()
    with pytest.raises(RuntimeError, match="repacking"):
        load(model, ["1.weight", "1.scale", "1.zeros"], 2)
    seams.abort_layerwise_reload(model)
    assert all(tensors(model)[name] is before[name] for name in before)


def test_abort_gives_torchao_its_switch_back() -> None:
    model = nn.Sequential(Linear())
    record_metadata_for_reloading(model)
    model._do_torchao_reload = True
    initialize_layerwise_reload(model)
    assert model._do_torchao_reload is False
    seams.abort_layerwise_reload(model)
    assert model._do_torchao_reload is True


@pytest.mark.parametrize("recorded", [False, True])
def test_abort_without_a_reload_changes_nothing(recorded: bool) -> None:
    model = nn.Sequential(Linear(), nn.ReLU())
    if recorded:
        record_metadata_for_reloading(model)
    before = tensors(model)
    seams.abort_layerwise_reload(model)
    assert all(tensors(model)[name] is before[name] for name in before)
    assert not hasattr(model, "_do_torchao_reload")


def test_layers_that_a_reload_makes_are_shown_with_their_running_tensors() -> None:
    model, before = model_on_meta()
    seen: list[tuple[nn.Module, bool]] = []

    def made(layer: nn.Module, running: dict[str, torch.Tensor]) -> None:
        assert not layer.weight.is_meta and running["zeros"] is before["1.zeros"]
        seen.append((layer, running["weight"] is before["1.weight"]))

    with seams.layers_observed(made, lambda tensor: False):
        load(model, ["1.weight", "1.scale", "1.zeros"], 2)
    assert seen == [(model[1], True)]
    load(model, ["0.weight", "0.scale", "0.zeros"], 2)
    assert len(seen) == 1


def test_first_load_of_a_layer_shows_nothing() -> None:
    """Online quantization uses the same steps at start-up, when nothing is running yet."""
    layer = Linear()
    record_metadata_for_reloading(layer)
    get_layerwise_info(layer).load_numel_total = 1
    with seams.layers_observed(lambda *args: pytest.fail("nothing was running"), lambda tensor: False):
        layerwise.materialize_layer(layer, get_layerwise_info(layer))


@pytest.mark.parametrize("fails", [False, True])
def test_building_and_processing_are_observed(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(base_loader, "initialize_model", lambda config: calls.append(config) or "model")
    monkeypatch.setattr(
        base_loader, "process_weights_after_loading", lambda model, config: calls.append((model, config))
    )
    originals = base_loader.initialize_model, base_loader.process_weights_after_loading

    @contextmanager
    def processing(model: Any) -> Iterator[None]:
        calls.append("before")
        yield
        calls.append("after")

    with suppress(ZeroDivisionError), seams.loading_observed(lambda model: calls.append(f"built {model}"), processing):
        base_loader.process_weights_after_loading(base_loader.initialize_model("config"), "config")
        if fails:
            raise ZeroDivisionError
    assert calls == ["config", "built model", "before", ("model", "config"), "after"]
    assert (base_loader.initialize_model, base_loader.process_weights_after_loading) == originals
