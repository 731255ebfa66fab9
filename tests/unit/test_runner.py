"""Which of the models that a runner builds is the reference for what a load writes."""

from typing import Any

from torch import nn

from vllm_lora_reload.runner import LoRAReloadModelRunner


class Model(nn.Module):
    def load_weights(self, weights: Any) -> set[str]:
        return set()


def test_only_the_main_model_is_watched() -> None:
    """A draft model may be built beside the main model, or after it was wrapped for LoRA."""
    runner: Any = object.__new__(LoRAReloadModelRunner)
    main, beside, after = Model(), Model(), Model()
    runner.watch_first_load(main)
    runner.watch_first_load(beside)
    runner._first_load, runner.lora_reload = None, object()  # as `load_lora_model` leaves them
    runner.watch_first_load(after)
    assert ["load_weights" in vars(model) for model in (main, beside, after)] == [True, False, False]
    assert runner._first_load is None
