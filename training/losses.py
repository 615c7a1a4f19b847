"""What is minimised: next token, chained drafts, and the indexers' own loss."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training.context import Rows
from training.network import Draft, TrainingNetwork
from training.recipe import MAX_CHAIN, Recipe

# B rows, T tokens each. Weights of tokens: -1 padding, 0 not learnt, else the loss of predicting it
COUNTED = 0.5  # accuracies count tokens of at least this weight: answers and stops, not prompts


@dataclass(frozen=True, slots=True)
class Result:
    """`total` to differentiate, `loads` by prefix of the expert layer, `figures` [len(names)]."""

    total: Tensor
    loads: dict[str, Tensor]
    figures: Tensor


def figure_names(num_sparse: int) -> tuple[str, ...]:
    """What `figures` holds, each a mean over the batch. MTP is the last sparse layer."""
    layers = (*range(num_sparse), "mtp")
    return (
        "loss",
        *(f"draft_loss_{i + 1}" for i in range(MAX_CHAIN)),
        *(f"kl_{i}" for i in layers),
        *(f"kept_{i}" for i in layers),
        "top1",
        *(f"draft_{i + 1}" for i in range(MAX_CHAIN)),
        "chain",
    )


def objective(
    network: TrainingNetwork,
    batch: tuple[Tensor, Tensor, Tensor | None],
    dense: Tensor,
    chain: int,
    recipe: Recipe,
) -> Result:
    """One micro-batch: (ids [B, T] int64, weights [B, T], pixels or None)."""
    ids, weights, pixels = batch
    B, T = ids.shape
    rows = Rows(B, T, (weights >= 0).float().flatten(), dense)
    weights = weights.clamp(min=0)
    trunk = network.trunk(ids, pixels, rows)
    drafts = network.drafts(trunk, rows, chain)
    logits = network.logits(trunk.hidden)
    loss = network.ctx.fused.cross_entropy(logits, shifted(ids, 1), shifted(weights, 1))
    draft_losses, draft_tokens = _draft_losses(network, drafts, ids, weights)
    sparse = [*trunk.attended, drafts[0].attended]
    index_losses = [figures.index_loss for figures in sparse]
    index_losses[-1] = torch.stack([d.attended.index_loss for d in drafts]).mean()
    total = loss + recipe.index_weight * torch.stack(index_losses).sum()
    for each, weight in zip(draft_losses, recipe.draft_weights, strict=False):
        total = total + weight * each
    loads = dict(trunk.loads)
    loads[f"{network.mtp_prefix}mlp."] = torch.stack([d.load for d in drafts]).sum(0)
    with torch.no_grad():
        absent = [torch.zeros_like(loss)] * (MAX_CHAIN - chain)
        main = logits.argmax(-1).view(B, T)
        figures = [loss, *draft_losses, *absent, *index_losses, *(f.kept for f in sparse)]
        figures += _agreement(main, draft_tokens, ids, weights)
    return Result(total, loads, torch.stack([f.detach() for f in figures]))


def shifted(t: Tensor, by: int) -> Tensor:
    """[B, T] -> what stands `by` tokens later, flattened; zero past the end."""
    return functional.pad(t[:, by:], (0, by)).flatten()


def _draft_losses(
    network: TrainingNetwork, drafts: tuple[Draft, ...], ids: Tensor, weights: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses by depth, and the drafted tokens [B, T] of place t + 2."""
    losses, tokens = [], []
    for depth, draft in enumerate(drafts):
        logits = network.logits(draft.hidden)
        begun = torch.arange(ids.shape[1], device=ids.device) >= depth
        counted = shifted(weights, 2) * begun.repeat(ids.shape[0])
        losses.append(network.ctx.fused.cross_entropy(logits, shifted(ids, 2), counted))
        tokens.append(logits.detach().argmax(-1).view(ids.shape))
    return losses, tokens


def _agreement(main: Tensor, drafted: list[Tensor], ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Top-1 of the trunk; agreement of drafts with the trunk's next choice; of whole chains."""

    def share(hit: Tensor, weight: Tensor) -> Tensor:
        counted = weight > COUNTED
        return (hit.flatten() * counted).sum() / (counted.sum() + 1e-6)

    top1 = share(main.flatten() == shifted(ids, 1), shifted(weights, 1))
    hits = [tokens == functional.pad(main[:, 1:], (0, 1)) for tokens in drafted]
    shares = [share(hit, shifted(weights, 2)) for hit in hits]
    none = torch.zeros_like(top1)
    whole = hits[0]
    for depth, hit in enumerate(hits[1:], 1):
        whole = whole & functional.pad(hit[:, depth:], (0, depth))
    last = share(whole, shifted(weights, 1 + len(hits))) if len(hits) == MAX_CHAIN else none
    return [top1, *shares, *[none] * (MAX_CHAIN - len(hits)), last]
