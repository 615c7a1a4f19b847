"""A tiny model of the released architecture, every mechanism in it: config, tensors, folder."""

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Kind, parameter_table
from tests.helpers.released import released_config

TEXT_SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 12,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 80,
    "eos_token_id": [80, 87, 89],
}
VISION_SIZES = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 3,
    "intermediate_size": 28,
    "out_hidden_size": 40,
    "projection_intermediate_size": 44,
}


def tiny_config() -> dict[str, object]:
    """config.json of the tiny model, in the released spelling; a new dict every time."""
    config = deepcopy(released_config(fp8=False))
    text, vision = config["text_config"], config["vision_config"]
    text.update(TEXT_SIZES)
    vision.update(VISION_SIZES)
    sparse = [1, 3]
    text["layer_types"] = [
        "deepseek_sparse_attention" if i in sparse else "linear_attention" for i in range(5)
    ]
    text["mlp_layer_types"] = ["dense"] + ["sparse"] * 4
    text["indexer_types"] = ["full"] * 5
    text["linear_attn_config"] |= {
        "num_heads": 2,
        "head_dim": 10,
        "kda_layers": [0, 2, 4],
        "full_attn_layers": sparse,
    }
    for offset, key in enumerate(
        ("image_start", "image_end", "video_start", "video_end", "image", "video")
    ):
        config[f"{key}_token_id"] = 90 + offset
    return config


def tiny_tensors(config: Glm5NextConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random tensors under the released names, as the release stores them."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for parameter in parameter_table(config):
        values = torch.randn(parameter.shape, generator=generator)
        tensors[parameter.name] = values if parameter.kind is Kind.FP32 else values.to(dtype)
    return tensors


def write_folder(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    """One folder with config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder
