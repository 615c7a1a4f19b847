"""One decode step of several sequences with every shape fixed, so that it can be a CUDA graph.

B sequences of M tokens each: one that is certain, the others drafts. Where each stands is read from
tensors (StepRows), never from Python; the same calls with other numbers in them: another step.
The layers are those of `Network`, and so are the results; ops between two products are one.

The KDA state follows the certain token. What drafts would do to it is kept in Drafts until
`apply` says how many were accepted; their latents and indexer keys lie where they would, and are
overwritten if they were not. Knows no requests and no graphs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.model.attention import INDEX_NORM_EPS, SparseAttention
from emberbox.model.batch import MAX_VERIFY_TOKENS
from emberbox.model.cache import Cache
from emberbox.model.hyper import HyperConnection
from emberbox.model.kda import KimiDeltaAttention
from emberbox.model.layers import Linear
from emberbox.model.moe import FeedForward, MixtureOfExperts
from emberbox.model.network import Network
from emberbox.model.projection import Projection
from emberbox.model.step_sizes import can_step
from emberbox.ops.table import OpTable

MAX_ROWS = 32
Result = tuple[Tensor, ...]  # of a sublayer: tensors [T, hidden] that are still to be added up


class StepRows(NamedTuple):
    """Where B sequences stand, int32 on the device: slots, positions (of the first token), counts
    (tokens that are real; 0 for a sequence that only fills the shape) [B]; table [B, P] pages."""

    slots: Tensor
    positions: Tensor
    counts: Tensor
    table: Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """What drafts would do to the KDA state, by layer and row: conv inputs [L, R, C] in the
    activations' type; k, gate, deltas [L, R, H, D] float32."""

    conv: Tensor
    k: Tensor
    gate: Tensor
    deltas: Tensor

    @staticmethod
    def zeros(cache: Cache, num_rows: int) -> "Drafts":
        """Room for so many rows."""
        L, _, H, D, _ = cache.state.shape
        C = cache.conv.shape[-1]
        wide = [cache.state.new_zeros(L, num_rows, H, D) for _ in range(3)]
        return Drafts(cache.conv.new_zeros(L, num_rows, C), *wide)

    def of(self, layer: int, num_rows: int) -> tuple[Tensor, ...]:
        """One layer of a step with so many rows."""
        return tuple(tensor[layer] for tensor in self.rows(num_rows))

    def rows(self, num_rows: int) -> tuple[Tensor, ...]:
        """All layers of a step with so many rows, which lie together: [L, num_rows, ...]."""
        held = self.conv, self.k, self.gate, self.deltas
        return tuple(
            t.flatten(0, 1)[: len(t) * num_rows].view(len(t), num_rows, *t.shape[2:]) for t in held
        )


class DecodeStep:
    """The decode form of a network against one cache. Its steps share one piece of Drafts."""

    def __init__(self, network: Network, cache: Cache, max_rows: int = MAX_ROWS) -> None:
        self.network, self.cache, self.ops = network, cache, network.ops
        text = network.config.text
        self.dtype = network.embedding.dtype
        self.drafts = Drafts.zeros(cache, max_rows)
        self.layers = tuple(
            (
                _Opening(layer.attention_hc),
                _attention(layer.attention, network.ops, cache, self.drafts),
                _Opening(layer.mlp_hc),
                _feed_forward(layer.mlp, network.ops),
            )
            for layer in network.layers
        )
        for opening, sublayer, mlp_opening, mlp in self.layers:
            opening.suhs, mlp_opening.suhs = sublayer.suhs, mlp.suhs
        self.head = Projection(network.ops, [network.lm_head])
        self.eps, self.num_streams = text.rms_norm_eps, text.hc_mult

    def __call__(self, token_ids: Tensor, rows: StepRows) -> Tensor:
        """token_ids [B M] -> logits [B M, vocab] float32 or wider."""
        x = self.network.embedding[token_ids.long()]
        streams = x.unsqueeze(1).repeat(1, self.num_streams, 1)
        spread = _Spread((), x.new_empty(0, dtype=self.wide), x.new_empty(0, dtype=self.wide))
        for opening, attention, mlp_opening, mlp in self.layers:
            x, rotated, spread = opening(streams, spread)
            spread = spread.with_results(attention(x, rotated, rows))
            x, rotated, spread = mlp_opening(streams, spread)
            spread = spread.with_results(mlp(x, rotated))
        norm, suhs = self.network.norm.weight, self.head.suhs
        hidden, rotated = self.ops.hyper_close(
            streams, spread.results, spread.post, spread.mix, norm, suhs, self.eps
        )
        return self.head(hidden, rotated, self.wide if suhs else self.dtype).to(self.wide)

    @property
    def wide(self) -> torch.dtype:
        """float32, or the activations' type if that is wider."""
        return torch.promote_types(self.dtype, torch.float32)

    def apply(self, slots: Tensor, accepted: Tensor, num_rows: int) -> None:
        """Let the first accepted[b] drafts of the last step change the KDA state. int32 [B]."""
        pending = self.drafts.rows(num_rows)
        self.ops.kda_apply(self.cache.state, self.cache.conv, pending, slots, accepted)

    @staticmethod
    def can(network: Network) -> bool:
        """Whether this form is known for a network: by its sizes, and small matrices are plain."""
        small = [w for layer in network.layers for w in _small_weights(layer.attention)]
        is_plain = not any(isinstance(weight, QuantTensor) for weight in small)
        return is_plain and can_step(network.config.text)


