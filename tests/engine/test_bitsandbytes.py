"""bitsandbytes: parameters keep their quantization state in attributes. vLLM has no way to reload it from disk."""

from pathlib import Path

import pytest

from tests.support.engine import Engine
from vllm_lora_reload import WeightsMissingError

pytestmark = pytest.mark.engine


def test_kernel_format(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if "bitsandbytes" not in QUANTIZATION_METHODS:
        pytest.skip("this release has no bitsandbytes")
    engine = Engine(tmp_path, load_format="bitsandbytes", quantization="bitsandbytes")
    running = [(name, parameter.detach().clone()) for name, parameter in engine.model.named_parameters()]
    assert any(hasattr(parameter, "bnb_quant_state") for parameter in engine.model.parameters())
    engine.lose_weights()
    with pytest.raises(Exception, match="bitsandbytes"):
        engine.reload()
    with pytest.raises(WeightsMissingError, match="the last load failed: NotImplementedError"):
        engine.ask("base")
    engine.reload(weights_iterator=iter(running), is_checkpoint_format=False)
    assert engine.differing() == []
    assert engine.ask() == engine.before
