"""The shape of ember-nano: token ids of the special tokens and its config.json.

Knows no tensors. Why these numbers: docs/nano-model.md.
"""

VOCAB_SIZE = 4096
FIRST_SPECIAL = 4056  # 36 special tokens; the four rows after them are unused

# In the released order: nano id = released id - 150764.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    *(f"<|reserved_{i}|>" for i in range(7)),
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    *(f"<|reserved_{i}|>" for i in range(7, 10)),
    "<|image|>",
    "<|video|>",
)
TOKEN = {name: FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
EOS_IDS = [TOKEN[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
PAD_ID = TOKEN["<|endoftext|>"]

HIDDEN, NUM_LAYERS, SPARSE_LAYERS = 128, 8, (3, 7)


def _linear_attention() -> dict[str, object]:
    return {
        "num_heads": 2,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": [i for i in range(NUM_LAYERS) if i not in SPARSE_LAYERS],
        "full_attn_layers": list(SPARSE_LAYERS),
    }


def _text() -> dict[str, object]:
    kinds = ("linear_attention", "deepseek_sparse_attention")
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "first_k_dense_replace": 1,
        "layer_types": [kinds[i in SPARSE_LAYERS] for i in range(NUM_LAYERS)],
        "mlp_layer_types": ["dense"] + ["sparse"] * (NUM_LAYERS - 1),
        "indexer_types": ["full"] * NUM_LAYERS,
        "max_position_embeddings": 16384,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "swiglu_limit": 4.0,  # low enough that ordinary activations reach it
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "router_aux_loss_coef": 0.001,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_IDS,
        **_attention(),
        **_experts(),
        "linear_attn_config": _linear_attention(),
        "mhc": True,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
    }


def _attention() -> dict[str, object]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 0,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 0,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "index_topk": 64,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
    }


def _experts() -> dict[str, object]:
    return {
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "moe_layer_freq": 1,
    }


def _vision() -> dict[str, object]:
    return {
        "model_type": "glm5_next_vision",
        "depth": 3,
        "hidden_size": 128,
        "num_heads": 2,
        "intermediate_size": 256,
        "out_hidden_size": HIDDEN,
        "projection_intermediate_size": 256,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "image_size": 112,
        "hidden_act": "silu",
        "attention_bias": True,
        "rms_norm_eps": 1e-05,
        "swiglu_limit": 4.0,
    }


def config_json() -> dict[str, object]:
    """config.json in the released field names, with the fields that vLLM reads."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "image_token_id": TOKEN["<|image|>"],
        "video_token_id": TOKEN["<|video|>"],
        "image_start_token_id": TOKEN["<|begin_of_image|>"],
        "image_end_token_id": TOKEN["<|end_of_image|>"],
        "video_start_token_id": TOKEN["<|begin_of_video|>"],
        "video_end_token_id": TOKEN["<|end_of_video|>"],
        "tie_word_embeddings": False,
        "text_config": _text(),
        "vision_config": _vision(),
    }
