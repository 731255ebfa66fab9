"""The smallest config of an architecture: the config class's defaults with every size shrunk by one rule.

`TABLE` says where the rule does not do: another config class, other sizes, no class in transformers.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

import transformers

_hf: Any = transformers
VOCAB = 512
HIDDEN = 128

_NAMES: list[tuple[int, str]] = [
    (
        HIDDEN,
        "hidden_size n_embd d_model dim embed_dim embedding_size emb_dim out_hidden_size output_dim projection_dim "
        "word_embed_proj_dim hidden_dim text_hidden_size projector_hidden_size output_hidden_size encoder_hidden_size "
        "llm_hidden_size lru_width text_hidden_dim width",
    ),
    (
        256,
        "intermediate_size ffn_dim n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim mlp_dim "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "intermediate_size_mlp moe_ffn_hidden_size moe_shared_expert_intermediate_size dense_intermediate_size "
        "adapter_intermediate_size moe_latent_size expert_intermediate_size",
    ),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_key_value_heads n_kv_heads num_kv_heads multi_query_group_num "
        "num_global_key_value_heads num_experts_per_tok num_experts_per_token top_k moe_topk moe_k "
        "num_selected_experts top_k_experts",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_query_heads "
        "num_swa_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
        "n_experts",
    ),
    (32, "head_dim kv_channels attention_head_dim global_head_dim swa_head_dim"),
    (VOCAB, "vocab_size padded_vocab_size max_position_embeddings n_positions seq_length"),
]
# Applied to every config and sub-config that has a value under the key.
SIZES: dict[str, Any] = {name: size for size, names in _NAMES for name in names.split()}
SIZES |= dict(
    n_shared_experts=1,
    moe_num_shared_experts=1,
    first_k_dense_replace=1,
    moe_layer_start_index=1,
    n_group=1,
    topk_group=1,
    num_expert_group=1,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    image_size=56,
    patch_size=14,
    num_mel_bins=16,
    num_nextn_predict_layers=0,
    max_source_positions=32,
    max_target_positions=VOCAB,
    sliding_window=64,
    mamba_d_state=16,
    mamba_d_head=32,
    mamba_n_heads=8,
    mamba_d_ssm=256,
    mamba_n_groups=1,
    mamba_num_heads=8,
    mamba_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    ssm_state_size=16,
    n_groups=1,
    deepstack_visual_indexes=[0],
    fullatt_block_indexes=[0],
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=32,
    q_lora_rank=64,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=16,
    num_nextn=0,
    rotary_dim=32,
    conv_dim=HIDDEN,
    block_multiple_of=64,
    num_position_embeddings=16,
    position_embedding_size=16,
)
_NESTED_ROPE = "mrope_section"
GENERIC: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=VOCAB,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    layer_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    attention_bias=False,
    bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    attention_dropout=0.0,
)


# Values for what a model's constructor asks a config for and the config lacks (see `worker.walk`): configs of remote
# code, and attributes that newer releases of transformers no longer set.
GUESSES: dict[str, Any] = (
    SIZES
    | GENERIC
    | dict(
        layer_types=["full_attention", "full_attention"],
        embedding_dropout=0.0,
        use_qkv_bias=False,
        use_bias=False,
        add_bias_linear=False,
        norm_head=False,
        use_mup=False,
        norm_topk_prob=True,
        score_function="softmax",
        scoring_func="softmax",
        topk_method="greedy",
        routed_scaling_factor=1.0,
        moe_layer_freq=1,
        num_shared_experts=1,
        shared_expert_gate=False,
        original_rope=True,
        force_image_size=56,
        downsample_ratio=0.5,
        ps_version="v2",
        select_layer=-1,
        use_qk_norm=False,
        qk_normalization=True,
        norm_type="rms_norm",
        qkv_bias=True,
        vision_feature_layer=-1,
        interaction_indexes=None,
        initializer_factor=1.0,
        use_flash_attn=False,
        dropout=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        norm_eps=1e-5,
        norm_epsilon=1e-5,
        pooling="avg",
        block_dim=HIDDEN,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=None,
        num_dense_layers=1,
        output_router_logits=False,
        router_aux_loss_coef=0.0,
        num_channels=3,
        in_channels=3,
        num_input_channels=3,
        mamba_expand=2,
        downsample_factor=4,
        is_causal=True,
        spatial_merge_size=2,
        temporal_patch_size=2,
        tokens_per_second=2,
        window_size=28,
        hidden_activation="silu",
        activation="silu",
        use_cache=True,
        pad_token_id=0,
        image_token_id=11,
        image_token_index=11,
        video_token_id=12,
        audio_token_id=13,
        audio_token_index=13,
        video_token_index=12,
        vision_start_token_id=14,
        vision_end_token_id=15,
        query_num=16,
        use_post_norm=False,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        apply_residual_connection_post_layernorm=False,
        pre_seq_len=None,
        rmsnorm=True,
        post_layer_norm=True,
        add_qkv_bias=True,
        multi_query_attention=True,
        layernorm_epsilon=1e-5,
        fp32_residual_connection=False,
        quantization_config=None,
        mscale=1.0,
        rotary_base=10000,
        rope_scaling=None,
        global_attention_freq=2,
        output_mult=1.0,
        mup_scale_factor=1.0,
        input_mult=1.0,
        attn_qkv_bias=False,
        use_sliding_window=False,
        drop_vision_last_layer=False,
        score_func="sigmoid",
        activation_function="silu",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        type_vocab_size=1,
        position_embedding_type="absolute",
        hidden_dropout=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        mlp_ratio=2.0,
        projector_hidden_act="gelu",
        norm_after=False,
        apply_vit_abs_pos_embed=True,
        sampling_rate=16000,
        route_norm=True,
        route_scale=1.0,
        interleaved_sliding_window=[None, None],
        multimodal_projector_bias=False,
        vit_hidden_size=HIDDEN,
        num_key_value_groups=2,
    )
)


@dataclass(frozen=True)
class Spec:
    """What is special about one architecture.

    Attributes:
        base: architecture of transformers, or model type, whose config class (and weights) stand in; ``generic`` for
            a plain config with the fields of a Llama.
        config: values on top of the shrunk ones; a dict updates a sub-config, made anew if it names a ``model_type``.
        weights: whether checkpoint names come from the transformers class; else from vLLM's parameters, un-fused.
        engine: more arguments of the engine.
        model_type: what ``config.json`` says.
        drop: keys that are left at their default.
    """

    base: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    weights: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    drop: tuple[str, ...] = ()


_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, n_routed_experts=4, num_local_experts=4)
_QWEN2 = GENERIC | {"model_type": "qwen2"}
_INTERN_VISION = dict(
    model_type="siglip_vision_model", hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, image_size=56, patch_size=14, num_channels=3, norm_type="rms_norm", qkv_bias=True,
    qk_normalization=True, initializer_factor=1.0, hidden_act="gelu",
)  # fmt: skip
_INTERN = Spec("generic", dict(llm_config=_QWEN2, text_config=_QWEN2, vision_config=_INTERN_VISION))

GUESSES |= dict(vision_config=_INTERN_VISION, text_config=_QWEN2, llm_config=_QWEN2)

TABLE: dict[str, Spec] = {
    "MiniCPMForCausalLM": Spec(
        "LlamaForCausalLM", dict(scale_emb=1, scale_depth=1.4, dim_model_base=128, num_experts=0)
    ),
    "InternVLChatModel": _INTERN,
    "H2OVLChatModel": _INTERN,
    "NVLM_D": _INTERN,
    "SkyworkR1VChatModel": _INTERN,
    "TransformersForCausalLM": Spec("LlamaForCausalLM"),
    "TransformersMoEForCausalLM": Spec("Qwen3MoeForCausalLM"),
    "TransformersEmbeddingModel": Spec("LlamaModel"),
    "TransformersMoEEmbeddingModel": Spec("Qwen3MoeModel"),
    "TransformersForSequenceClassification": Spec("LlamaForSequenceClassification"),
    "TransformersMoEForSequenceClassification": Spec("MixtralForSequenceClassification"),
    "LlamaBidirectionalModel": Spec("LlamaModel", dict(pooling="avg")),
    "LlamaBidirectionalForSequenceClassification": Spec("LlamaForSequenceClassification", dict(pooling="avg")),
    "HunYuanMoEV1ForCausalLM": Spec(
        config=dict(moe_intermediate_size=[256, 256], num_shared_expert=[1, 1], moe_topk=[2, 2])
    ),
    "DeepseekV2ForCausalLM": Spec(config=dict(n_group=1, topk_group=1, topk_method="greedy", q_lora_rank=None)),
    "DeepseekV3ForCausalLM": Spec(config=dict(topk_method="noaux_tc", n_group=1, topk_group=1)),
    "BailingMoeForCausalLM": Spec("generic", _MOE),
    "BailingMoeV2ForCausalLM": Spec("generic", _MOE),
}


def shrunk(config_class: type, seen: int = 0) -> dict[str, Any]:
    """Arguments for `config_class` that make it small: a value of `SIZES` for each of its keys, sub-configs alike."""
    default: Any = config_class()
    if hasattr(default, "allow_global_per_layer_attribute_access"):
        default.allow_global_per_layer_attribute_access = True
    values = default.to_dict()
    token = 10
    out: dict[str, Any] = {}
    for key, value in values.items():
        sub = getattr(default, key, None)
        below = getattr(config_class, "sub_configs", {}).get(key)
        if value is None and key == "vision_config" and below not in (None, _hf.AutoConfig):
            sub = below()  # towers that are off by default
        if isinstance(sub, transformers.PretrainedConfig) and seen < 4:
            out[key] = shrunk(type(sub), seen + 1) | ({"model_type": sub.model_type} if sub.model_type else {})
        elif key.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCAB:
            token += 1
            out[key] = token
        elif key in SIZES and value is not None and not isinstance(value, (dict, bool)):
            size = SIZES[key]
            out[key] = [size] * len(value) if isinstance(value, (list, tuple)) and isinstance(size, int) else size
        elif key == "rope_parameters" and isinstance(value, dict) and _NESTED_ROPE in value:
            out[key] = value | {_NESTED_ROPE: [4, 6, 6]}
    return out


def _merge(into: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        into[key] = _merge(into[key], value) if isinstance(value, dict) and isinstance(into.get(key), dict) else value
    return into


def _normal(name: str) -> str:
    name = name.lower().replace("_", "")
    for suffix in (
        "forcausallm", "forconditionalgeneration", "forsequenceclassification", "model", "textconfig", "config",
        "mmconfig",
    ):  # fmt: skip
        name = name.removesuffix(suffix)
    return name


def config_class(architecture: str, model_class: type) -> type | None:
    """The config class of an architecture: transformers', or the one that the model's file imports."""
    spec = TABLE.get(architecture, Spec())
    for name in (spec.base, architecture):
        if name and (found := getattr(_hf, name, None)) is not None and getattr(found, "config_class", None):
            return found.config_class  # type: ignore[no-any-return]
        if name and name in _hf.CONFIG_MAPPING:
            return _hf.CONFIG_MAPPING[name]  # type: ignore[no-any-return]
    if spec.base == "generic":
        return None
    module = sys.modules[model_class.__module__]
    imported = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, transformers.PretrainedConfig)
        and value is not transformers.PretrainedConfig
    ]
    wanted = _normal(architecture)
    for value in imported:
        if _normal(value.__name__) == wanted:
            return value
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for model_type in [*_CONFIG_REGISTRY, *_hf.CONFIG_MAPPING]:
        if _normal(model_type.replace("-", "")) == wanted:
            known: type = (_CONFIG_REGISTRY if model_type in _CONFIG_REGISTRY else _hf.CONFIG_MAPPING)[model_type]
            return known
    return imported[0] if len(imported) == 1 else None


def _config_of(value: Any) -> Any:
    """The config that a dict with a ``model_type`` stands for; anything else as it is."""
    if isinstance(value, dict) and value.get("model_type"):
        more = dict(value)
        return _hf.AutoConfig.for_model(more.pop("model_type"), **more)
    return value


def _plain(model_type: str) -> type:
    """A config class without fields of its own; dicts with a ``model_type`` become configs of that type."""

    class WalkConfig(transformers.PretrainedConfig):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{key: _config_of(value) for key, value in kwargs.items()})

        def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, "text_config", self)

    WalkConfig.model_type = model_type
    return WalkConfig


def sub_configs(config: Any) -> list[Any]:
    """The config and every config below it."""
    below = [value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    return [config, *(each for value in below for each in sub_configs(value))]


def tiny_config(architecture: str, model_class: type, guessed: dict[tuple[str, str], Any]) -> Any:
    """A tiny ``PretrainedConfig`` for the architecture, registered so that ``AutoConfig`` reads it back.

    Args:
        guessed: attributes to add, by class name of the (sub-)config and attribute.
    """
    spec = TABLE.get(architecture, Spec())
    cls = config_class(architecture, model_class)
    if cls is None:
        model_type = spec.model_type or f"walk_{architecture.lower()}"
        cls = _plain(model_type)
        _hf.AutoConfig.register(model_type, cls, exist_ok=True)
        values = dict(GENERIC)
    else:
        values = shrunk(cls)
    config = cls(**_merge({key: value for key, value in values.items() if key not in spec.drop}, spec.config))
    for (owner, name), value in guessed.items():
        for each in sub_configs(config):
            if type(each).__name__ == owner:
                setattr(each, name, _config_of(value))
    for each in sub_configs(config):
        if hasattr(each, "allow_global_per_layer_attribute_access"):
            each.allow_global_per_layer_attribute_access = True
    config.architectures = [architecture]
    return config
