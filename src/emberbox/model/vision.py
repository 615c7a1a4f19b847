"""The vision tower: patches of images or video slices become rows for the text model's embeddings.

Architecture.md 5. Knows no files, no picture formats and no placeholders: patches arrive normalised
and in block-major order (block row, block column, then the patches of the block), see `positions`.
Activations run in the dtype of `pixel_values`.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import gelu

from emberbox.model.config import VisionConfig
from emberbox.model.layers import LayerNorm, Linear, Operand, Parameters, RMSNorm, by_rows, plain
from emberbox.model.parameters import VISUAL
from emberbox.ops.contract import require
from emberbox.ops.table import OpTable

# P patches of all images and slices, H heads, D head width, G merged rows (P / merge^2)
MERGER_NORM_EPS = 1e-5  # the merger's LayerNorm; it does not follow rms_norm_eps

Grid: TypeAlias = tuple[int, int, int]  # temporal slices, patch rows, patch columns


def positions(grids: Sequence[Grid], merge: int) -> Tensor:
    """Row and column of every patch, [P, 2] int64 on the CPU, in block-major order."""
    parts = []
    for t, h, w in grids:
        blocks = (h // merge, w // merge, merge, merge)  # block row, block column, y, x
        rows = torch.arange(h).view(-1, 1, merge, 1).expand(blocks)
        columns = torch.arange(w).view(1, -1, 1, merge).expand(blocks)
        parts.append(torch.stack([rows.flatten(), columns.flatten()], dim=-1).repeat(t, 1))
    return torch.cat(parts)


def rotary_angles(position: Tensor, head_dim: int, theta: float) -> Tensor:
    """Angles [P, D/2] float32 from positions [P, 2]: D/4 for the row, then D/4 for the column.

    Frequencies theta^(-2i / (D/2)), i < D/4 (architecture.md 5).
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=position.device) / half
    return (position.unsqueeze(-1) * theta**-exponents).flatten(1)


