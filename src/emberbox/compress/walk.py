"""The calibration text on its way through the network: one sublayer at a time, each compressed.

A sublayer runs with the source's weights while moments are collected, its matrices are compressed,
and the text moves on through what a reader of the result will decode. Routed experts pass in
groups: every token goes through every expert for the moments, and through those that the router
chose to move on. Memory: one sublayer without its routed experts, one group of these with its
moments (routing.moments_bytes), and `activation_bytes`. Knows no files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from emberbox.compress.conversion_items import Item
from emberbox.compress.encode import Encoded, Encoder
from emberbox.compress.hessian import Hessian, HessianSum
from emberbox.compress.moments import Recorder, mean_of
from emberbox.compress.routing import Routing, expert_group_size
from emberbox.compress.source import EXPERTS, expert_of
from emberbox.errors import CheckpointError, OpError
from emberbox.model.attention import SparseAttention
from emberbox.model.batch import Span
from emberbox.model.config import TextConfig
from emberbox.model.hyper import HyperConnection, mean_of_streams, open_streams
from emberbox.model.kda import KimiDeltaAttention
from emberbox.model.layers import RMSNorm, plain
from emberbox.model.moe import FeedForward
from emberbox.model.parameters import TEXT, mtp_prefix
from emberbox.model.weights import WEIGHT
from emberbox.ops.table import OpTable, bind_all
from emberbox.store.buffers import Buffer

# R rows of text, T tokens of a row, S streams, H hidden, N = R T
Params: TypeAlias = dict[str, Tensor]
Sublayer: TypeAlias = Callable[[Tensor, tuple[Span, ...]], Tensor]
Build: TypeAlias = Callable[[OpTable, Params], Sublayer]
Around: TypeAlias = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
TOKENS_AT_ONCE = 8192


def activation_bytes(config: TextConfig, num_tokens: int, item: int) -> int:
    """Memory for `num_tokens` of text: streams, inputs and outputs of experts, the router's."""
    hidden, chosen = config.hidden_size, config.num_experts_per_tok
    per_token = hidden * (config.hc_mult * item + item + 4) + 12 * chosen
    return num_tokens * per_token


