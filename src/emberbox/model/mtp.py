"""The multi-token-prediction layer: drafts the token after the next (architecture.md 6)."""

import torch
from torch import Tensor

from emberbox.model.attention import SparseAttention
from emberbox.model.batch import Span
from emberbox.model.cache import Cache
from emberbox.model.config import TextConfig
from emberbox.model.layers import Linear, Parameters, RMSNorm, plain
from emberbox.model.moe import MixtureOfExperts
from emberbox.model.steps import Part
from emberbox.ops.table import OpTable


class MtpLayer:
    """A plain residual layer over the trunk's output and the next token's embedding.

    It has no hyper-connections, no embedding and no head of its own.
    """

    def __init__(self, config: TextConfig, ops: OpTable, params: Parameters, prefix: str) -> None:
        """`prefix` is "model.language_model.layers.<num_hidden_layers>."."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm(ops, plain(params, f"{prefix}{name}.weight"), config.rms_norm_eps)

        self.enorm, self.hnorm = norm("enorm"), norm("hnorm")
        self.input_norm, self.post_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.head_norm = norm("shared_head.norm")
        self.eh_proj = Linear.load(ops, params, f"{prefix}eh_proj")
        self.attention = SparseAttention(config, ops, params, f"{prefix}self_attn.", 0)
        self.mlp = MixtureOfExperts(config, ops, params, f"{prefix}mlp.", config.mtp_experts)

    def __call__(
        self, hidden: Tensor, next_embeds: Tensor, parts: tuple[Part, ...], cache: Cache | None
    ) -> Tensor:
        """hidden h_t [T, hidden], next_embeds embed(x_{t+1}) [T, hidden] -> d_t [T, hidden].

        lm_head(d_t) are the draft logits of x_{t+2}; d_t is the next step's h.
        """
        first = [p.start for p in parts if isinstance(p, Span) and p.position == 0]
        if first:  # the embedding at position 0 is zeroed, as vLLM does
            keep = torch.ones(next_embeds.shape[0], 1, dtype=next_embeds.dtype)
            keep[first] = 0
            next_embeds = next_embeds * keep.to(next_embeds.device)
        z = self.eh_proj(torch.cat([self.enorm(next_embeds), self.hnorm(hidden)], dim=-1))
        z = z + self.attention(self.input_norm(z), parts, cache)
        z = z + self.mlp(self.post_norm(z))
        return self.head_norm(z)
