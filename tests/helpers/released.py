"""The two releases as config and headers, without a byte of weights.

Written in numbers from the tables of architecture.md 2, 4, 5 and 6, independently of the package's
own parameter table, which it is there to check.
"""

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from emberbox.store.safetensors_header import TensorInfo

LAYERS, SPARSE, MTP = 45, tuple(range(3, 45, 4)), 45
TEXT = "model.language_model."
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}

# name, shape, whether the FP8 release stores it as block FP8; F32 where the name is in KEPT_F32
EVERY_LAYER = [
    ("input_layernorm.weight", (4096,), False),
    ("post_attention_layernorm.weight", (4096,), False),
]
STREAMS = [
    ("hc_attn_fn", (24, 16384), False),
    ("hc_attn_base", (24,), False),
    ("hc_attn_scale", (3,), False),
    ("hc_ffn_fn", (24, 16384), False),
    ("hc_ffn_base", (24,), False),
    ("hc_ffn_scale", (3,), False),
]
KDA = [
    ("self_attn.q_proj.weight", (8192, 4096), False),
    ("self_attn.k_proj.weight", (8192, 4096), False),
    ("self_attn.v_proj.weight", (8192, 4096), False),
    ("self_attn.q_conv1d.weight", (8192, 1, 4), False),
    ("self_attn.k_conv1d.weight", (8192, 1, 4), False),
    ("self_attn.v_conv1d.weight", (8192, 1, 4), False),
    ("self_attn.f_a_proj.weight", (128, 4096), False),
    ("self_attn.g_a_proj.weight", (128, 4096), False),
    ("self_attn.f_b_proj.weight", (8192, 128), False),
    ("self_attn.g_b_proj.weight", (8192, 128), False),
    ("self_attn.b_proj.weight", (64, 4096), False),
    ("self_attn.A_log", (64,), False),
    ("self_attn.dt_bias", (8192,), False),
    ("self_attn.o_norm.weight", (128,), False),
    ("self_attn.o_proj.weight", (4096, 8192), False),
]
MLA = [
    ("self_attn.q_a_proj.weight", (1536, 4096), True),
    ("self_attn.q_a_layernorm.weight", (1536,), False),
    ("self_attn.q_b_proj.weight", (16384, 1536), True),
    ("self_attn.kv_a_proj_with_mqa.weight", (512, 4096), True),
    ("self_attn.kv_a_layernorm.weight", (512,), False),
    ("self_attn.kv_b_proj.weight", (32768, 512), False),
    ("self_attn.o_proj.weight", (4096, 16384), True),
]
INDEXER = [
    ("self_attn.indexer.wq_b.weight", (4096, 1536), False),
    ("self_attn.indexer.wk.weight", (128, 4096), False),
    ("self_attn.indexer.k_norm.weight", (128,), False),
    ("self_attn.indexer.k_norm.bias", (128,), False),
    ("self_attn.indexer.weights_proj.weight", (32, 4096), False),
    ("self_attn.indexer.index_kpool_compress_gate", (128, 4096), False),
    ("self_attn.indexer.index_kpool_compress_ape", (4, 128), False),
]
DENSE = [
    ("mlp.gate_proj.weight", (12288, 4096), True),
    ("mlp.up_proj.weight", (12288, 4096), True),
    ("mlp.down_proj.weight", (4096, 12288), True),
]
ROUTER = [
    ("mlp.gate.weight", (288, 4096), False),
    ("mlp.gate.e_score_correction_bias", (288,), False),
]
EXPERT = [
    ("gate_proj.weight", (2048, 4096), True),
    ("up_proj.weight", (2048, 4096), True),
    ("down_proj.weight", (4096, 2048), True),
]
SHARED = [(f"mlp.shared_experts.{name}", shape, fp8) for name, shape, fp8 in EXPERT]
ROUTED = [
    (f"mlp.experts.{expert}.{name}", shape, fp8)
    for expert in range(288)
    for name, shape, fp8 in EXPERT
]
MTP_OWN = [
    ("eh_proj.weight", (4096, 8192), False),
    ("enorm.weight", (4096,), False),
    ("hnorm.weight", (4096,), False),
    ("shared_head.norm.weight", (4096,), False),
]
OUTSIDE = [
    (TEXT + "embed_tokens.weight", (154880, 4096), False),
    (TEXT + "norm.weight", (4096,), False),
    ("lm_head.weight", (154880, 4096), False),
]
VISION_BLOCK = [
    ("norm1.weight", (1024,), False),
    ("norm2.weight", (1024,), False),
    ("attn.qkv.weight", (3072, 1024), False),
    ("attn.qkv.bias", (3072,), False),
    ("attn.q_norm.weight", (64,), False),
    ("attn.k_norm.weight", (64,), False),
    ("attn.proj.weight", (1024, 1024), False),
    ("attn.proj.bias", (1024,), False),
    ("mlp.gate_proj.weight", (4096, 1024), False),
    ("mlp.gate_proj.bias", (4096,), False),
    ("mlp.up_proj.weight", (4096, 1024), False),
    ("mlp.up_proj.bias", (4096,), False),
    ("mlp.down_proj.weight", (1024, 4096), False),
    ("mlp.down_proj.bias", (1024,), False),
]
VISION = [
    ("patch_embed.proj.weight", (1024, 3, 2, 14, 14), False),
    ("patch_embed.proj.bias", (1024,), False),
    ("post_layernorm.weight", (1024,), False),
    ("downsample.weight", (4096, 1024, 2, 2), False),
    ("downsample.bias", (4096,), False),
    ("merger.proj.weight", (4096, 4096), False),
    ("merger.post_projection_norm.weight", (4096,), False),
    ("merger.post_projection_norm.bias", (4096,), False),
    ("merger.gate_proj.weight", (10240, 4096), False),
    ("merger.up_proj.weight", (10240, 4096), False),
    ("merger.down_proj.weight", (4096, 10240), False),
]
KEPT_F32 = (
    "A_log",
    "dt_bias",
    "e_score_correction_bias",
    "hc_attn_base",
    "hc_attn_scale",
    "hc_ffn_base",
    "hc_ffn_scale",
)


