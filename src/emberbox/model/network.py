"""The whole of glm5_next: embedding, layers over four streams, final norm, head.

`forward` runs a batch against a cache; `full` runs whole sequences without one, under autograd if
asked. Both are the same layers. Knows no requests, no text and no files.
"""

from functools import partial

import torch
from torch import Tensor

from emberbox.model.attention import SparseAttention
from emberbox.model.batch import Batch, Span
from emberbox.model.cache import Cache, CacheSize
from emberbox.model.config import Glm5NextConfig, TextConfig
from emberbox.model.hyper import HyperConnection, mean_of_streams, open_streams
from emberbox.model.kda import KimiDeltaAttention
from emberbox.model.layers import Linear, Parameters, RMSNorm, plain
from emberbox.model.moe import FeedForward, MixtureOfExperts
from emberbox.model.mtp import MtpLayer
from emberbox.model.parameters import TEXT, VISUAL, mtp_prefix
from emberbox.model.pieces import Piece, in_pieces
from emberbox.model.steps import Part
from emberbox.model.vision import VisionTower
from emberbox.ops.table import OpTable


class DecoderLayer:
    """Attention and feed-forward, each inside its hyper-connection."""

    def __init__(self, config: TextConfig, ops: OpTable, params: Parameters, layer: int) -> None:
        prefix = f"{TEXT}layers.{layer}."
        sparse = config.layer_is_sparse[layer]
        index = config.layer_is_sparse[:layer].count(sparse)
        kind = SparseAttention if sparse else KimiDeltaAttention
        self.attention = kind(config, ops, params, f"{prefix}self_attn.", index)
        self.mlp = (
            MixtureOfExperts(config, ops, params, f"{prefix}mlp.", config.n_routed_experts)
            if config.mlp_is_moe[layer]
            else FeedForward(ops, params, f"{prefix}mlp.", config.swiglu_limit)
        )
        names = (("hc_attn_", "input_layernorm"), ("hc_ffn_", "post_attention_layernorm"))
        self.attention_hc, self.mlp_hc = (
            HyperConnection(
                config,
                ops,
                params,
                prefix + hc,
                RMSNorm(ops, plain(params, f"{prefix}{norm}.weight"), config.rms_norm_eps),
            )
            for hc, norm in names
        )

    def __call__(self, streams: Tensor, parts: tuple[Part, ...], cache: Cache | None) -> Tensor:
        """streams [T, S, hidden] -> [T, S, hidden]."""
        pieces = [streams]
        self.over(pieces, (Piece(0, streams.shape[0], parts),), cache)
        return pieces[0]

    def over(self, streams: list[Tensor], pieces: tuple[Piece, ...], cache: Cache | None) -> None:
        """The same, piece by piece but for the feed-forward; each of `streams` is replaced."""
        for i, piece in enumerate(pieces):
            attend = partial(self.attention, parts=piece.parts, cache=cache)
            streams[i] = self.attention_hc(streams[i], attend)
        self.mlp_hc.over(streams, self.mlp)


class Network:
    """glm5_next on one device. `params` are operands under released names (model.weights)."""

    def __init__(self, config: Glm5NextConfig, params: Parameters, ops: OpTable) -> None:
        text = config.text
        self.config, self.ops = config, ops
        self.embedding = plain(params, f"{TEXT}embed_tokens.weight")
        self.layers = tuple(
            DecoderLayer(text, ops, params, i) for i in range(text.num_hidden_layers)
        )
        self.norm = RMSNorm(ops, plain(params, f"{TEXT}norm.weight"), text.rms_norm_eps)
        self.lm_head = Linear.load(ops, params, "lm_head")
        mtp = mtp_prefix(config)
        self.mtp = MtpLayer(text, ops, params, mtp) if f"{mtp}enorm.weight" in params else None
        seen = any(name.startswith(VISUAL) for name in params)
        self.vision = (
            VisionTower(config.vision, ops, params) if config.vision is not None and seen else None
        )

    def new_cache(self, size: CacheSize, latent_dtype: torch.dtype | None = None) -> Cache:
        """A cache of all trunk layers, in this network's types and on its device.

        latent_dtype: float8_e4m3fn keeps latents in half the bytes, with scales.
        """
        num_sparse = sum(self.config.text.layer_is_sparse)
        layers = self.config.text.num_hidden_layers - num_sparse, num_sparse
        return self._cache(size, layers, latent_dtype)

    def new_draft_cache(self, size: CacheSize, latent_dtype: torch.dtype | None = None) -> Cache:
        """A cache of the MTP layer."""
        return self._cache(size, (0, 1), latent_dtype)

    def _cache(
        self, size: CacheSize, layers: tuple[int, int], latent_dtype: torch.dtype | None
    ) -> Cache:
        return Cache(
            self.config.text,
            size,
            self.ops,
            layers=layers,
            like=self.embedding,
            latent_dtype=latent_dtype,
        )

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings [T, hidden], image rows replaced by their features."""
        rows = self.embedding[batch.token_ids]
        if batch.features is None or batch.feature_rows is None:
            return rows
        return rows.index_copy(0, batch.feature_rows, batch.features.to(rows.dtype))

    def forward(self, batch: Batch, cache: Cache | None) -> Tensor:
        """Hidden states after the final norm, [T, hidden].

        Written tokens change `cache`, tokens under verification do not (see Cache). Without a cache
        every span is a whole sequence from position 0.
        """
        pieces: tuple[Piece, ...] = (Piece(0, batch.token_ids.shape[0], batch.spans),)
        if cache is not None:
            pieces = in_pieces(cache.begin(batch.spans))
        rows = self.embed(batch).split_with_sizes([piece.num_rows for piece in pieces])
        streams = [open_streams(own, self.config.text.hc_mult) for own in rows]
        for layer in self.layers:
            layer.over(streams, pieces, cache)
        hidden = [self.norm(mean_of_streams(own)) for own in streams]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def draft(
        self, hidden: Tensor, next_token_ids: Tensor, batch: Batch, cache: Cache | None
    ) -> Tensor:
        """MTP output d_t [T, hidden] from h_t [T, hidden] and x_{t+1} [T] int64 of the batch's
        rows.

        `cache` is the MTP layer's own (new_draft_cache); the same verification rule applies.
        """
        if self.mtp is None:
            raise LookupError("this checkpoint holds no MTP layer")
        parts = batch.spans if cache is None else cache.begin(batch.spans)
        return self.mtp(hidden, self.embedding[next_token_ids], parts, cache)

    def full(self, token_ids: Tensor, features: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Logits [B, T, vocab] of whole sequences of equal length, without a cache.

        token_ids [B, T] int64; features = (rows [F] into the flattened tokens, [F, hidden]).
        """
        B, T = token_ids.shape
        spans = tuple(Span(b * T, (b + 1) * T, 0, b, ()) for b in range(B))
        rows, values = features if features is not None else (None, None)
        batch = Batch(token_ids.flatten(), spans, features=values, feature_rows=rows)
        return self.logits(self.forward(batch, None)).reshape(B, T, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> float32 or wider [..., vocab]."""
        out = self.lm_head(hidden)
        return out.to(torch.promote_types(out.dtype, torch.float32))
