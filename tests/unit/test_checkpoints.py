"""The test checkpoints and adapters: loadable, deterministic, and different where they should be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.checkpoints import FAMILIES, VOCAB_SIZE, make_adapter, make_checkpoint

hf: Any = transformers  # half of its functions have no types

ROOT = Path(__file__).parents[2]
PROMPTS = ("The capital of France is", "Once upon a time", "def add(left")
MOE_EXPERTS = {
    "qwen3_moe": "model.layers.0.mlp.experts.{}.gate_proj",
    "mixtral": "model.layers.0.block_sparse_moe.experts.{}.w1",
    "deepseek_v2": "model.layers.1.mlp.experts.{}.gate_proj",
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family name in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of `family`."""
    return make_checkpoint(tmp_path_factory.mktemp(family) / "base", family, dtype=torch.float32)


def _files(folder: Path) -> dict[str, bytes]:
    """Content of every file in `folder`."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the safetensors files of `folder`."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _logits(model: torch.nn.Module, checkpoint: Path, prompt: str) -> torch.Tensor:
    """Logits [vocab] for the token after `prompt`."""
    tokens = hf.AutoTokenizer.from_pretrained(checkpoint)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens).logits[0, -1]
    return logits


def test_transformers_loads_every_weight(checkpoint: Path) -> None:
    model, info = hf.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info.values()), info
    best = {int(_logits(model, checkpoint, prompt).argmax()) for prompt in PROMPTS}
    assert len(best) == len(PROMPTS)


def test_sizes_split_in_two(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"):
        assert config.get(key, 2) % 2 == 0
    assert config["vocab_size"] == VOCAB_SIZE


def test_no_weight_is_constant(checkpoint: Path) -> None:
    for name, tensor in _tensors(checkpoint).items():
        assert tensor.std() > 0, name


def test_same_seed_same_bytes(family: str, tmp_path: Path) -> None:
    first, second, other = (
        make_checkpoint(tmp_path / str(number), family, seed=seed) for number, seed in enumerate((5, 5, 6))
    )
    assert _files(first) == _files(second)
    assert _files(first)["model.safetensors"] != _files(other)["model.safetensors"]

    adapters = [make_adapter(tmp_path / f"adapter{n}", first, seed=seed) for n, seed in enumerate((5, 5, 6))]
    assert _files(adapters[0]) == _files(adapters[1])
    assert _files(adapters[0])["adapter_model.safetensors"] != _files(adapters[2])["adapter_model.safetensors"]


def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.support.checkpoints import make_adapter, make_checkpoint\n"
        "path = Path(sys.argv[1]); make_adapter(path / 'adapter', make_checkpoint(path / 'base', 'qwen3_moe'))"
    )
    contents = []
    for hash_seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
        )
        contents.append(_files(tmp_path / "base") | _files(tmp_path / "adapter"))
    assert contents[0] == contents[1]


def test_global_random_state_is_untouched(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    make_adapter(tmp_path / "adapter", make_checkpoint(tmp_path / "base"))
    assert torch.equal(before, torch.get_rng_state())


def test_dtypes_differ_by_rounding_only(tmp_path: Path) -> None:
    exact = _tensors(make_checkpoint(tmp_path / "float32", dtype=torch.float32))
    rounded = _tensors(make_checkpoint(tmp_path / "bfloat16"))
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        assert torch.equal(tensor.to(torch.bfloat16), rounded[name])


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_hold_the_same_tensors(tmp_path: Path, shards: int) -> None:
    whole = _tensors(make_checkpoint(tmp_path / "whole", "qwen3_moe"))
    split = make_checkpoint(tmp_path / "split", "qwen3_moe", shards=shards)
    assert len(list(split.glob("*.safetensors"))) == shards
    index = json.loads((split / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(split / file)[name], whole[name])
    assert index["weight_map"].keys() == whole.keys() == _tensors(split).keys()
    _, info = hf.AutoModelForCausalLM.from_pretrained(split, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("shards", [0, 1000])
def test_impossible_shards(tmp_path: Path, shards: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        make_checkpoint(tmp_path, shards=shards)


def test_config_overrides(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2", num_hidden_layers=3, tie_word_embeddings=True)
    names = _tensors(path)
    assert "model.layers.2.mlp.up_proj.weight" in names
    assert "lm_head.weight" not in names


def test_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no_such_family"):
        make_checkpoint(tmp_path, "no_such_family")


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(make_checkpoint(tmp_path))
    assert len(tokenizer) == VOCAB_SIZE
    assert None not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    text = "Grüße, 東京! 1 + 1 = 2\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("family", MOE_EXPERTS)
def test_experts_have_their_own_names(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", family)
    weights = _tensors(checkpoint)
    lora = _tensors(make_adapter(tmp_path / "adapter", checkpoint, rank=4))
    for expert in range(4):
        module = MOE_EXPERTS[family].format(expert)
        out_features, in_features = weights[f"{module}.weight"].shape
        assert lora[f"base_model.model.{module}.lora_A.weight"].shape == (4, in_features)
        assert lora[f"base_model.model.{module}.lora_B.weight"].shape == (out_features, 4)


@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_peft_loads_the_adapter(checkpoint: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path, checkpoint)
    model = hf.AutoModelForCausalLM.from_pretrained(checkpoint)
    base = [_logits(model, checkpoint, prompt) for prompt in PROMPTS]
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    for prompt, logits in zip(PROMPTS, base, strict=True):
        assert _logits(adapted, checkpoint, prompt).argmax() != logits.argmax()


def test_adapter_holds_only_lora_tensors(checkpoint: Path, tmp_path: Path) -> None:
    tensors = _tensors(make_adapter(tmp_path, checkpoint, rank=4, alpha=8))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    for name, tensor in tensors.items():
        assert "lora_" in name
        assert 4 in tensor.shape
        assert tensor.dtype == torch.float32
        assert tensor.count_nonzero() > 0.9 * tensor.numel()
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    assert modules == set(config["target_modules"])


def test_embedding_adapters(tmp_path: Path) -> None:
    lora = _tensors(make_adapter(tmp_path / "adapter", make_checkpoint(tmp_path / "base"), rank=4))
    shapes = {
        name.removeprefix("base_model.model."): tuple(t.shape) for name, t in lora.items() if "layers" not in name
    }
    assert shapes == {
        "model.embed_tokens.lora_embedding_A": (4, VOCAB_SIZE),
        "model.embed_tokens.lora_embedding_B": (128, 4),
        "lm_head.lora_A.weight": (4, 128),
        "lm_head.lora_B.weight": (VOCAB_SIZE, 4),
    }


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", {"q_proj", "o_proj"}), ("qwen3_moe", {"q_proj", "up_proj"}), ("mixtral", {"w1", "gate"})],
)
def test_target_modules(tmp_path: Path, family: str, targets: set[str]) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", family)
    lora = _tensors(make_adapter(tmp_path / "adapter", checkpoint, target_modules=sorted(targets)))
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in lora} == targets


def test_unknown_target_module(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no modules named \['w1'\]"):
        make_adapter(tmp_path / "adapter", make_checkpoint(tmp_path / "base"), target_modules=["q_proj", "w1"])
