"""Figures beside the skills: held-out text, chains of drafts on it, the indexer, the experts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import Operand
from emberbox.model.network import Network
from emberbox.ops.table import OpTable
from training.context import Context, Rows
from training.data.text import Ids
from training.network import TrainingNetwork
from training.parameters import initial
from training.recipe import MAX_CHAIN

ROW = 1024  # tokens of a row of text
ROWS_AT_ONCE = 16
SETTLED = 128  # places below it choose among few pools, if among any
RANDOM_SEED = 1


@dataclass(frozen=True, slots=True)
class TextFigures:
    """Means over all tokens of whole rows. chains[k]: the first k + 1 drafts equal the trunk's
    choices. kept: share of dense attention on the selection, by sparse layer, MTP last."""

    tokens: int
    nats: float
    top1: float
    chains: tuple[float, ...]
    kept: tuple[float, ...]
    loads: dict[str, list[float]]


@torch.no_grad()
def text_figures(network: TrainingNetwork, ids: Ids, *, dense: bool = False) -> TextFigures:
    """`ids` cut into rows of `ROW`; the rest is dropped. Loads are relative to their mean."""
    device = next(iter(network.ctx.params.values())).device
    rows = torch.from_numpy(ids[: len(ids) // ROW * ROW].astype(np.int64)).view(-1, ROW)
    sums: dict[str, Tensor] = {}
    for part in torch.split(rows.to(device), ROWS_AT_ONCE):
        for name, value in _text_sums(network, part, dense=dense).items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
    count = sums["rows"].item()
    places = [count * (ROW - 2 - depth) for depth in range(MAX_CHAIN)]
    loads = {
        name.removeprefix("load "): [round(v, 3) for v in (value / value.mean()).tolist()]
        for name, value in sums.items()
        if name.startswith("load ")
    }
    return TextFigures(
        tokens=int(count * (ROW - 1)),
        nats=round(sums["nats"].item() / (count * (ROW - 1)), 4),
        top1=round(sums["top1"].item() / (count * (ROW - 1)), 4),
        chains=tuple(round(v / n, 4) for v, n in zip(sums["chains"].tolist(), places, strict=True)),
        kept=tuple(round(v / count, 4) for v in sums["kept"].tolist()),
        loads=loads,
    )


def _text_sums(network: TrainingNetwork, ids: Tensor, *, dense: bool) -> dict[str, Tensor]:
    B, T = ids.shape
    flag = torch.tensor(float(dense), device=ids.device)
    rows = Rows(B, T, torch.ones(B * T, device=ids.device), flag)
    trunk = network.trunk(ids, None, rows)
    drafts = network.drafts(trunk, rows, MAX_CHAIN)
    logits = network.logits(trunk.hidden).float().view(B, T, -1)
    choices = logits.argmax(-1)
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
    whole: Tensor | None = None
    chains = []
    for depth, draft in enumerate(drafts):
        tokens = network.logits(draft.hidden).argmax(-1).view(B, T)
        hit = (tokens[:, :-1] == choices[:, 1:])[:, depth : T - 2]
        whole = hit if whole is None else whole[:, : hit.shape[1]] & hit
        chains.append(whole.sum())
    kept = [*(layer.kept for layer in trunk.attended), drafts[0].attended.kept]
    loads = {f"load {name}": load for name, load in trunk.loads.items()}
    loads[f"load {network.mtp_prefix}mlp."] = drafts[0].load
    return {
        "rows": torch.tensor(float(B)),
        "nats": loss,
        "top1": (choices[:, :-1] == ids[:, 1:]).sum(),
        "chains": torch.stack(chains),
        "kept": torch.stack(kept) * B,
        **loads,
    }


def with_random_indexer(ctx: Context) -> Context:
    """The same weights, but the indexers as they were before training."""
    start = initial(ctx.config, RANDOM_SEED)
    device = next(iter(ctx.params.values())).device
    params = {
        name: start[name].to(device) if ".indexer." in name else tensor
        for name, tensor in ctx.params.items()
    }
    return replace(ctx, params=params)


@dataclass(slots=True)
class SelectionRecall:
    """Stands in for the attention op and compares the pools chosen with the best ones.

    The best pools are those that attention over everything before a place weighs most, all heads
    summed; as many of them count as were chosen. `shares`: per call, one per sparse layer, the
    share found, over the places from `SETTLED` on.
    """

    attention: Callable[..., Tensor]
    pool: int
    shares: list[float] = field(default_factory=list)

    def __call__(self, q: Tensor, latents: Tensor, kv_b: Tensor, indices: Tensor) -> Tensor:
        mass = dense_attention(q, latents, kv_b)
        T = mass.shape[0]
        pools = mass[:, : T // self.pool * self.pool].reshape(T, -1, self.pool).sum(-1)
        complete = (torch.arange(T, device=q.device) + 1).div(self.pool, rounding_mode="floor")
        candidate = torch.arange(pools.shape[1], device=q.device) < complete.unsqueeze(-1)
        chosen = torch.zeros(T, pools.shape[1] + 1, dtype=torch.bool, device=q.device)
        spare = pools.shape[1]
        at = indices.div(self.pool, rounding_mode="floor").masked_fill(indices < 0, spare)
        chosen = chosen.scatter(1, at.clamp(max=spare), value=True)[:, :-1] & candidate
        count = int(chosen.sum(-1).max())
        best = pools.masked_fill(~candidate, -1.0).topk(count, -1).indices
        found = chosen.gather(1, best)[SETTLED:].float().mean().item()
        self.shares.append(found)
        return self.attention(q, latents, kv_b, indices)


def dense_attention(q: Tensor, latents: Tensor, kv_b: Tensor) -> Tensor:
    """q [T, H, Dk], latents [T, C], kv_b [H, Dk + Dv, C] -> weights [T, T], heads summed."""
    T, _, Dk = q.shape
    keys = torch.einsum("nc,hdc->hnd", latents.float(), kv_b[:, :Dk].float())
    logits = torch.einsum("thd,hnd->htn", q.float(), keys) * Dk**-0.5
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(logits.masked_fill(later, float("-inf")), -1).sum(0)


@torch.inference_mode()
def selection_recall(
    config: Glm5NextConfig, params: Mapping[str, Operand], ops: OpTable, ids: Ids
) -> list[float]:
    """Mean share of the best pools that each sparse layer's indexer picks, on rows of `ids`."""
    recall = SelectionRecall(ops.mla_attention, config.text.index_kpool)
    network = Network(config, params, replace(ops, mla_attention=recall))
    rows = torch.from_numpy(ids[: len(ids) // ROW * ROW].astype(np.int64)).view(-1, ROW)
    for row in rows:
        network.full(row.unsqueeze(0).to(network.embedding.device))
    layers = sum(config.text.layer_is_sparse)
    return [round(float(np.mean(recall.shares[i::layers])), 4) for i in range(layers)]
