"""What reaches the routed experts of one layer: moments for each, and their summed outputs.

Knows the network's layer and the text that passes it; knows neither formats nor files.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from emberbox.compress.conversion_items import Item, joined
from emberbox.compress.hessian import Hessian, HessianSum
from emberbox.compress.moments import Recorder, mean_of
from emberbox.compress.source import expert_of
from emberbox.model.batch import Span
from emberbox.model.config import TextConfig
from emberbox.model.moe import FeedForward, MixtureOfExperts

# n tokens of a chunk, H hidden, I inner, k experts chosen per token


class Routing:
    """Inputs of the experts of a layer, which of them a token chose, and their summed outputs."""

    def __init__(
        self, config: TextConfig, recorder: Recorder, params: Mapping[str, Tensor], prefix: str
    ) -> None:
        self.config, self.recorder, self.prefix = config, recorder, prefix
        self.ops, self.device = recorder.plain, recorder.device
        self.moe = MixtureOfExperts(config, recorder.ops, params, prefix, 0)
        self.sum = HessianSum(config.hidden_size, self.device)
        self.inputs: list[Tensor] = []  # [n, H] of each chunk
        self.chosen: list[Tensor] = []  # [n, k] int64
        self.weights: list[Tensor] = []  # [n, k] float32
        self.outputs: list[Tensor] = []  # [n, H] float32
        self.mean = Hessian(torch.zeros(1, 1), 0)
        self._last: tuple[str, Hessian] | None = None  # gate and up of an expert share theirs

    def collect(self, x: Tensor, _: tuple[Span, ...]) -> Tensor:
        """Route x [n, H] and remember it; nothing is computed for the network."""
        config = self.config
        chosen, weights = self.ops.route_topk(
            x,
            self.moe.router,
            self.moe.bias,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )
        self.moe.shared(x)
        self.sum.add(x)
        self.inputs.append(x)
        self.chosen.append(chosen)
        self.weights.append(weights)
        return torch.zeros_like(x)

    def begin(self, params: Mapping[str, Tensor]) -> None:
        """Outputs are those of the shared expert with the weights in `params` now."""
        self.mean = mean_of(self.sum, f"{self.prefix}experts")
        at = f"{self.prefix}shared_experts."
        shared = FeedForward(self.ops, params, at, self.config.swiglu_limit)
        self.outputs = [shared(x).float() for x in self.inputs]

    def moments(
        self, weights: Mapping[str, Tensor], item: Item, shrink_tokens: int | None
    ) -> Hessian:
        """Of what `item`, a matrix of a routed expert, is multiplied with.

        shrink_tokens None: the mean over all tokens, as every token passed every expert. Else over
        the n tokens that chose the expert, each by its squared routing weight g, drawn towards the
        mean over all as if that were `shrink_tokens` more of them:

            (n sum g^2 x x^T / sum g^2 + shrink_tokens C_all) / (n + shrink_tokens)

        num_rows is then n; an expert that no token chose has the moments, and the rows, of all.
        """
        if shrink_tokens is None and not item.projection.endswith("down_proj"):
            return self.mean
        key = joined(item.name)
        if self._last is None or self._last[0] != key:
            self._last = key, self._moments(weights, item, shrink_tokens)
        return self._last[1]

    def _moments(
        self, weights: Mapping[str, Tensor], item: Item, shrink_tokens: int | None
    ) -> Hessian:
        is_down = item.projection.endswith("down_proj")
        every = self._inner_mean(weights, item) if is_down else self.mean
        if shrink_tokens is None:
            return every
        own, mass, count = HessianSum(item.shape[1], self.device), 0.0, 0
        for x, rows, share in self._tokens_of(item):
            inner = self._inner(x[rows], weights, item.name) if is_down else x[rows]
            own.add(inner.to(own.dtype) * share[:, None])
            mass, count = mass + float(share.double().square().sum()), count + len(rows)
        if not mass:
            return every
        mean = own.total * (count / mass) + every.matrix * shrink_tokens
        return Hessian(mean / (count + shrink_tokens), count)

    def _inner_mean(self, weights: Mapping[str, Tensor], down: Item) -> Hessian:
        total = HessianSum(down.shape[1], self.device)
        for x in self.inputs:
            total.add(self._inner(x, weights, down.name))
        return mean_of(total, down.name)

    def add_expert(self, weights: Mapping[str, Tensor], down: Item) -> None:
        """Its weighted output for the tokens that chose it."""
        for (x, rows, share), output in zip(self._tokens_of(down), self.outputs, strict=True):
            made = self._inner(x[rows], weights, down.name) @ weights[down.name].T
            output.index_add_(0, rows, made.float() * share[:, None])

    def _tokens_of(self, item: Item) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each chunk: inputs [n, H], the rows that chose its expert, and their weights."""
        expert = expert_of(item.name)
        assert expert is not None, "a routed expert"
        for x, chosen, share in zip(self.inputs, self.chosen, self.weights, strict=True):
            rows, places = torch.eq(chosen, expert).nonzero(as_tuple=True)
            yield x, rows, share[rows, places].float()

    def _inner(self, x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
        """What the down projection of `name`'s expert is multiplied with."""
        at = name.rpartition(".")[0] + "."
        gate, up = x @ weights[f"{at}gate_proj"].T, x @ weights[f"{at}up_proj"].T
        inner: Tensor = self.ops.swiglu(gate, up, self.config.swiglu_limit)
        return inner
