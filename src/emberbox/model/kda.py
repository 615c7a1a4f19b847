"""Kimi delta attention, 34 of the 45 layers (architecture.md 3.2)."""

import torch
from torch import Tensor

from emberbox.model.batch import Span
from emberbox.model.cache import Cache, KdaPast, KdaTokens
from emberbox.model.config import TextConfig
from emberbox.model.layers import Linear, Parameters, RMSNorm, plain, split_last
from emberbox.model.steps import Part, Steps
from emberbox.ops.table import OpTable

# T tokens of the batch, n tokens of one span, H heads, D head width, C = 3 H D


class KimiDeltaAttention:
    """q, k, v through a short convolution; a gated delta rule per head; a gated norm; o_proj."""

    def __init__(
        self, config: TextConfig, ops: OpTable, params: Parameters, prefix: str, index: int
    ) -> None:
        """`prefix` ends in "self_attn."; `index` counts KDA layers, it names the cache's layer."""
        self.config, self.ops, self.index = config, ops, index
        fused = f"{prefix}qkv_proj.weight" in params
        names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
        self.qkv = tuple(Linear.load(ops, params, prefix + name) for name in names)
        self.conv = plain(params, f"{prefix}conv1d.weight")  # [C, W] or [C, 1, W], q, k, v stacked
        self.conv = self.conv.reshape(self.conv.shape[0], -1)
        small = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "o_proj")
        self.f_a, self.f_b, self.g_a, self.g_b, self.b, self.o = (
            Linear.load(ops, params, prefix + name) for name in small
        )
        self.A_log = plain(params, f"{prefix}A_log")
        self.dt_bias = plain(params, f"{prefix}dt_bias")
        self.o_norm = RMSNorm(ops, plain(params, f"{prefix}o_norm.weight"), config.rms_norm_eps)

    def __call__(self, x: Tensor, parts: tuple[Part, ...], cache: Cache | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Without a cache every span starts a sequence."""
        H, D = self.config.kda_heads, self.config.kda_head_dim
        qkv = torch.cat([part(x) for part in self.qkv], dim=-1)  # [T, C]
        forget = split_last(self.f_b(self.f_a(x)), H, D)
        beta = torch.sigmoid(self.b(x).to(torch.promote_types(x.dtype, torch.float32)))
        outputs = []
        for part in parts:
            rows = slice(part.start, part.stop)
            own = qkv[rows], forget[rows], beta[rows]
            if isinstance(part, Steps):
                assert cache is not None, "steps have a past"
                outputs.append(self._step(*own, part, cache))
            else:
                outputs.append(self._mix(*own, part, cache))
        out = torch.cat(outputs).to(x.dtype)  # [T, H, D]
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = torch.sigmoid(split_last(self.g_b(self.g_a(x)), H, D).to(wide))
        normed = (self.o_norm(out).to(wide) * gate).to(x.dtype)
        return self.o(normed.flatten(1))

    def _step(
        self, qkv: Tensor, forget: Tensor, beta: Tensor, steps: Steps, cache: Cache
    ) -> Tensor:
        """One token each of B sequences, shapes as in _mix with n = B."""
        conv, states = cache.conv[self.index], cache.state[self.index]
        mixed = self.ops.conv_step(qkv, self.conv, conv, steps.slots)
        q, k, v, gate = self._inputs(mixed, forget)
        return self.ops.kda_step((q, k, v), gate, beta, states, steps.slots)

    def _inputs(self, mixed: Tensor, forget: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mixed [n, C], forget [n, H, D] -> q, k, v, log-decay [n, H, D]."""
        q, k, v = split_last(mixed, 3, self.config.kda_heads, self.config.kda_head_dim).unbind(1)
        q, k, gate = self.ops.kda_inputs(
            (q, k), forget, self.A_log, self.dt_bias, self.config.gate_lower_bound
        )
        return q, k, v, gate

    def _mix(
        self, qkv: Tensor, forget: Tensor, beta: Tensor, span: Span, cache: Cache | None
    ) -> Tensor:
        """One span: qkv [n, C], forget [n, H, D], beta [n, H] -> [n, H, D] float32."""
        H, D = self.config.kda_heads, self.config.kda_head_dim
        past = self._empty(qkv) if cache is None else cache.read_kda(self.index, span)
        mixed = self.ops.short_conv(qkv, self.conv, past.conv)
        q, k, v, gate = self._inputs(mixed, forget)
        n = span.num_written
        out, state = past.state.new_empty(0, H, D), past.state
        if n:
            out, state = self.ops.kda_chunk(q[:n], k[:n], v[:n], gate[:n], beta[:n], state)
        waiting = None
        if span.num_verify:
            late, deltas = self.ops.kda_verify(q[n:], k[n:], v[n:], gate[n:], beta[n:], state)
            out = torch.cat([out, late])
            waiting = KdaTokens(qkv[n:], k[n:], gate[n:], deltas)
        if cache is not None:
            seen = torch.cat([past.conv, qkv[:n]])[n:]  # the last W-1 inputs
            cache.write_kda(self.index, span, KdaPast(state, seen), waiting)
        return out

    def _empty(self, qkv: Tensor) -> KdaPast:
        H, D = self.config.kda_heads, self.config.kda_head_dim
        wide = torch.promote_types(qkv.dtype, torch.float32)
        return KdaPast(
            state=qkv.new_zeros(H, D, D, dtype=wide),
            conv=qkv.new_zeros(self.config.conv_width - 1, qkv.shape[-1]),
        )