class Walk:
    """token_ids [R, T]. `encoder.device` computes; the text waits on the CPU.

    shrink_tokens: of the moments of routed experts, see Routing.moments.
    """

    def __init__(
        self, encoder: Encoder, token_ids: Tensor, shrink_tokens: int | None = None
    ) -> None:
        self.encoder, self.source, self.device = encoder, encoder.source, encoder.device
        self.config = encoder.source.config
        self.token_ids, self.shrink_tokens = token_ids, shrink_tokens
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.ops = bind_all(self.device)
        self.num_rows, self.length = token_ids.shape
        self.values = torch.empty(0)  # [R, T, S, H], for the MTP layer [R, T, H]

    # -- states -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """At the embedding."""
        streams = open_streams(self._embedded(self.token_ids.flatten()), self.config.text.hc_mult)
        self.values = streams.reshape(self.num_rows, self.length, *streams.shape[1:]).contiguous()

    def state(self) -> Buffer:
        """Where the text is, to be restored."""
        flat: Buffer = self.values.contiguous().view(torch.uint8).numpy().reshape(-1)
        return flat

    def restore(self, path: Path) -> None:
        """Go on from what `state` gave. Raises CheckpointError if it is of another size."""
        text = self.config.text
        shape = (self.num_rows, self.length, text.hc_mult, text.hidden_size)
        expected = torch.Size(shape).numel() * self.dtype.itemsize
        if path.stat().st_size != expected:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, expected {expected}")
        flat = torch.from_file(str(path), shared=False, size=expected, dtype=torch.uint8)
        self.values = flat.clone().view(self.dtype).view(shape)

    def _embedded(self, ids: Tensor) -> Tensor:
        name = f"{TEXT}embed_tokens.weight"
        return self.source.raw(name)[ids].to(self.dtype)

    # -- units ------------------------------------------------------------------------------------

    def layer(self, index: int, items: Sequence[Item]) -> Iterator[Encoded]:
        """One decoder layer; the text moves past it."""
        text, prefix = self.config.text, f"{TEXT}layers.{index}."
        params = self._params(prefix, items)
        rest, attention, mlp = _split(prefix, items)
        yield from self.encoder(rest, _nothing)
        kind = SparseAttention if text.layer_is_sparse[index] else KimiDeltaAttention
        build = partial(_attention, kind, text, f"{prefix}self_attn.")
        around = self._hyper(params, prefix, "hc_attn_", "input_layernorm")
        yield from self._sublayer(attention, params, build, around)
        around = self._hyper(params, prefix, "hc_ffn_", "post_attention_layernorm")
        if text.mlp_is_moe[index]:
            yield from self._experts(mlp, params, f"{prefix}mlp.", around)
        else:
            build = partial(_feed_forward, text.swiglu_limit, f"{prefix}mlp.")
            yield from self._sublayer(mlp, params, build, around)

    def head(self, items: Sequence[Item]) -> Iterator[Encoded]:
        """Final norm and head; the text stays where it is."""
        total = HessianSum(self.config.text.hidden_size, self.device)
        for rows, _ in self._chunks():
            total.add(self._hidden(rows))
        mean = mean_of(total, "lm_head")
        yield from self.encoder(items, lambda _: mean)

    def mtp(self, items: Sequence[Item]) -> Iterator[Encoded]:
        """The MTP layer, on all tokens that have a next one; the text is gone afterwards."""
        text, prefix = self.config.text, mtp_prefix(self.config)
        params = self._params(prefix, items)
        rest, attention, mlp = _split(prefix, items)
        self.values = self._pairs(params, prefix)
        self.length -= 1
        joins = [item for item in rest if item.name == f"{prefix}eh_proj"]
        yield from self.encoder([item for item in rest if item not in joins], _nothing)
        build = partial(_product, f"{prefix}eh_proj")
        yield from self._sublayer(joins, params, build, lambda x, sublayer: sublayer(x))
        build = partial(_attention, SparseAttention, text, f"{prefix}self_attn.")
        around = _residual(self._norm(params, f"{prefix}input_layernorm.weight"))
        yield from self._sublayer(attention, params, build, around)
        around = _residual(self._norm(params, f"{prefix}post_attention_layernorm.weight"))
        yield from self._experts(mlp, params, f"{prefix}mlp.", around)

    # -- sublayers --------------------------------------------------------------------------------

    def _sublayer(
        self, items: Sequence[Item], params: Params, build: Build, around: Around
    ) -> Iterator[Encoded]:
        recorder = Recorder(items, params, self.ops, self.device)
        for _ in self._run(build(recorder.ops, params), around):
            pass
        for encoded in self.encoder(items, recorder.hessian):
            self._put(params, encoded)
            yield encoded
        self._move(build(self.ops, params), around)

    def _experts(
        self, items: Sequence[Item], params: Params, prefix: str, around: Around
    ) -> Iterator[Encoded]:
        routed = [item for item in items if EXPERTS in item.name]
        shared = [item for item in items if EXPERTS not in item.name]
        routing = Routing(
            self.config.text, Recorder(shared, params, self.ops, self.device), params, prefix
        )
        for _ in self._run(routing.collect, around):
            pass
        for encoded in self.encoder(shared, routing.recorder.hessian):
            self._put(params, encoded)
            yield encoded
        routing.begin(params)
        for group in self._expert_groups(routed):
            yield from self._group(group, routing)
        outputs = iter(routing.outputs)
        self._move(lambda x, _: next(outputs).to(x.dtype), around)

    def _expert_groups(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """All items of as many experts as are searched at once."""
        experts: dict[int | None, list[Item]] = {}
        for item in items:
            experts.setdefault(expert_of(item.name), []).append(item)
        size = expert_group_size(items, self.device, self.encoder.max_bytes)
        every = iter(experts.values())
        while group := list(islice(every, size)):
            yield [item for expert in group for item in expert]

    def _group(self, items: Sequence[Item], routing: Routing) -> Iterator[Encoded]:
        """Compress some experts, and add what they make of the tokens that chose them."""
        read = {item.name: self.source.weight(item, self.device) for item in items}
        original = {name: weight.to(self.dtype) for name, weight in read.items()}
        weights = dict(original)
        downs = {item.name: item for item in items if item.projection.endswith("down_proj")}

        def hessian(item: Item) -> Hessian:
            return routing.moments(original, item, self.shrink_tokens)

        for encoded in self.encoder(items, hessian, read):
            changed = encoded.weight(self.device, self.dtype)
            if changed is not None:
                weights[encoded.item.name] = changed
            yield encoded
        for item in downs.values():
            routing.add_expert(weights, item)

    def _pairs(self, params: Params, prefix: str) -> Tensor:
        """[R, T - 1, 2 H]: embedding of the next token, state of this one. Nothing lies twice."""
        enorm, hnorm = (self._norm(params, f"{prefix}{n}.weight") for n in ("enorm", "hnorm"))
        table = self.source.raw(f"{TEXT}embed_tokens.weight")
        size = self.config.text.hidden_size
        pairs = torch.empty(self.num_rows, self.length - 1, 2 * size, dtype=self.dtype)
        for row, ids in enumerate(self.token_ids):
            following = table[ids[1:]].to(self.device, self.dtype)
            following[0] = 0  # as the network does at position 0
            hidden = self._hidden(slice(row, row + 1))[:-1]
            pairs[row] = torch.cat([enorm(following), hnorm(hidden)], -1).cpu()
        return pairs

    # -- helpers ----------------------------------------------------------------------------------

    def _params(self, prefix: str, items: Sequence[Item]) -> Params:
        """The source's parameters under `prefix`; a router cut as the plan cuts it."""
        params = self.source.parameters(prefix, device=self.device, dtype=self.dtype)
        for item in items:
            if item.rows is not None and not item.is_linear and item.sources[0] in params:
                whole = params[item.sources[0]]
                params[item.sources[0]] = whole[torch.tensor(item.rows, device=whole.device)]
        return params

    def _put(self, params: Params, encoded: Encoded) -> None:
        """What a reader will decode, in place of what the source holds."""
        weight = encoded.weight(self.device, self.dtype) if encoded.item.is_linear else None
        if weight is None:
            return
        start = 0
        for source in encoded.item.sources:
            name = source + WEIGHT
            stop = start + params[name].shape[0]
            params[name] = weight[start:stop].reshape(params[name].shape)
            start = stop

    def _norm(self, params: Mapping[str, Tensor], name: str) -> RMSNorm:
        return RMSNorm(self.ops, params[name], self.config.text.rms_norm_eps)

    def _hyper(self, params: Params, prefix: str, hc: str, norm: str) -> Around:
        inner = self._norm(params, f"{prefix}{norm}.weight")
        return HyperConnection(self.config.text, self.ops, params, prefix + hc, inner)

    def _hidden(self, rows: slice) -> Tensor:
        """[n T, H] after the final norm, on the device."""
        norm = RMSNorm(self.ops, self._final_norm, self.config.text.rms_norm_eps)
        hidden: Tensor = norm(mean_of_streams(self.values[rows].flatten(0, 1).to(self.device)))
        return hidden

    @cached_property
    def _final_norm(self) -> Tensor:
        return self.source.raw(f"{TEXT}norm.weight").to(self.device, self.dtype)

    def _chunks(self) -> Iterator[tuple[slice, tuple[Span, ...]]]:
        size = max(1, TOKENS_AT_ONCE // self.length)
        for start in range(0, self.num_rows, size):
            count = min(size, self.num_rows - start)
            places = [i * self.length for i in range(count + 1)]
            spans = tuple(Span(places[i], places[i + 1], 0, i, ()) for i in range(count))
            yield slice(start, start + count), spans

    def _run(self, sublayer: Sublayer, around: Around) -> Iterator[tuple[slice, Tensor]]:
        """The text through `around(x, sublayer)`, some rows at a time: rows, [n, T, ...]."""
        for rows, spans in self._chunks():
            x = self.values[rows].flatten(0, 1).to(self.device)
            out = around(x, partial(_called, sublayer, spans))
            yield rows, out.reshape(-1, self.length, *out.shape[1:])

    def _move(self, sublayer: Sublayer, around: Around) -> None:
        """Replace the text by what came out of it: rows in their places, so that it lies once."""
        moved = self.values
        for rows, out in self._run(sublayer, around):
            if out.shape[1:] != moved.shape[1:]:  # eh_proj halves it
                moved = torch.empty(self.num_rows, *out.shape[1:], dtype=self.dtype)
            if not bool(out.isfinite().all()):
                raise OpError("the calibration text is no longer finite after this sublayer")
            moved[rows] = out.cpu()
        self.values = moved


def _called(sublayer: Sublayer, spans: tuple[Span, ...], x: Tensor) -> Tensor:
    return sublayer(x, spans)


def _attention(
    kind: type[SparseAttention] | type[KimiDeltaAttention],
    text: TextConfig,
    prefix: str,
    ops: OpTable,
    params: Params,
) -> Sublayer:
    module = kind(text, ops, params, prefix, 0)
    return lambda x, spans: module(x, spans, None)


def _feed_forward(limit: float, prefix: str, ops: OpTable, params: Params) -> Sublayer:
    module = FeedForward(ops, params, prefix, limit)
    return lambda x, _: module(x)


def _product(name: str, ops: OpTable, params: Params) -> Sublayer:
    weight = plain(params, name + WEIGHT)
    return lambda x, _: ops.linear(x, weight, None)


def _residual(norm: RMSNorm) -> Around:
    return lambda x, sublayer: x + sublayer(norm(x))


def _split(prefix: str, items: Sequence[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """What is neither, attention, feed-forward."""
    parts: tuple[list[Item], list[Item], list[Item]] = ([], [], [])
    for item in items:
        name = item.name.removeprefix(prefix)
        place = 1 if name.startswith("self_attn.") else 2 if name.startswith("mlp.") else 0
        parts[place].append(item)
    return parts


def _nothing(item: Item) -> Hessian:
    raise AssertionError(f"{item.name}: no moments are collected for it")