class VisionMlp:
    """down(silu(min(gate x, limit)) * clamp(up x)); biases in the blocks, none in the merger."""

    def __init__(
        self, ops: OpTable, params: Parameters, prefix: str, limit: float, *, bias: bool
    ) -> None:
        """`prefix` ends in a dot; gate_proj, up_proj and down_proj lie under it."""
        self.swiglu, self.limit = ops.swiglu, limit
        self.gate, self.up, self.down = (
            Linear.load(ops, params, f"{prefix}{name}", bias=bias)
            for name in ("gate_proj", "up_proj", "down_proj")
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [P, hidden] -> [P, hidden]."""
        return by_rows(self._few, x)

    def _few(self, x: Tensor) -> Tensor:
        return self.down(self.swiglu(self.gate(x), self.up(x), self.limit))


class VisionAttention:
    """Attention within each segment; queries and keys are normalised per head, then rotated."""

    def __init__(self, config: VisionConfig, ops: OpTable, params: Parameters, prefix: str) -> None:
        """`prefix` ends in "attn."; q, k, v are one fused projection or, quantised, three."""
        self.attend, self.eps, self.num_heads = (
            ops.vision_attention,
            config.rms_norm_eps,
            config.num_heads,
        )
        fused = f"{prefix}qkv.weight" in params
        names = ("qkv",) if fused else ("q_proj", "k_proj", "v_proj")
        self.inputs = tuple(
            Linear.load(ops, params, f"{prefix}{name}", bias=True) for name in names
        )
        self.q_norm = plain(params, f"{prefix}q_norm.weight")
        self.k_norm = plain(params, f"{prefix}k_norm.weight")
        self.proj = Linear.load(ops, params, f"{prefix}proj", bias=True)

    def __call__(self, x: Tensor, angles: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """x [P, hidden], angles [P, D/2], lengths of the segments -> [P, hidden]."""
        qkv = torch.cat([linear(x) for linear in self.inputs], dim=-1)
        qkv = qkv.view(x.shape[0], 3, self.num_heads, -1)  # [P, 3, H, D]
        mixed = self.attend(qkv, self.q_norm, self.k_norm, angles, lengths, self.eps)
        return self.proj(mixed.flatten(1))


class VisionBlock:
    """Attention and feed-forward, a norm before each, plain residuals."""

    def __init__(self, config: VisionConfig, ops: OpTable, params: Parameters, prefix: str) -> None:
        """`prefix` ends in "blocks.B."."""
        eps = config.block_norm_eps
        self.norm1 = RMSNorm(ops, plain(params, f"{prefix}norm1.weight"), eps)
        self.norm2 = RMSNorm(ops, plain(params, f"{prefix}norm2.weight"), eps)
        self.attention = VisionAttention(config, ops, params, f"{prefix}attn.")
        self.mlp = VisionMlp(ops, params, f"{prefix}mlp.", config.swiglu_limit, bias=True)

    def __call__(self, x: Tensor, angles: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """x [P, hidden] -> [P, hidden]."""
        x = x + self.attention(self.norm1(x), angles, lengths)
        return x + self.mlp(self.norm2(x))


class VisionMerger:
    """One row for the text model from each block of patches: downsample, project, feed-forward."""

    def __init__(self, config: VisionConfig, ops: OpTable, params: Parameters) -> None:
        prefix = f"{VISUAL}merger."
        self.block_patches = config.spatial_merge_size**2
        self.downsample = Linear(
            ops,
            _matrix(params[f"{VISUAL}downsample.weight"]),
            plain(params, f"{VISUAL}downsample.bias"),
        )
        self.proj = Linear.load(ops, params, f"{prefix}proj")
        self.norm = LayerNorm(
            plain(params, f"{prefix}post_projection_norm.weight"),
            plain(params, f"{prefix}post_projection_norm.bias"),
            MERGER_NORM_EPS,
        )
        self.mlp = VisionMlp(ops, params, prefix, config.swiglu_limit, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x [P, hidden] -> [G, out_hidden]."""
        # The weight's columns are a convolution's: channel, then y and x inside the block.
        blocks = x.view(-1, self.block_patches, x.shape[-1]).transpose(1, 2).flatten(1)
        z = self.proj(self.downsample(blocks))
        return self.mlp(gelu(self.norm(z)).to(x.dtype))


class VisionTower:
    """Patches to features. `params` are operands under the released names `model.visual.*`."""

    def __init__(self, config: VisionConfig, ops: OpTable, params: Parameters) -> None:
        self.config = config
        self.patch_embed = Linear(
            ops,
            _matrix(params[f"{VISUAL}patch_embed.proj.weight"]),
            plain(params, f"{VISUAL}patch_embed.proj.bias"),
        )
        self.blocks = tuple(
            VisionBlock(config, ops, params, f"{VISUAL}blocks.{block}.")
            for block in range(config.depth)
        )
        # Of the RMSNorms outside attention, only those of the blocks follow block_norm_eps.
        weight = plain(params, f"{VISUAL}post_layernorm.weight")
        self.post_layernorm = RMSNorm(ops, weight, config.rms_norm_eps)
        self.merger = VisionMerger(config, ops, params)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features [sum of t*h*w / merge^2, out_hidden] in the dtype of `pixel_values`.

        pixel_values [sum of t*h*w, in_channels * temporal_patch * patch^2]: a row is channel, time,
        y, x; images and slices follow each other, each block-major. grids: (t, h, w) in patches of
        every image (t = 1) or video. Attention stays inside an image or one temporal slice.
        Raises OpError when rows and grids disagree or a grid is not made of whole blocks.
        """
        self._check(pixel_values, grids)
        config = self.config
        position = positions(grids, config.spatial_merge_size).to(pixel_values.device)
        head_dim = config.hidden_size // config.num_heads
        angles = rotary_angles(position, head_dim, config.rope_theta)
        lengths = tuple(h * w for t, h, w in grids for _ in range(t))
        x = self.patch_embed(pixel_values)
        for block in self.blocks:
            x = block(x, angles, lengths)
        return self.merger(self.post_layernorm(x))

    __call__ = forward

    def _check(self, pixel_values: Tensor, grids: Sequence[Grid]) -> None:
        config, merge = self.config, self.config.spatial_merge_size
        for t, h, w in grids:
            require(
                t > 0 and h > 0 and w > 0 and h % merge == 0 and w % merge == 0,
                "vision tower: grid {} is not made of whole {} x {} blocks",
                (t, h, w),
                merge,
                merge,
            )
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        expected = (sum(t * h * w for t, h, w in grids), width)
        found = tuple(pixel_values.shape)
        require(
            bool(grids) and found == expected,
            "vision tower: pixel_values are {}, the grids {} ask for {}",
            found,
            list(grids),
            expected,
        )


def _matrix(weight: Operand) -> Operand:
    """A convolution over whole patches as a matrix [out, in]; a quantised weight already is one."""
    return weight.flatten(1) if isinstance(weight, Tensor) else weight
