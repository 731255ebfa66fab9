"""Tiny random checkpoints and PEFT LoRA adapters that vLLM and transformers really load.

Nothing is downloaded: the tokenizer is trained on the spot, the weights are drawn from a seeded generator.
The same arguments give the same bytes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_hf: Any = transformers  # half of its functions have no types
VOCAB_SIZE = 512
MAX_POSITIONS = 512
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"

PEFT_CONFIG = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "peft_type": "LORA",
}  # for `make_adapter`'s tensors
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EMBEDDINGS = ("embed_tokens", "lm_head")
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True)
class _Family:
    """One model architecture at test size.

    `targets` are the last components of the module names that vLLM wraps with LoRA, without the routers
    (`gate`) of MoE models. `zero_centred_norms` marks norms that multiply by `1 + weight`. `embedding_std`
    is small beside what the layers add, or models with tied embeddings would only repeat their input.
    `architecture` names vLLM's class where transformers has none: the weights then are those of `model_type`.
    """

    model_type: str
    targets: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    zero_centred_norms: bool = False
    embedding_std: float = 0.05
    architecture: str | None = None


_GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 64, "tie_word_embeddings": True}

_FAMILIES: dict[str, _Family] = {
    "llama": _Family("llama", _ATTENTION + _MLP + _EMBEDDINGS),
    # Its `load_weights` loops over `named_parameters` in every release of vLLM.
    "minicpm": _Family(
        "llama",
        _ATTENTION + _MLP + _EMBEDDINGS,
        dict(scale_emb=1, scale_depth=1.4, dim_model_base=128, num_experts=0, head_dim=32),  # head_dim is ignored
        architecture="MiniCPMForCausalLM",
    ),
    "qwen2": _Family("qwen2", _ATTENTION + _MLP, {"head_dim": 32}),  # vLLM's class takes hidden / heads
    "qwen3": _Family("qwen3", _ATTENTION + _MLP + _EMBEDDINGS),
    "qwen3_tied": _Family("qwen3", _ATTENTION + _MLP + _EMBEDDINGS, {"tie_word_embeddings": True}),
    "qwen3_moe": _Family(
        "qwen3_moe",
        _ATTENTION + _MLP + _EMBEDDINGS,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    ),
    "mixtral": _Family(
        "mixtral",
        (*_ATTENTION, "w1", "w2", "w3", *_EMBEDDINGS),
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gemma2": _Family("gemma2", _ATTENTION + _MLP, _GEMMA, zero_centred_norms=True, embedding_std=0.005),
    "gemma3": _Family("gemma3_text", _ATTENTION + _MLP, _GEMMA, zero_centred_norms=True, embedding_std=0.005),
    "phi3": _Family("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", *_EMBEDDINGS)),
    "granite": _Family(
        "granite",
        _ATTENTION + _MLP + _EMBEDDINGS,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": False,
        },
    ),
    # The latent and rope sizes are those of the real models: GPU MLA kernels accept no others.
    "deepseek_v2": _Family(
        "deepseek_v2",
        ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *_MLP),
        {
            "num_key_value_heads": 4,
            "head_dim": None,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "opt": _Family(
        "opt",
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
        {"ffn_dim": 256, "word_embed_proj_dim": 128, "do_layer_norm_before": True, "dropout": 0.0},
        embedding_std=0.02,
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)

_TEXT = """\
The quick brown fox jumps over the lazy dog while seven wizards quietly box with jovial zebras.
Once upon a time there was a small engine that loaded weights, ran kernels and answered questions.
What is the capital of France? The capital of France is Paris, and the river through it is the Seine.
Write a short story about a lighthouse keeper who finds a message in a bottle after a winter storm.
def add(left: int, right: int) -> int: return left + right  # a function that adds two numbers
Numbers go 0 1 2 3 4 5 6 7 8 9 10 100 1000; letters go A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.
An adapter changes how a model answers, because its low rank matrices are added to every projection.
Bread is made with flour, water, salt and yeast; soup is made with whatever the kitchen still has left.
Mountains rise slowly, glaciers carve valleys, and rivers carry sand toward distant and patient oceans.
Please explain, step by step, how a scheduler shares memory between several requests that run together.
"""


def _tokenizer() -> Any:
    """A `PreTrainedTokenizerFast`: byte-level BPE with exactly `VOCAB_SIZE` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the built-in text yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return _hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=MAX_POSITIONS
    )


