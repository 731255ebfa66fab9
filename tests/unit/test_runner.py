"""Which of the models that a runner builds is the reference for what a load writes."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from vllm_lora_reload.replay import LoadRecorder
from vllm_lora_reload.runner import LoRAReloadModelRunner


class Model(nn.Module):
    def load_weights(self, weights: Any) -> set[str]:
        return set()


def make_runner(eplb: bool = False, **settings: Any) -> Any:
    runner: Any = object.__new__(LoRAReloadModelRunner)
    parallel = SimpleNamespace(enable_eplb=eplb)
    runner.vllm_config = SimpleNamespace(additional_config={"lora_reload": settings}, parallel_config=parallel)
    return runner


def test_only_the_main_model_is_watched() -> None:
    """A draft model may be built beside the main model, or after it was wrapped for LoRA."""
    runner = make_runner()
    main, beside, after = Model(), Model(), Model()
    runner.watch_first_load(main)
    runner.watch_first_load(beside)
    runner._first_load, runner.lora_reload = None, object()  # as `load_lora_model` leaves them
    runner.watch_first_load(after)
    assert ["load_weights" in vars(model) for model in (main, beside, after)] == [True, False, False]
    assert runner._first_load is None


@pytest.mark.parametrize(
    ("eplb", "setting", "recorded"), [(False, "on", True), (False, "off", False), (True, "on", False)]
)
def test_a_plan_is_recorded(eplb: bool, setting: str, recorded: bool) -> None:
    """Not with the setting off, and not where vLLM moves experts about while it serves."""
    runner = make_runner(eplb, replay=setting)
    runner.watch_first_load(Model())
    assert isinstance(runner._first_load.loaded_by, LoadRecorder) is recorded
