"""The vision tower for batches of equal pictures (architecture.md 5).

Pictures arrive as bytes and become patches on the device. A row may hold several temporal slices of
two frames; each is a picture of its own.
"""

import torch
from torch import Tensor
from torch.nn import functional

from emberbox.model.config import VisionConfig
from training.context import Context
from training.experts import feed_forward
from training.pointwise import rms_norm

# n pictures, p patches each, V hidden, H heads, D head width
PREFIX = "model.visual."
MERGER_NORM_EPS = 1e-5
CHANNEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
CHANNEL_STD = (0.26862954, 0.26130258, 0.27577711)


def patchify(pixels: Tensor, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """uint8 [n, 2, height, width, 3] -> patches [n, p, 1176] float32, their places [p, 2].

    Block-major: block row, block column, then the patches of the block.
    """
    n, frames, height, width, _ = pixels.shape
    size, merge = config.patch_size, config.spatial_merge_size
    # Scalars, not a tensor of means: a graph being captured may not copy from the host.
    x = torch.stack(
        [(pixels[..., c].float() / 255 - CHANNEL_MEAN[c]) / CHANNEL_STD[c] for c in range(3)], -1
    )
    h, w = height // size // merge, width // size // merge
    x = x.reshape(n, frames, h, merge, size, w, merge, size, 3)
    x = x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(n, h * w * merge**2, -1)
    blocks = (h, w, merge, merge)
    row = torch.arange(h * merge, device=pixels.device).view(h, 1, merge, 1).expand(blocks)
    column = torch.arange(w * merge, device=pixels.device).view(1, w, 1, merge).expand(blocks)
    return x, torch.stack([row.flatten(), column.flatten()], -1)


def vision_features(ctx: Context, pixels: Tensor) -> Tensor:
    """uint8 [B, 2 * slices, height, width, 3] -> features [B, tokens of all slices, hidden]."""
    config = ctx.config.vision
    if config is None:
        raise ValueError("pictures were given to a model without a vision tower")
    slices = pixels.view(-1, config.temporal_patch_size, *pixels.shape[2:])
    patches, places = patchify(slices, config)
    cos, sin = _rotation(places, config)
    x = ctx.linear(patches.to(ctx.dtype), f"{PREFIX}patch_embed.proj", bias=True)
    for block in range(config.depth):
        x = _block(ctx, f"{PREFIX}blocks.{block}.", x, (cos, sin))
    x = _norm(ctx, x, f"{PREFIX}post_layernorm", config.rms_norm_eps)
    return _merge(ctx, x, config).view(pixels.shape[0], -1, config.out_hidden_size)


def _rotation(places: Tensor, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos, sin [p, 1, D]: angles of the row, of the column, and both again."""
    half = config.hidden_size // config.num_heads // 2
    exponents = torch.arange(0, half, 2, device=places.device).float() / half
    angles = (places.unsqueeze(-1) * config.rope_theta**-exponents).flatten(1)
    angles = torch.cat([angles, angles], -1).unsqueeze(1)
    return angles.cos(), angles.sin()


def _norm(ctx: Context, x: Tensor, name: str, eps: float) -> Tensor:
    # Not the compiled one: each picture size would be one more compilation, for little.
    return rms_norm(x, ctx.params[f"{name}.weight"], eps)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    wide = x.float()
    a, b = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-b, a], -1) * sin).to(x.dtype).transpose(1, 2)


def _block(ctx: Context, prefix: str, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    config = ctx.config.vision
    if config is None:
        raise ValueError("no vision tower")
    y = _norm(ctx, x, f"{prefix}norm1", config.block_norm_eps)
    qkv = ctx.linear(y, f"{prefix}attn.qkv", bias=True)
    split = qkv.view(*qkv.shape[:2], 3, config.num_heads, -1)
    q, k, v = split.unbind(2)  # each [n, p, H, D]
    q, k = (
        _rotate(_norm(ctx, t, f"{prefix}attn.{name}_norm", config.rms_norm_eps), rotation)
        for t, name in ((q, "q"), (k, "k"))
    )
    mixed = (
        functional.scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(2)
    )
    x = x + ctx.linear(mixed, f"{prefix}attn.proj", bias=True)
    y = _norm(ctx, x, f"{prefix}norm2", config.block_norm_eps)
    return x + feed_forward(ctx, f"{prefix}mlp.", y, config.swiglu_limit, bias=True)


def _merge(ctx: Context, x: Tensor, config: VisionConfig) -> Tensor:
    """x [n, p, V] -> [n, p / 4, hidden]; a block's row is ordered channel, y, x."""
    block = config.spatial_merge_size**2
    x = x.view(x.shape[0], -1, block, x.shape[-1]).transpose(2, 3).flatten(2)
    x = ctx.linear(x, f"{PREFIX}downsample", bias=True)
    x = ctx.linear(x, f"{PREFIX}merger.proj")
    norm = f"{PREFIX}merger.post_projection_norm"
    weight, bias = ctx.params[f"{norm}.weight"], ctx.params[f"{norm}.bias"]
    y = functional.layer_norm(x.float(), x.shape[-1:], weight, bias, MERGER_NORM_EPS)
    y = functional.gelu(y).to(x.dtype)
    return feed_forward(ctx, f"{PREFIX}merger.", y, config.swiglu_limit, bias=False)
