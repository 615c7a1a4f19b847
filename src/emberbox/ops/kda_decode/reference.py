"""The layer op by op, one sequence after another."""

from typing import TypeAlias

import torch
from torch import Tensor

from emberbox.ops.kda_commit.reference import kda_commit
from emberbox.ops.kda_inputs.reference import kda_inputs
from emberbox.ops.kda_verify.reference import kda_verify
from emberbox.ops.linear.reference import linear
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.rotation import rotate
from emberbox.ops.short_conv.reference import short_conv

# The contract beside this file names and sizes what they hold.
Pair: TypeAlias = tuple[Tensor, Tensor]
Four: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
Weights: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def kda_decode(
    inputs: Pair,
    weights: Weights,
    cache: Pair,
    pending: Four,
    rows: Pair,
    constants: tuple[float, float],
) -> Tensor:
    (qkv, small), (f_b, g_b, conv, A_log, dt_bias, o_norm, suh) = inputs, weights
    T, R, H = len(qkv), f_b.shape[1], len(A_log)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    small = small.to(qkv.dtype)
    f_a, g_a, beta = small[:, :R], small[:, R : 2 * R], torch.sigmoid(small[:, 2 * R :].to(wide))
    forget = linear(f_a, f_b).view(T, H, -1)
    out = torch.zeros_like(forget)
    M = T // len(rows[0])
    for index, (slot, count) in enumerate(zip(*(each.tolist() for each in rows), strict=True)):
        if count:
            start, stop = index * M, index * M + count
            mixed = short_conv(qkv[start:stop], conv, cache[0][slot])
            q, k, v = mixed.view(count, 3, H, -1).unbind(1)
            q, k, gate = kda_inputs((q, k), forget[start:stop], A_log, dt_bias, constants[0])
            state = cache[1][slot].to(wide)
            late, deltas = kda_verify(q, k, v, gate, beta[start:stop], state)
            out[start:stop] = late.to(out.dtype)
            cache[1][slot] = kda_commit(k[:1], deltas[:1], gate[:1], state)
            cache[0][slot] = torch.cat([cache[0][slot, 1:], qkv[start : start + 1]])
            for held, new in zip(pending, (qkv[start:stop], k, gate, deltas), strict=True):
                held[start + 1 : stop] = new[1:]
    open_by = torch.sigmoid(linear(g_a, g_b).to(wide)).view(T, H, -1)
    normed = rms_norm(out, o_norm, constants[1]).to(wide) * open_by
    x = normed.to(qkv.dtype).flatten(1)
    return x if suh is None else rotate(x, suh)
