"""A tiny glm5_next for training tests, with every kind of layer, and batches of random tokens."""

import copy

import numpy as np
import torch

from emberbox.model.config import Glm5NextConfig
from training.context import Context
from training.parameters import initial, is_state
from training.pointwise import Pointwise
from training.recipe import Bucket
from training.shape import config_json

VOCAB_SIZE, IMAGE = 512, 500


def tiny_json():
    """The nano's config with fewer layers and experts: KDA dense, KDA with experts, sparse."""
    config = copy.deepcopy(config_json())
    text, vision = config["text_config"], config["vision_config"]
    ids = [key for key in config if key.endswith("_token_id")]
    config |= {key: IMAGE + i for i, key in enumerate(ids)}
    text |= {
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": 510,
        "eos_token_id": [510],
        "hidden_size": 64,
        "q_lora_rank": 52,
        "index_head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention"] * 2 + ["deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full"] * 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "intermediate_size": 52,
        "kv_lora_rank": 44,
        "swiglu_limit": 1.0,
    }
    text["linear_attn_config"] |= {"head_dim": 32, "kda_layers": [0, 1], "full_attn_layers": [2]}
    vision |= {
        "depth": 1,
        "hidden_size": 48,
        "out_hidden_size": 64,
        "intermediate_size": 40,
        "swiglu_limit": 1.0,
    }
    return config


def tiny_config():
    return Glm5NextConfig.from_dict(tiny_json())


def rough_parameters(config, seed=0):
    """Starting values with every zero and one disturbed, so that no parameter is without effect."""
    generator = torch.Generator().manual_seed(seed)
    values = initial(config, seed)
    for name, value in values.items():
        if value.dim() == 1 or "ape" in name:
            value += torch.randn(value.shape, generator=generator) * (
                0.1 if is_state(name) else 0.3
            )
        if name == "lm_head.weight" or "kpool_compress_gate" in name or "gate.weight" in name:
            value *= 8
    return values


def context(config, params, dtype=torch.float32):
    return Context(config, params, Pointwise(), dtype)


def make_batch(seed, bucket: Bucket):
    """Rows in which the next token is the last one plus 1 within a small range: learnable."""
    rng = np.random.default_rng(seed)
    B, T = bucket.num_rows, bucket.length
    start = rng.integers(0, 40, (B, 1))
    ids = (100 + (start + np.arange(T)) % 40).astype(np.int16)
    weights = np.ones((B, T), np.float16)
    weights[:, T - 5 :] = -1
    if bucket.image is None:
        return ids, weights, None
    width, height = bucket.image
    ids[:, 3 : 3 + width * height // 28**2] = IMAGE
    return ids, weights, rng.integers(0, 255, (B, 2, height, width, 3)).astype(np.uint8)
