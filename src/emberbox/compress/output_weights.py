"""Which tokens matter: the moments of a matrix, each token weighed by what its output decides.

The source runs over the calibration text once, and what it says is pulled back through it: a token
counts at a matrix by the squared norm of the gradient there, averaged over draws whose covariance
at the logits is their Fisher matrix. To second order that is what an error in the matrix's output
at that token adds to the KL divergence. Knows no codes and no files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from emberbox.compress.conversion_items import Item, joined
from emberbox.compress.conversion_plan import ConversionPlan
from emberbox.compress.hessian import HessianSum
from emberbox.compress.source import EXPERTS, Source
from emberbox.errors import OpError
from emberbox.formats.base import QuantTensor
from emberbox.model.batch import Batch, Span
from emberbox.model.config import Glm5NextConfig, TextConfig
from emberbox.model.layers import Parameters
from emberbox.model.network import Network
from emberbox.model.parameters import Part
from emberbox.model.weights import WEIGHT, assign, load_parameters
from emberbox.ops.kda_chunk.kernel_torch import CHUNK, GPU_CHUNK
from emberbox.ops.table import OpTable, bind_all
from emberbox.store.checkpoint import Checkpoint

# N tokens of the text, T of a row, V vocabulary
NUM_DRAWS = 2
CLIPPED = 0.01  # of the tokens weigh no more than the least of them: none fills a Hessian alone


@dataclass(frozen=True, slots=True, eq=False)
class OutputWeights:
    """Product (see `product_of`) -> float32 [N] on the CPU, mean 1.

    What is not there decides nothing that a gradient can tell: all its tokens count alike.
    """

    by_product: Mapping[str, Tensor]

    def of(self, product: str) -> Tensor | None:
        """Weights of the tokens, in the order of the text."""
        return self.by_product.get(product)


class WeightedSum(HessianSum):
    """Adds up w x x^T; `add` is given all rows of the text in order, once."""

    def __init__(self, num_inputs: int, device: torch.device | str, weights: Tensor) -> None:
        super().__init__(num_inputs, device)
        self.roots = weights.to(self.total.device, self.total.dtype).sqrt()  # [N]
        self.place = 0

    def add(self, x: Tensor) -> None:
        """x [..., I], the rows that follow those before. Raises OpError beyond the last."""
        rows = x.reshape(-1, x.shape[-1]).to(self.total.device, self.total.dtype)
        stop = self.place + len(rows)
        if stop > len(self.roots):
            raise OpError(f"Hessian: {stop} rows, but weights of {len(self.roots)} tokens")
        super().add(rows * self.roots[self.place : stop, None])
        self.place = stop


def sum_for(
    weights: OutputWeights | None, product: str, num_inputs: int, device: torch.device
) -> HessianSum:
    """Where to add what goes into `product`."""
    own = weights.of(product) if weights else None
    if own is None:
        return HessianSum(num_inputs, device)
    return WeightedSum(num_inputs, device, own)


def product_of(module: str) -> str:
    """What shares weights: q, k, v; gate and up; all matrices of the routed experts of a layer.

    An expert's tokens are weighed by the gradient at the summed output of the experts, its routing
    weight aside: that is the business of `expert_moments`.
    """
    before, routed, _ = module.partition(EXPERTS)
    return before + routed.rstrip(".") if routed else joined(module)


def output_weights(
    source: Source, plan: ConversionPlan, token_ids: Tensor, device: torch.device
) -> OutputWeights | None:
    """Of everything in the trunk that is searched; token_ids [R, T]. None if the recipe has none.

    Takes weighing_bytes() of memory. The same text gives the same weights, draws included.
    """
    power = plan.recipe.output_power
    wanted = {product_of(item.name) for item in plan.items if _is_reached(item)}
    if power is None or not wanted:
        return None
    checkpoint, config = source.checkpoint, source.config
    found = load_parameters(
        checkpoint, assign(config, checkpoint.tensors), device=device, dtype=torch.float32
    )
    params: dict[str, Tensor] = {
        name: value.decode().float() if isinstance(value, QuantTensor) else value
        for name, value in found.items()
    }
    listener = Listener(params, wanted, token_ids.numel(), device)
    network = Network(config, params, listener.ops)
    for row, ids in enumerate(token_ids):
        listener.start = row * len(ids)
        pull_back(network, ids.to(device), row)
    weights = {name: tempered(total, power) for name, total in listener.totals.items()}
    return OutputWeights({name: own for name, own in weights.items() if own.any()})


def tempered(total: Tensor, power: float) -> Tensor:
    """Squared norms [N] -> weights of mean 1, float32 on the CPU, the largest clipped.

    power: 1 for the squared norm itself, 0.5 for its root. All zero where hardly a token counts.
    """
    found = total.double().cpu()
    least = found.sort(descending=True).values[int(CLIPPED * len(found))]
    weights = found.clamp(max=least).pow(power)
    return (weights / weights.mean().clamp(min=torch.finfo(torch.float64).tiny)).float()


class Listener:
    """`ops` is plain torch, whose products add to `totals` when a gradient passes them.

    totals: product -> squared norms of the gradient at its output [N], summed over draws. start:
    where in the text the tokens of the next pass begin.
    """

    def __init__(
        self, params: Parameters, wanted: Iterable[str], num_tokens: int, device: torch.device
    ) -> None:
        self.totals = {name: torch.zeros(num_tokens, device=device) for name in wanted}
        self.start = 0
        names = (name for name in params if name.endswith(WEIGHT))
        self._product = {id(params[n]): product_of(n.removesuffix(WEIGHT)) for n in names}
        base = OpTable.reference()
        linear, experts = base.linear, base.moe_experts

        def heard_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return self._heard(linear(x, weight, bias), weight)

        def heard_experts(
            x: Tensor,
            chosen: Tensor,
            share: Tensor,
            projections: tuple[tuple[Tensor, ...], ...],
            limit: float,
        ) -> Tensor:
            return self._heard(experts(x, chosen, share, projections, limit), projections[0][0])

        # The reference of this op goes token by token, which takes four times the memory to return.
        chunks = bind_all(device).kda_chunk
        self.ops = replace(base, linear=heard_linear, moe_experts=heard_experts, kda_chunk=chunks)

    def _heard(self, out: Tensor, weight: Tensor) -> Tensor:
        """`out` [T, O] of the product with `weight`, listened to if that is wanted."""
        product = self._product.get(id(weight), "")
        if product in self.totals and out.requires_grad:
            note = partial(self._add, product, self.start)
            out.register_hook(note)  # type: ignore[no-untyped-call]
        return out

    def _add(self, product: str, start: int, gradient: Tensor) -> None:
        norms = gradient.flatten(1).float().square().sum(1)
        self.totals[product][start : start + len(norms)] += norms


def pull_back(network: Network, ids: Tensor, seed: int, num_draws: int = NUM_DRAWS) -> None:
    """Send draws of the Fisher matrix of the logits of one row, ids [T], back to its embedding."""
    network.embedding = network.embedding.detach().requires_grad_()
    logits = network.logits(network.forward(Batch(ids, (Span(0, len(ids), 0, 0, ()),)), None))
    chances = torch.softmax(logits.detach(), -1)  # [T, V]
    generator = torch.Generator().manual_seed(seed)
    for draw in range(num_draws):
        is_last = draw == num_draws - 1
        torch.autograd.grad(
            logits, network.embedding, fisher_draw(chances, generator), retain_graph=not is_last
        )


def fisher_draw(chances: Tensor, generator: torch.Generator) -> Tensor:
    """Chances p [T, V] -> a gradient of each token's logits, of mean 0, covariance diag(p) - p p^T.

    That is the covariance of labels drawn by p, less their mean; random signs scatter less.
    """
    signs = torch.randint(0, 2, chances.shape, generator=generator, dtype=torch.int8)
    spread = chances.sqrt() * (signs.to(chances.device) * 2 - 1)
    return spread - chances * spread.sum(-1, keepdim=True)


def weighing_bytes(
    config: Glm5NextConfig, checkpoint: Checkpoint, shape: Sequence[int], device: str
) -> int:
    """Memory that `output_weights` takes for a text of `shape` [R, T]: a bound.

    The network, what one row keeps for its way back, the draws, and the weights of all tokens.
    """
    (rows, cols), text = shape, config.text
    network = assign(config, checkpoint.tensors).loaded_bytes(4, decoded=True)
    draws = 8 * 4 * text.vocab_size * cols
    weights = 8 * text.num_hidden_layers * 4 * rows * cols  # products of a layer, at the most
    return network + row_bytes(text, cols, is_gpu=device != "cpu") + draws + weights


def row_bytes(text: TextConfig, cols: int, *, is_gpu: bool) -> int:
    """What a row of `cols` tokens keeps for its way back, in float32: a bound, counted on a CPU."""
    chunk = GPU_CHUNK if is_gpu else CHUNK
    kda = text.kda_heads * text.kda_head_dim * (3 * chunk + 36)
    heads = text.num_attention_heads
    sparse = 6 * heads * (text.qk_head_dim + text.v_head_dim) + 3 * heads * cols
    sparse += 2 * text.index_n_heads * text.index_head_dim
    inner, shared = text.moe_intermediate_size, text.n_shared_experts
    experts = (text.num_experts_per_tok + shared) * (6 * inner + 2 * text.hidden_size)
    num_sparse, num_moe = sum(text.layer_is_sparse), sum(text.mlp_is_moe)
    layers = text.num_hidden_layers
    values = kda * (layers - num_sparse) + sparse * num_sparse + experts * num_moe
    values += 6 * text.intermediate_size * (layers - num_moe)
    values += 8 * text.hc_mult * text.hidden_size * layers
    return 4 * cols * values


def _is_reached(item: Item) -> bool:
    return item.target.format == "exl3" and item.part is Part.TRUNK