@dataclass(frozen=True, slots=True)
class _Spread:
    """What the streams still have to take up: a sublayer's results, post [T, S], mix [T, S, S]."""

    results: Result
    post: Tensor
    mix: Tensor

    def with_results(self, results: Result) -> "_Spread":
        return _Spread(results, self.post, self.mix)


class _Opening:
    """The way into a sublayer: streams take up the last results, and become its input."""

    suhs: tuple[Tensor, ...] = ()  # of the products that take it

    def __init__(self, hyper: HyperConnection) -> None:
        self.hyper, self.open = hyper, hyper.ops.hyper_open

    def __call__(self, streams: Tensor, last: _Spread) -> tuple[Tensor, Tensor, _Spread]:
        hc = self.hyper
        x, rotated, post, mix = self.open(
            streams,
            last.results,
            last.post,
            last.mix,
            hc.fn,
            hc.base,
            hc.scale,
            hc.norm.weight,
            self.suhs,
            hc.eps,
            hc.iterations,
        )
        return x, rotated, _Spread((), post, mix)


class _Kda:
    """model/kda.py, one layer."""

    def __init__(
        self, layer: KimiDeltaAttention, ops: OpTable, cache: Cache, drafts: Drafts
    ) -> None:
        self.layer, self.ops, self.cache, self.drafts = layer, ops, cache, drafts
        self.qkv, self.out = Projection(ops, layer.qkv), Projection(ops, [layer.o])
        self.suhs = self.qkv.suhs
        self.small = stacked([layer.f_a, layer.g_a, layer.b])
        own = layer.f_b.weight, layer.g_b.weight, layer.conv, layer.A_log, layer.dt_bias
        weights = (*own, layer.o_norm.weight, self.out.suh)
        self.weights = ops.ready_for("kda_decode", weights)

    def __call__(self, x: Tensor, rotated: Tensor, rows: StepRows) -> Result:
        layer, cache = self.layer, self.cache
        small = self.ops.small_linear(x, self.small)
        qkv = self.qkv(x, rotated, x.dtype)
        fed = self.ops.kda_decode(
            (qkv, small),
            self.weights,
            (cache.conv[layer.index], cache.state[layer.index]),
            self.drafts.of(layer.index, len(x)),
            (rows.slots, rows.counts),
            (layer.config.gate_lower_bound, layer.config.rms_norm_eps),
        )
        return (self.out.of(fed, x.dtype),)