def _draw(name: str, shape: torch.Size, spec: _Family, generator: torch.Generator) -> torch.Tensor:
    """Random float32 values of `shape` for the parameter `name`."""
    mean, std = 0.0, 1.5 / math.sqrt(shape[-1])
    if len(shape) == 1:
        mean, std = 0.0 if name.endswith("bias") or spec.zero_centred_norms else 1.0, 0.1
    elif "embed" in name:
        std = spec.embedding_std
    elif "lm_head" in name:
        std = 0.2
    return torch.randn(shape, generator=generator) * std + mean


def _reshard(path: Path, shards: int) -> None:
    """Replace the single weights file in `path` by `shards` files with about equally many tensors, and an index."""
    single = path / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    if not 1 <= shards <= len(names):
        raise ValueError(f"cannot split {len(names)} tensors into {shards} files")
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    single.unlink()


def make_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint with its tokenizer into the folder `path` and return `path`.

    `family` is one of `FAMILIES`; `config_overrides` go into the transformers config. Values are drawn in
    float32 and then cast, so two dtypes with one seed differ by rounding only. Expert weights have
    per-expert names (`experts.0.gate_proj.weight`).
    """
    spec = _FAMILIES[family]
    tokenizer = _tokenizer()
    settings = {
        **_SIZES,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **spec.config,
        **config_overrides,
    }
    config = _hf.AutoConfig.for_model(spec.model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        model = _hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, spec, generator))
    model.to(dtype).save_pretrained(path)
    if spec.architecture:
        settings_file = path / "config.json"
        settings_file.write_text(
            json.dumps(json.loads(settings_file.read_text()) | {"architectures": [spec.architecture]})
        )
    tokenizer.save_pretrained(path)
    if shards != 1:
        _reshard(path, shards)
    return path


def _checkpoint_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """Shape of every tensor in the safetensors files of `checkpoint`."""
    return {
        name: tensor.shape
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _default_targets(model_type: str) -> tuple[str, ...]:
    """The LoRA target modules of the families with `model_type`."""
    for spec in _FAMILIES.values():
        if spec.model_type == model_type:
            return spec.targets
    raise ValueError(f"no family has model type {model_type!r}")


def make_adapter(
    path: Path,
    checkpoint: Path,
    *,
    rank: int = 8,
    alpha: int = 16,
    seed: int = 1,
    target_modules: Sequence[str] | None = None,
) -> Path:
    """Write a random PEFT LoRA adapter for `checkpoint` into the folder `path` and return `path`.

    `target_modules` are last components of module names; the default is all that vLLM wraps for the family,
    except MoE routers. Tensors are `lora_A` [rank, in] and `lora_B` [out, rank], for embeddings
    `lora_embedding_A` [rank, vocab] and `lora_embedding_B` [hidden, rank], in the dtype of the checkpoint.
    Each expert has its own tensors. All values are normal with standard deviation 0.1.
    """
    config = _hf.AutoConfig.from_pretrained(checkpoint)
    targets = sorted(_default_targets(config.model_type) if target_modules is None else target_modules)
    settings: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "inference_mode": True}
    shapes: dict[str, torch.Size] = {}
    with torch.device("meta"):
        model = _hf.AutoModelForCausalLM.from_config(config)
        del model.config  # from it PEFT would turn expert targets into targets on transformers' fused experts
        supported = [
            name
            for name, module in model.named_modules()
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and name.rpartition(".")[2] in targets
        ]
        if supported:
            skeleton = peft.get_peft_model(model, peft.LoraConfig(target_modules=supported, **settings))
            state = peft.get_peft_model_state_dict(skeleton, save_embedding_layers=False)
            shapes = {name: tensor.shape for name, tensor in state.items()}
    done = {name.partition(".lora_")[0] for name in shapes}
    # transformers has no Linear modules for experts and routers: their LoRA tensors are made from the checkpoint.
    for name, shape in _checkpoint_shapes(checkpoint).items():
        path_in_peft = f"base_model.model.{name.removesuffix('.weight')}"
        if path_in_peft.rpartition(".")[2] in targets and path_in_peft not in done:
            shapes[f"{path_in_peft}.lora_A.weight"] = torch.Size((rank, shape[1]))
            shapes[f"{path_in_peft}.lora_B.weight"] = torch.Size((shape[0], rank))
            done.add(path_in_peft)
    if unknown := set(targets) - {name.rpartition(".")[2] for name in done}:
        raise ValueError(f"{checkpoint} has no modules named {sorted(unknown)}")
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: (torch.randn(shapes[name], generator=generator) * 0.1).to(config.dtype) for name in sorted(shapes)}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    # Written by hand: `LoraConfig.save_pretrained` writes the targets in the order of a set, that is at random.
    lora: Any = peft.LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=str(checkpoint), **settings)
    public = lora.to_dict() | {"target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(public, indent=2, sort_keys=True) + "\n")
    return path
