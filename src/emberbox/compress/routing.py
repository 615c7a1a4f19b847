"""What reaches the routed experts of one layer: moments for each, and their summed outputs.

Knows the network's layer and the text that passes it; knows neither formats nor files.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from emberbox.compress.conversion_items import Item, joined
from emberbox.compress.encode import group_size
from emberbox.compress.hessian import Hessian, HessianSum, working_dtype
from emberbox.compress.moments import Recorder, mean_of
from emberbox.compress.source import expert_of
from emberbox.model.batch import Span
from emberbox.model.config import TextConfig
from emberbox.model.moe import FeedForward, MixtureOfExperts

# n tokens of a chunk, H hidden, I inner, k experts chosen per token

# While the moments of an expert are made: the sum of its own tokens, of all, and terms of the mean.
IN_THE_MAKING = 5


def expert_group_size(items: Sequence[Item], device: torch.device | str, max_bytes: int) -> int:
    """Routed experts whose matrices `items` are computed at once: gate and up are searched
    together, so half as many as matrices."""
    first = next((item for item in items if item.target.format == "exl3"), None)
    return max(1, group_size(first, device, max_bytes) // 2) if first else 1


def moments_bytes(
    items: Sequence[Item], device: torch.device | str, max_bytes: int, shrink_tokens: int | None
) -> int:
    """Most memory on `device` for moments and weights while routed experts are computed in groups.

    items: routed experts of one layer. All matrices of a group that go through the search together
    have their moments at hand: each expert's own for down, and for gate and up where shrink_tokens
    tells so; the mean over all tokens and its sum besides. The weights are a group's three
    matrices as they are read, as the network has them, and as a reader will decode them.
    """
    searched = [item for item in items if item.target.format == "exl3"]
    if not searched:
        return 0
    width = working_dtype(device).itemsize
    num = min(expert_group_size(items, device, max_bytes), len({expert_of(i.name) for i in items}))
    first = {expert_of(item.name) for item in items[:1]}
    read, in_network = 4, 4 if working_dtype(device) is torch.float64 else 2  # bytes of a weight
    alone = sum(prod(item.shape) for item in items if expert_of(item.name) in first)
    weights = num * alone * (read + 2 * in_network)
    own: dict[tuple[object, ...], set[str]] = {}  # matrices that are searched together -> inputs
    for item in searched:
        kinds = own.setdefault((item.shape, item.target), set())
        if shrink_tokens is not None or item.projection.endswith("down_proj"):
            kinds.add(joined(item.projection))
    held = 0
    for item in searched:
        together = num * len(own[item.shape, item.target])
        together = min(together, group_size(item, device, max_bytes)) + IN_THE_MAKING
        held = max(held, together * item.shape[1] ** 2)
    hidden = max(item.shape[1] for item in items if item.is_linear)
    return weights + (held + 2 * hidden**2) * width


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
