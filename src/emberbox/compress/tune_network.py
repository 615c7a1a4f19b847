"""The network of a tuning step: the plain layers, under autograd, all rows of a batch together.

Few launches count here. Heads of all rows of a batch are heads of one sequence to KDA; experts take
tokens in the order of experts; EXL3 weights stay in factors, so no product is made for a weight's
gradient. Knows no optimiser and no files.
"""

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from emberbox.compress.tune_operands import Factored, Operands
from emberbox.model.batch import Batch, Span
from emberbox.model.cache import Cache
from emberbox.model.config import Glm5NextConfig
from emberbox.model.kda import KimiDeltaAttention
from emberbox.model.layers import Parameters
from emberbox.model.network import Network
from emberbox.model.parameters import TEXT
from emberbox.model.steps import Part
from emberbox.ops.kda_chunk.kernel_torch import kda_chunk
from emberbox.ops.linear.reference import linear as plain_linear
from emberbox.ops.short_conv.reference import short_conv
from emberbox.ops.swiglu.reference import swiglu
from emberbox.ops.table import OpTable

Projections = tuple[tuple[Tensor | Factored, ...], ...]

# B rows of T tokens each, n = B T; H hidden or heads, D head width, C channels, k experts a token


class TuningNetwork(Network):
    """The trunk for batches of `num_rows` rows of equal length, without a cache."""

    def __init__(self, config: Glm5NextConfig, operands: Operands, num_rows: int) -> None:
        # A factored weight is an operand to `linear` and `moe_experts` alone, which are ours.
        params = cast("Parameters", operands)
        ops = replace(
            OpTable.reference(),
            linear=linear,
            moe_experts=moe_experts,
            short_conv=partial(conv_of_rows, num_rows),
            kda_chunk=partial(kda_of_rows, num_rows),
        )
        super().__init__(config, params, ops)
        for number, layer in enumerate(self.layers):
            if isinstance(layer.attention, KimiDeltaAttention):
                at, index = f"{TEXT}layers.{number}.self_attn.", layer.attention.index
                layer.attention = _RowsTogether(config.text, ops, params, at, index)

    def hidden(self, token_ids: Tensor) -> Tensor:
        """token_ids [B, T] int64 -> states after the final norm [B T, H]."""
        B, T = token_ids.shape
        spans = tuple(Span(b * T, (b + 1) * T, 0, b, ()) for b in range(B))
        return self.forward(Batch(token_ids.flatten(), spans), None)


class _RowsTogether(KimiDeltaAttention):
    """Takes all rows as one span; its ops know where each begins."""

    def __call__(self, x: Tensor, parts: tuple[Part, ...], cache: Cache | None) -> Tensor:
        return super().__call__(x, (Span(0, x.shape[0], 0, 0, ()),), cache)


def linear(x: Tensor, weight: Tensor | Factored, bias: Tensor | None = None) -> Tensor:
    """x [..., I] -> [..., O]."""
    if isinstance(weight, Tensor):
        return plain_linear(x, weight, bias)
    y = ((x * weight.suh) @ weight.inner) * weight.svh
    return y if bias is None else y + bias


def moe_experts(
    x: Tensor, experts: Tensor, weights: Tensor, projections: Projections, limit: float
) -> Tensor:
    """x [n, H], experts and weights [n, k] -> [n, H]. An expert without tokens takes no part."""
    n, k = experts.shape
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=len(projections)).tolist()
    used = [w for w, size in zip(projections, sizes, strict=True) if size]
    filled = [size for size in sizes if size]

    def run(rows: Tensor, which: int) -> Tensor:
        parts = rows.split_with_sizes(filled)
        return torch.cat([linear(part, w[which]) for part, w in zip(parts, used, strict=True)])

    # Indexing, whose gradient is summed in a fixed order on a GPU; index_select's is not.
    rows = x[order // k]
    y = run(swiglu(run(rows, 0), run(rows, 1), limit), 2)
    return (y[order.argsort()].view(n, k, -1) * weights.unsqueeze(-1)).sum(1)


def conv_of_rows(num_rows: int, x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """`short_conv` of each row: x [n, C], weight [C, W], history [W - 1, C] of every row."""
    wide = _apart(x, num_rows)  # [T, B C]
    y = short_conv(wide, weight.repeat(num_rows, 1), history.repeat(1, num_rows))
    return _together(y, num_rows)


def kda_of_rows(num_rows: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """`kda_chunk` of each row. Inputs are q, k, v, gate [n, H, D], beta [n, H], and the state
    [H, D, D] before it.

    Returns [n, H, D] and the states after the rows [B H, D, D].
    """
    q, k, v, gate, beta = (_apart(each, num_rows) for each in inputs[:-1])
    out, after = kda_chunk(q, k, v, gate, beta, inputs[-1].repeat(num_rows, 1, 1))
    return _together(out, num_rows), after


def _apart(x: Tensor, num_rows: int) -> Tensor:
    """[B T, H, ...] -> [T, B H, ...]."""
    rows = x.view(num_rows, -1, *x.shape[1:])
    return rows.transpose(0, 1).flatten(1, 2)


def _together(x: Tensor, num_rows: int) -> Tensor:
    """[T, B H, ...] -> [B T, H, ...]."""
    rows = x.view(len(x), num_rows, -1, *x.shape[2:])
    return rows.transpose(0, 1).flatten(0, 1)
