"""Sparse multi-head latent attention with its pooled-key indexer (architecture.md 3.3, 3.4)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberbox.model.batch import Span
from emberbox.model.cache import Cache, SparsePast, SparseTokens, pool_complete
from emberbox.model.config import TextConfig
from emberbox.model.layers import LayerNorm, Linear, Parameters, RMSNorm, plain, split_last
from emberbox.model.step_sizes import reads_pages
from emberbox.model.steps import Part, Steps
from emberbox.ops.table import OpTable

# T tokens of the batch, n new tokens of a span, N all its tokens, H heads, C latent width
INDEX_NORM_EPS = 1e-6  # the indexer's LayerNorm; every other norm uses rms_norm_eps


@dataclass(frozen=True, slots=True)
class Query:
    """Rows that attend: x [n, hidden], their query latents [n, R], q [n, H, Dk]."""

    x: Tensor
    latent: Tensor
    q: Tensor


class Indexer:
    """Chooses which tokens a query attends to: the best pools of four, and the unfinished tail."""

    def __init__(self, config: TextConfig, ops: OpTable, params: Parameters, prefix: str) -> None:
        """`prefix` ends in "indexer."."""
        self.config, self.ops = config, ops
        self.wq_b = Linear.load(ops, params, f"{prefix}wq_b")
        self.wk = Linear.load(ops, params, f"{prefix}wk")
        self.k_norm = LayerNorm(
            plain(params, f"{prefix}k_norm.weight"),
            plain(params, f"{prefix}k_norm.bias"),
            INDEX_NORM_EPS,
        )
        self.weights_proj = Linear.load(ops, params, f"{prefix}weights_proj")
        self.gate = Linear(ops, params[f"{prefix}index_kpool_compress_gate"])
        self.ape = plain(params, f"{prefix}index_kpool_compress_ape")  # [pool, D]

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> keys, pooling gates [T, D], float32 or wider."""
        # Projected wide: a rounded product can turn a near-tie (architecture.md 10 item 10).
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.k_norm(self.wk(x)), self.gate(x)

    def queries(self, x: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden], q_latent [T, R] -> queries [T, Hi, D], head weights [T, Hi] float32."""
        config, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        q = self.wq_b(q_latent.to(wide))
        weights = self.weights_proj(x.to(wide)) * config.index_n_heads**-0.5
        return split_last(q, config.index_n_heads, config.index_head_dim), weights

    def select(self, query: Query, past: SparsePast, new: SparseTokens) -> Tensor:
        """Token indices [n, K] for n new tokens that follow `past`; -1 where there is none."""
        queries, weights = self.queries(query.x, query.latent)
        pool = self.config.index_kpool
        start, n = past.latents.shape[0], queries.shape[0]
        keys, gates = torch.cat([past.keys, new.keys]), torch.cat([past.gates, new.gates])
        fresh = pool_complete(self.ops, keys, gates, self.ape)
        # Rounded as the cache rounds them, so that a choice does not depend on where a chunk ended.
        pooled = torch.cat([past.pooled, fresh.to(past.pooled.dtype)])
        scores = self.ops.index_scores(queries, pooled, weights)
        positions = torch.arange(start, start + n, device=queries.device)
        return self.ops.index_select(scores, positions, pool, self.config.index_topk)

    def select_steps(self, query: Query, steps: Steps, cache: Cache, layer: int) -> Tensor:
        """Token indices [B, K] for one new token each, which the cache's `layer` already holds."""
        pool, topk = self.config.index_kpool, self.config.index_topk
        if (steps.last_position + 1) // pool <= topk // pool:  # every pool is chosen
            every = torch.arange(steps.last_position + 1, device=query.x.device)
            own = steps.positions.unsqueeze(-1)
            return every.expand(len(own), -1).masked_fill(every > own, -1)
        queries, weights = self.queries(query.x, query.latent)
        pooled = cache.pooled_of(layer, steps)
        scores = self.ops.index_scores(queries.unsqueeze(1), pooled, weights.unsqueeze(1))
        return self.ops.index_select(scores.squeeze(1), steps.positions, pool, topk)


