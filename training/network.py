"""The whole of glm5_next for training: rows of equal length, no cache, no host synchronisation.

Computes what emberbox.model.network.Network computes, from the same parameters
(tests/training/test_graph.py). Every shape is fixed by the bucket, so that a step can be captured
as one CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training.context import Context, Rows
from training.experts import feed_forward, mixture
from training.kda import kda
from training.pointwise import CHUNK
from training.sinkhorn import sinkhorn
from training.sparse import Attended, Keys, attend, look_up_keys, sparse_attention
from training.vision import vision_features

# B rows, T tokens each
TEXT = "model.language_model."


@dataclass(frozen=True, slots=True)
class Trunk:
    """hidden [B * T, hidden] after the final norm, embeddings [B, T, hidden], layers' figures."""

    hidden: Tensor
    embeds: Tensor
    attended: tuple[Attended, ...]
    loads: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Draft:
    """hidden [B * T, hidden]: of place t, lm_head of it are the logits of token t + 2."""

    hidden: Tensor
    attended: Attended
    load: Tensor


class TrainingNetwork:
    """Trunk, chained drafts and head over one Context."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.mtp_prefix = f"{TEXT}layers.{ctx.text.num_hidden_layers}."

    def trunk(self, ids: Tensor, pixels: Tensor | None, rows: Rows) -> Trunk:
        """ids [B, T] int64; pixels, if any, fill the image tokens of each row in order."""
        if rows.length % CHUNK:
            raise ValueError(f"rows of {rows.length} tokens; pad to a multiple of {CHUNK}")
        ctx, text = self.ctx, self.ctx.text
        embeds = self.embed(ids, pixels)
        streams = embeds.flatten(0, 1).unsqueeze(1).expand(-1, text.hc_mult, -1).contiguous()
        attended, loads = [], {}
        for layer in range(text.num_hidden_layers):
            prefix = f"{TEXT}layers.{layer}."
            x, post, mix = self._collapse(streams, f"{prefix}hc_attn_", "input_layernorm")
            if text.layer_is_sparse[layer]:
                figures = sparse_attention(ctx, f"{prefix}self_attn.", x, rows)
                attended.append(figures)
                y = figures.y
            else:
                y = kda(ctx, f"{prefix}self_attn.", x, rows)
            streams = ctx.fused.hyper_update(streams, y, post, mix)
            x, post, mix = self._collapse(streams, f"{prefix}hc_ffn_", "post_attention_layernorm")
            if text.mlp_is_moe[layer]:
                y, loads[f"{prefix}mlp."] = mixture(ctx, f"{prefix}mlp.", x, rows)
            else:
                y = feed_forward(ctx, f"{prefix}mlp.", x, text.swiglu_limit, bias=False)
            streams = ctx.fused.hyper_update(streams, y, post, mix)
        hidden = ctx.norm(streams.float().mean(1).to(ctx.dtype), f"{TEXT}norm")
        return Trunk(hidden, embeds, tuple(attended), loads)

    def embed(self, ids: Tensor, pixels: Tensor | None) -> Tensor:
        """[B, T, hidden], image tokens replaced by the features of the row's pictures."""
        weight = self.ctx.params[f"{TEXT}embed_tokens.weight"]
        embeds = functional.embedding(ids, weight).to(self.ctx.dtype)
        if pixels is None:
            return embeds
        features = vision_features(self.ctx, pixels)
        here = ids == self.ctx.config.image_token_id
        index = (here.cumsum(-1) - 1).clamp(0, features.shape[1] - 1)
        # In float32: this gather's backward adds, and adds often.
        picked = features.float().gather(1, index[..., None].expand(-1, -1, features.shape[-1]))
        return torch.where(here[..., None], picked.to(embeds.dtype), embeds)

    def drafts(self, trunk: Trunk, rows: Rows, depth: int) -> tuple[Draft, ...]:
        """`depth` chained MTP passes, the first from the trunk, each next from the one before.

        Pass j at place t reads the hidden state of pass j - 1 at place t - 1 and the embedding of
        token t + 1, and attends to its own keys and the newest of its predecessors' where a chain
        would. Its first j - 1 places have no predecessor and mean nothing.
        """
        following = functional.pad(trunk.embeds[:, 1:], (0, 0, 0, 1))
        # At the first token the embedding counts as zero, as vLLM does.
        first = rows.places().view(1, -1, 1) == 0
        following = following.masked_fill(first, 0.0).flatten(0, 1)
        hidden = trunk.hidden
        looked_up: list[Keys] = []
        results: list[Draft] = []
        for step in range(depth):
            if step:
                by_row = results[-1].hidden.view(rows.num_rows, rows.length, -1)
                hidden = functional.pad(by_row[:, :-1], (0, 0, 1, 0)).flatten(0, 1)
            draft, keys = self._draft(hidden, following, rows, looked_up)
            looked_up.append(keys)
            results.append(draft)
        return tuple(results)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] in the activation type."""
        return self.ctx.linear(hidden, "lm_head")

    def _draft(
        self, hidden: Tensor, following: Tensor, rows: Rows, before: list[Keys]
    ) -> tuple[Draft, Keys]:
        ctx, at = self.ctx, self.mtp_prefix
        both = [ctx.norm(following, f"{at}enorm"), ctx.norm(hidden, f"{at}hnorm")]
        z = ctx.linear(torch.cat(both, -1), f"{at}eh_proj")
        x = ctx.norm(z, f"{at}input_layernorm")
        own = look_up_keys(ctx, f"{at}self_attn.", x, rows)
        chain = (before[0], own, *reversed(before[1:])) if before else (own,)
        figures = attend(ctx, f"{at}self_attn.", x, rows, chain)
        z = z + figures.y
        y, load = mixture(ctx, f"{at}mlp.", ctx.norm(z, f"{at}post_attention_layernorm"), rows)
        return Draft(ctx.norm(z + y, f"{at}shared_head.norm"), figures, load), own

    def _collapse(self, streams: Tensor, prefix: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        ctx, text = self.ctx, self.ctx.text
        fn, base, scale = (ctx.params[f"{prefix}{name}"] for name in ("fn", "base", "scale"))
        pre, post, mix = ctx.fused.hyper_logits(streams, fn, base, scale, text.rms_norm_eps)
        mix = sinkhorn(mix, text.hc_sinkhorn_iters, text.hc_eps)
        weight = ctx.params[f"{prefix.rsplit('.', 1)[0]}.{norm}.weight"]
        x = ctx.fused.hyper_collapse(streams, pre, text.hc_eps, weight, text.rms_norm_eps)
        return x, post, mix