def released_config(*, fp8: bool = True) -> dict[str, Any]:
    """config.json of the release, every field of architecture.md 2."""
    sparse = list(SPARSE)
    text = {
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "vocab_size": 154880,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "layer_types": [
            "deepseek_sparse_attention" if i in sparse else "linear_attention" for i in range(45)
        ],
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(45) if i not in sparse],
            "full_attn_layers": sparse,
        },
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "head_dim": 0,
        "mla_use_nope": True,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * 45,
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
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829],
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "router_aux_loss_coef": 0.001,
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "glm5_next_vision",
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "out_hidden_size": 4096,
        "projection_intermediate_size": 10240,
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
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "image_token_id": 154854,
        "video_token_id": 154855,
        "image_start_token_id": 154830,
        "image_end_token_id": 154831,
        "video_start_token_id": 154832,
        "video_end_token_id": 154833,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": _not_converted(),
        }
    return config


def _not_converted() -> list[str]:
    """As released written against names that no tensor has; the released list has 1,509 of them."""
    kept = [n for tensors in released_parts().values() for n, _, is_fp8 in tensors if not is_fp8]
    return [name.replace(TEXT, "model.").removesuffix(".weight") for name in kept]


def released_parts() -> dict[str, list[tuple[str, tuple[int, ...], bool]]]:
    """Part as in architecture.md 4 -> its tensors: full name, shape, FP8 there or not."""
    kda = [layer for layer in range(LAYERS) if layer not in SPARSE]
    moe = range(3, LAYERS)
    mtp = [*MTP_OWN, *EVERY_LAYER, *MLA, *INDEXER, *ROUTER, *SHARED, *ROUTED]
    return {
        "embeddings": OUTSIDE[:1],
        "final norm": OUTSIDE[1:2],
        "lm_head": OUTSIDE[2:],
        "KDA attention": list(_layers(kda, KDA)),
        "sparse MLA": list(_layers(SPARSE, MLA)),
        "indexer": list(_layers(SPARSE, INDEXER)),
        "dense FFN": list(_layers(range(3), DENSE)),
        "router": list(_layers(moe, ROUTER)),
        "shared expert": list(_layers(moe, SHARED)),
        "routed experts": list(_layers(moe, ROUTED)),
        "mHC": list(_layers(range(LAYERS), STREAMS)),
        "layer norms": list(_layers(range(LAYERS), EVERY_LAYER)),
        "vision": [
            *(("model.visual." + n, s, f) for n, s, f in VISION),
            *(
                (f"model.visual.blocks.{b}.{n}", s, f)
                for b in range(24)
                for n, s, f in VISION_BLOCK
            ),
        ],
        "MTP layer": list(_layers([MTP], mtp)),
    }


def released_infos(*, fp8: bool) -> dict[str, TensorInfo]:
    """The headers of a whole release."""
    infos: dict[str, TensorInfo] = {}
    for tensors in released_parts().values():
        for name, shape, is_fp8 in tensors:
            if fp8 and is_fp8:
                blocks = (shape[0] // 128, shape[1] // 128)
                _add(infos, name, "F8_E4M3", shape)
                _add(infos, name + "_scale_inv", "F32", blocks)
            else:
                _add(infos, name, "F32" if name.endswith(KEPT_F32) else "BF16", shape)
    return infos


def _layers(
    layers: Iterable[int], tensors: Iterable[tuple[str, tuple[int, ...], bool]]
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    for layer in layers:
        for name, shape, fp8 in tensors:
            yield f"{TEXT}layers.{layer}.{name}", shape, fp8


def _add(infos: dict[str, TensorInfo], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    num_bytes = prod(shape) * BYTES[dtype]
    infos[name] = TensorInfo(name, dtype, shape, Path("release", "model.safetensors"), 0, num_bytes)