class SparseAttention:
    """Low-rank queries, one latent per token as key and value of all heads, selected rows only."""

    def __init__(
        self, config: TextConfig, ops: OpTable, params: Parameters, prefix: str, index: int
    ) -> None:
        """`prefix` ends in "self_attn."; `index`, counting sparse layers, is the cache's layer."""
        self.config, self.ops, self.index = config, ops, index
        eps = config.rms_norm_eps
        self.q_a = Linear.load(ops, params, f"{prefix}q_a_proj")
        self.q_a_norm = RMSNorm(ops, plain(params, f"{prefix}q_a_layernorm.weight"), eps)
        self.q_b = Linear.load(ops, params, f"{prefix}q_b_proj")
        self.kv_a = Linear.load(ops, params, f"{prefix}kv_a_proj_with_mqa")
        self.kv_a_norm = RMSNorm(ops, plain(params, f"{prefix}kv_a_layernorm.weight"), eps)
        width = config.qk_head_dim + config.v_head_dim
        kv_b = plain(params, f"{prefix}kv_b_proj.weight")
        self.kv_b = kv_b.reshape(config.num_attention_heads, width, -1)  # [H, Dk + Dv, C]
        self.o = Linear.load(ops, params, f"{prefix}o_proj")
        self.indexer = Indexer(config, ops, params, f"{prefix}indexer.")
        self.reads_pages = reads_pages(config, ops)

    def __call__(self, x: Tensor, parts: tuple[Part, ...], cache: Cache | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Without a cache every span starts a sequence."""
        config = self.config
        q_latent = self.q_a_norm(self.q_a(x))
        q = split_last(self.q_b(q_latent), config.num_attention_heads, config.qk_head_dim)
        latents = self.kv_a_norm(self.kv_a(x))
        keys, gates = self.indexer.keys(x)
        outputs = []
        for part in parts:
            rows = slice(part.start, part.stop)
            new = SparseTokens(latents[rows], keys[rows], gates[rows], self.indexer.ape)
            query = Query(x[rows], q_latent[rows], q[rows])
            if isinstance(part, Steps):
                assert cache is not None, "steps have a past"
                outputs.append(self._step(query, new, part, cache))
            else:
                outputs.append(self._attend(query, new, part, cache))
        return self.o(torch.cat(outputs).flatten(1))

    def _attend(self, query: Query, new: SparseTokens, span: Span, cache: Cache | None) -> Tensor:
        """One span -> [n, H, Dv]."""
        if cache is not None and self.reads_pages and not span.num_verify:
            return self._attend_pages(query, new, span, cache)
        past = self._empty(new) if cache is None else cache.read_sparse(self.index, span)
        indices = self.indexer.select(query, past, new)
        own = new.latents if cache is None else cache.as_cached(new.latents)
        all_rows = torch.cat([past.latents, own])
        out = self.ops.mla_attention(query.q, all_rows, self.kv_b, indices)
        if cache is not None:
            cache.write_sparse(self.index, span, new)
        return out

    def _attend_pages(self, query: Query, new: SparseTokens, span: Span, cache: Cache) -> Tensor:
        """The same by kernels that read the cache where it lies. Written first."""
        config, index = self.config, self.index
        cache.write_sparse(index, span, new)
        queries, weights = self.indexer.queries(query.x, query.latent)
        chosen, num = self.ops.index_choose(
            queries.flatten(1),
            weights,
            cache.pooled[index].flatten(0, 1),
            cache.rows_of(span),
            config.index_kpool,
            config.index_topk,
        )
        latents, scales = cache.latent_rows(index)
        flat = query.q.flatten(1)
        out = self.ops.mla_decode(flat, self.kv_b, latents, scales, chosen, num, None)
        return split_last(out, config.num_attention_heads, config.v_head_dim)

    def _step(self, query: Query, new: SparseTokens, steps: Steps, cache: Cache) -> Tensor:
        """One token each of B sequences -> [B, H, Dv]. Written first: a token attends to itself."""
        cache.write_steps(self.index, steps, new)
        chosen = self.indexer.select_steps(query, steps, cache, self.index)  # [B, K]
        rows = cache.latents_of(self.index, steps, chosen).flatten(0, 1)  # [B * K, C]
        own = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape)
        own = own.masked_fill(chosen < 0, -1)
        return self.ops.mla_attention(query.q, rows, self.kv_b, own)

    def _empty(self, new: SparseTokens) -> SparsePast:
        return SparsePast(
            new.latents[:0], new.keys[:0].to(new.latents.dtype), new.keys[:0], new.gates[:0]
        )
