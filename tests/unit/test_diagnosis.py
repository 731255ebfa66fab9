"""Errors of failed loads name the tensor and the file, and stay what they were."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_lora_reload import diagnosis, staging
from vllm_lora_reload.adapters import fingerprint
from vllm_lora_reload.diagnosis import annotate, where


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad"), RuntimeError("bad", 3)])
def test_message_is_extended(error: Exception) -> None:
    annotate(error, "while loading x")
    assert "bad [while loading x]" in str(error)


def test_empty_message_becomes_the_note() -> None:
    error = AssertionError()
    annotate(error, "while loading x")
    assert str(error) == "while loading x"


def test_errno_is_kept() -> None:
    error = OSError(28, "No space left on device")
    annotate(error, "while loading x")
    assert error.errno == 28 and error.strerror == "No space left on device"


def test_where(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(1000)}, tmp_path / "2.safetensors")
    second = tmp_path / "2.safetensors"
    assert where("b", tmp_path) == f"while loading b from {second}"
    assert where("c", tmp_path) == "while loading c"
    assert where("c", None) == "while loading c"
    assert where(None, tmp_path) is None and where(None, None) is None
    second.write_bytes(second.read_bytes()[:100])
    assert str(where("a", tmp_path)).startswith(f"{second} is damaged: ")
    assert where("a", tmp_path / "gone") == f"{tmp_path / 'gone'} is not a folder"


# --- PEFT configs -------------------------------------------------------------------------------------------------

VERL = {"task_type": "CAUSAL_LM", "peft_type": "LORA", "r": 8, "lora_alpha": 16.0, "target_modules": "all-linear"}
UNSLOTH = {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}, "inference_mode": True}
SWIFT = {"lora_dtype": "bfloat16", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6}
OLD = {
    "layers_pattern": None,
    "loftq_config": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
}  # PEFT 0.10
BARE = {"r": 8, "lora_alpha": 16}


@pytest.mark.parametrize(
    "config",
    [
        VERL,
        BARE | UNSLOTH,
        BARE | SWIFT,
        BARE | OLD,
        BARE | {"init_lora_weights": "gaussian", "fan_in_fan_out": True, "layers_to_transform": [1, 2]},
        BARE | {"runtime_config": {"ephemeral_gpu_offload": False}, "qalora_group_size": 16, "not_known": None},
    ],
)
def test_configs_of_frameworks(config: dict[str, Any]) -> None:
    assert diagnosis.unfit_settings(config, {"r", "lora_alpha", "use_rslora"}) == []


def test_every_field_of_the_installed_peft() -> None:
    """As they are by default, whether this vLLM knows them or not."""
    import peft

    config = peft.LoraConfig(r=8, target_modules=["q_proj"]).to_dict()
    assert diagnosis.unfit_settings(config, set()) == []
    config["a_new_one"] = 16
    assert len(diagnosis.unfit_settings(config, set())) == 1


def test_a_newer_peft_has_more_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    @dataclasses.dataclass
    class Newer(peft.LoraConfig):  # type: ignore[misc]
        group_size: int = 32

    assert diagnosis.unfit_settings(BARE | {"group_size": 32}, set()) != []
    monkeypatch.setattr(peft, "LoraConfig", Newer)
    assert diagnosis.unfit_settings(BARE | {"group_size": 32}, set()) == []
    assert diagnosis.unfit_settings(BARE | {"group_size": 64}, set()) != []


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": NAN}, "r is nan, not a whole number"),
        ({"r": 8.0}, "r is 8.0, not a whole number"),
        ({"r": True}, "r is True, not a whole number"),
        ({"r": "8"}, "r is '8', not a whole number"),
        ({"r": None}, "r is None, not a whole number"),
        ({"r": 0}, "r is 0, not a whole number"),
        ({"lora_alpha": NAN}, "lora_alpha is nan, not a positive number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, not a positive number"),
        ({"lora_alpha": 1e39}, "lora_alpha is 1e[+]39, not a positive number"),
        ({"lora_alpha": 1e-50}, "lora_alpha is 1e-50, not a positive number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10+, not a positive number"),
        ({"lora_alpha": 0}, "lora_alpha is 0, not a positive number"),
        ({"lora_alpha": -16}, "lora_alpha is -16, not a positive number"),
        ({"lora_alpha": None}, "lora_alpha is None, not a positive number"),
        ({"rank_pattern": {"q_proj": 4.5}}, "r of q_proj is 4.5"),
        ({"alpha_pattern": {"q_proj": NAN}}, "lora_alpha of q_proj is nan"),
        ({"rank_pattern": [4]}, "r of  is "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes base weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "not known yet"}, "init_lora_weights is 'not known yet'"),
        ({"init_lora_weights": {}}, "init_lora_weights is {}"),
        ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA', not 'LORA'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', not 'LORA'"),
        ({"bias": "all"}, "bias is 'all', not 'none'"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"use_rslora": True}, "use_rslora: this vLLM would leave it out"),
        ({"use_dora": True}, "use_dora is True: this vLLM would leave it out"),
        ({"megatron_config": {"tp": 2}}, "megatron_config is .*: this vLLM would leave it out"),
        ({"layer_replication": [[0, 4]]}, "layer_replication is .*: this vLLM would leave it out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is .*: this vLLM would leave it out"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is .*: this vLLM would leave it out"),
        ({"a_setting_of_the_future": 1}, "a_setting_of_the_future is 1: this vLLM would leave it out"),
    ],
)
def test_configs_that_are_not_known_to_be_right(change: dict[str, Any], message: str) -> None:
    reasons = diagnosis.unfit_settings(BARE | change, {"r", "lora_alpha"})
    assert reasons and re.match(message, reasons[0])


def test_what_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks send requests with tensors and an empty path, which is not the current directory."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"x": 1}}))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for path in (tmp_path.name, f"./{tmp_path.name}", f"~/{tmp_path.name}", str(tmp_path)):
        assert diagnosis.adapter_rank(path) == 4 and fingerprint(path)
    monkeypatch.chdir(tmp_path)
    for nothing in ("", None, "a\0b", 7):
        assert diagnosis.local_folder(nothing) is None
        assert diagnosis.adapter_rank(nothing) is None and fingerprint(nothing) == ()  # type: ignore[arg-type]


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    for text in (None, "[" * 100_000, "[1]", "{", "\xff"):
        if text is not None:
            file.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            diagnosis.peft_config(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("pickled", [True, False])
def test_dtypes_that_no_adapter_has(dtype: torch.dtype, pickled: bool, tmp_path: Path) -> None:
    def write(tensors: dict[str, torch.Tensor]) -> None:
        if pickled:
            torch.save(tensors, tmp_path / "adapter_model.bin")
        else:
            save_file(tensors, tmp_path / "adapter_model.safetensors")

    write({"a": torch.ones(2), "b": torch.ones(2).to(dtype)})
    (unfit,) = diagnosis.unfit_dtypes(str(tmp_path))
    assert unfit.startswith("b has dtype ")
    write({str(kind): torch.ones(2, dtype=kind) for kind in staging.DTYPES})
    assert diagnosis.unfit_dtypes(str(tmp_path)) == []
    write({})
    assert diagnosis.unfit_dtypes(str(tmp_path)) == ["it has no tensors"]