class _Sparse:
    """model/attention.py, one layer."""

    def __init__(self, layer: SparseAttention, ops: OpTable, cache: Cache) -> None:
        self.layer, self.ops, self.cache = layer, ops, cache
        indexer = layer.indexer
        self.enter = Projection(ops, [layer.q_a, layer.kv_a])
        self.suhs = self.enter.suhs
        self.q_b, self.wq_b = Projection(ops, [layer.q_b]), Projection(ops, [indexer.wq_b])
        self.out = Projection(ops, [layer.o])
        self.small = stacked([indexer.wk, indexer.gate, indexer.weights_proj])

    def __call__(self, x: Tensor, rotated: Tensor, rows: StepRows) -> Result:
        layer, text = self.layer, self.layer.config
        small = self.ops.small_linear(x, self.small)
        latent, turned, weights = self._open(self.enter(x, rotated, x.dtype), small, rows)
        own = len(self.q_b.suhs)
        q = self.q_b(latent, turned[:own], x.dtype)
        queries = self.wq_b(latent, turned[own:], small.dtype)
        index = layer.index
        chosen, num = self.ops.index_choose(
            queries,
            weights,
            self.cache.pooled[index].flatten(0, 1),
            tuple(rows),
            text.index_kpool,
            text.index_topk,
        )
        latents, scales = self.cache.latent_rows(index)
        fed = self.ops.mla_decode(q, layer.kv_b, latents, scales, chosen, num, self.out.suh)
        return (self.out.of(fed, x.dtype),)

    def _open(
        self, projected: Tensor, small: Tensor, rows: StepRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query latents, the same rotated, the indexer's head weights; writes what is cached."""
        layer, cache = self.layer, self.cache
        indexer, index = layer.indexer, layer.index
        latents, scales = cache.latent_rows(index)
        made: tuple[Tensor, Tensor, Tensor] = self.ops.mla_open(
            projected,
            small,
            layer.q_a_norm.weight,
            layer.kv_a_norm.weight,
            (indexer.k_norm.weight, indexer.k_norm.bias),
            indexer.ape,
            latents,
            scales,
            cache.pooled[index].flatten(0, 1),
            cache.ring_keys[index],
            cache.ring_gates[index],
            tuple(rows),
            (layer.config.rms_norm_eps, INDEX_NORM_EPS),
            (*self.q_b.suhs, *self.wq_b.suhs),
        )
        return made


class _Dense:
    """FeedForward, one layer or a shared expert."""

    def __init__(self, mlp: FeedForward, ops: OpTable) -> None:
        self.enter, self.out = Projection(ops, [mlp.gate, mlp.up]), Projection(ops, [mlp.down])
        self.suhs, self.ops, self.limit = self.enter.suhs, ops, mlp.limit

    def __call__(self, x: Tensor, rotated: Tensor) -> Result:
        suh, bank = self.out.suh, self.enter.bank
        if bank is not None and suh is not None:
            fed = self.ops.rotated_swiglu(rotated, bank, self.limit, suh)
        else:
            fed = self.ops.swiglu_open(self.enter(x, rotated, x.dtype), self.limit, suh)
        return (self.out.of(fed, x.dtype),)


class _Routed:
    """MixtureOfExperts, one layer."""

    def __init__(self, mlp: MixtureOfExperts, ops: OpTable) -> None:
        self.mlp, self.ops = mlp, ops
        self.shared = _Dense(mlp.shared, ops)
        self.suhs = self.shared.suhs

    def __call__(self, x: Tensor, rotated: Tensor) -> Result:
        mlp, text = self.mlp, self.mlp.config
        logits = self.ops.small_linear(x, mlp.router)
        routed = self.ops.moe_routed(
            x,
            logits,
            mlp.bias,
            text.num_experts_per_tok,
            text.routed_scaling_factor,
            mlp.experts,
            text.swiglu_limit,
        )
        return (routed, *self.shared(x, rotated))


def stacked(linears: list[Linear]) -> Tensor:
    """Their plain weights as one [N0 + N1 + ..., K], which they are views of from now on."""
    weights = [linear.weight for linear in linears]
    assert all(isinstance(weight, Tensor) for weight in weights), "DecodeStep.can was asked"
    whole = torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    at = 0
    for linear in linears:
        end = at + linear.weight.shape[0]
        linear.weight = whole[at:end]
        at = end
    return whole


def _small_weights(layer: KimiDeltaAttention | SparseAttention) -> list[object]:
    if isinstance(layer, KimiDeltaAttention):
        small = [layer.f_a, layer.g_a, layer.b, layer.f_b, layer.g_b]
    else:
        small = [layer.indexer.wk, layer.indexer.gate, layer.indexer.weights_proj]
    return [linear.weight for linear in small]


def _attention(
    layer: KimiDeltaAttention | SparseAttention, ops: OpTable, cache: Cache, drafts: Drafts
) -> "_Kda | _Sparse":
    if isinstance(layer, KimiDeltaAttention):
        return _Kda(layer, ops, cache, drafts)
    return _Sparse(layer, ops, cache)


def _feed_forward(mlp: FeedForward | MixtureOfExperts, ops: OpTable) -> "_Dense | _Routed":
    return _Dense(mlp, ops) if isinstance(mlp, FeedForward) else _Routed(mlp, ops)


assert MAX_ROWS >= MAX_VERIFY_TOKENS, "one sequence's tokens are one step"
