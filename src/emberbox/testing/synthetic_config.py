"""config.json of the models that can be made without their weights. Data; knows no tensors."""

from collections.abc import Callable, Mapping

FULL = "glm-5.3-flash-base2-published"
TINY = "glm-5.3-flash-tiny"

COMMON_TEXT: Mapping[str, object] = {
    "model_type": "glm5_next_text",
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "mla_use_nope": True,
    "index_head_dim": 128,
    "index_kpool": 4,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "mhc": True,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.001,
    "dtype": "bfloat16",
}
COMMON_VISION: Mapping[str, object] = {
    "model_type": "glm5_next_vision",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "image_size": 448,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 10.0,
}


def config_json(name: str) -> dict[str, object]:
    """A fresh copy of the config called `name`; KeyError for one that there is not."""
    return CONFIGS[name]()


def _released() -> dict[str, object]:
    """Every width as released."""
    text: dict[str, object] = _text(num_layers=45, num_dense=3) | {
        "hidden_size": 4096,
        "vocab_size": 154880,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_topk": 2048,
        "max_position_embeddings": 1048576,
        "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829],
    }
    vision: dict[str, object] = {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "out_hidden_size": 4096,
        "projection_intermediate_size": 10240,
    }
    return _config(text, vision, num_kda_heads=64, first_media_token=154830)


def _tiny() -> dict[str, object]:
    """The same structure, with every kind of layer, for a CPU in seconds."""
    text: dict[str, object] = _text(num_layers=6, num_dense=1) | {
        "hidden_size": 256,
        "vocab_size": 512,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "index_n_heads": 16,
        "index_topk": 32,
        "max_position_embeddings": 8192,
        "pad_token_id": 480,
        "eos_token_id": [480, 481, 482],
    }
    vision: dict[str, object] = {
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 2,
        "intermediate_size": 256,
        "out_hidden_size": 256,
        "projection_intermediate_size": 384,
    }
    return _config(text, vision, num_kda_heads=2, first_media_token=484)


def _text(num_layers: int, num_dense: int) -> dict[str, object]:
    """What both have in common, and the schedule: sparse layers at 3, 7, 11 and on."""
    kinds = [
        "deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)
    ]
    return {
        **COMMON_TEXT,
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_dense,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
        "layer_types": kinds,
        "indexer_types": ["full"] * num_layers,
    }


def _config(
    text: dict[str, object],
    vision: dict[str, object],
    *,
    num_kda_heads: int,
    first_media_token: int,
) -> dict[str, object]:
    kinds = text["layer_types"]
    assert isinstance(kinds, list), "made above"
    text["linear_attn_config"] = {
        "num_heads": num_kda_heads,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": [i for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds) if kind != "linear_attention"],
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "image_start_token_id": first_media_token,
        "image_end_token_id": first_media_token + 1,
        "video_start_token_id": first_media_token + 2,
        "video_end_token_id": first_media_token + 3,
        "image_token_id": first_media_token + 24,
        "video_token_id": first_media_token + 25,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {**COMMON_VISION, **vision},
    }


CONFIGS: Mapping[str, Callable[[], dict[str, object]]] = {FULL: _released, TINY: _tiny}
