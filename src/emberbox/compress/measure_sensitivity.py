"""Measure what each group of matrices costs at each rate: see sensitivity.py.

Every matrix is compressed at every rate with the moments of the source's own text; then the source
runs with one group at one rate exchanged, from the layer of that group on. The whole network lies
in memory, decoded to float32.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from emberbox.compress.bit_budget import Group, group_of
from emberbox.compress.calibration import Calibration
from emberbox.compress.conversion_items import Item
from emberbox.compress.conversion_plan import ConversionPlan
from emberbox.compress.encode import Encoded, Encoder, seeded_plan
from emberbox.compress.hessian import Hessian
from emberbox.compress.pipeline import CompressOptions, prepare
from emberbox.compress.quantize_exl3 import quantize
from emberbox.compress.recipe import Recipe
from emberbox.compress.sensitivity import Sensitivity, made_sensitivity, source_digest
from emberbox.compress.source import Source
from emberbox.compress.trellis_steps import Search
from emberbox.compress.walk import Walk
from emberbox.device import Device
from emberbox.errors import MemoryRefused, SettingsError
from emberbox.formats.base import QuantTensor
from emberbox.measure.lanes import Lane
from emberbox.model.batch import Batch, Span
from emberbox.model.hyper import mean_of_streams, open_streams
from emberbox.model.network import DecoderLayer, Network
from emberbox.model.parameters import Part
from emberbox.model.weights import WEIGHT, assign, load_parameters
from emberbox.ops.table import bind_all

log = logging.getLogger(__name__)

MEASURED_RATES = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
# Of logits of source and candidate at once: no more tokens than this, nor than fit into the bytes.
TOKENS_AT_ONCE = 4096
DIVERGENCE_BYTES = 1 << 30
COPIES = 6  # float32 [n, V] at the worst moment: logits or probabilities of both, what is summed

# R rows of text, T tokens of a row, S streams, H hidden
Made: TypeAlias = list[tuple[Item, QuantTensor]]
Bank: TypeAlias = dict[Group, dict[float, Made]]


def sensitivity_of(
    folder: Path, recipe: Recipe, options: CompressOptions, search: Search
) -> Sensitivity:
    """Of the checkpoint in `folder`; recipe: one that leaves bits to a budget.

    Raises what `prepare` and `measure_sensitivity` raise, SettingsError if there is no matrix to
    measure.
    """
    prepared = prepare(folder, recipe, options)
    if prepared.calibration is None or not any(_measured(prepared.plan.items)):
        raise SettingsError(
            f"recipe {recipe.name}: no matrix of the trunk has its bits to be chosen"
        )
    source = Source(prepared.checkpoint, prepared.config)
    encoder = Encoder(source, search, torch.device(options.device), options.group_bytes)
    return measure_sensitivity(encoder, prepared.plan, prepared.calibration, options.seed)


def measure_sensitivity(
    encoder: Encoder, plan: ConversionPlan, text: Calibration, seed: int
) -> Sensitivity:
    """plan: of a recipe that leaves bits of the trunk to a budget. seed: that chose the rows.

    Raises what Walk and Encoder raise, by name, and MemoryRefused if the network does not fit.
    """
    source, shrink = encoder.source, plan.recipe.shrink_tokens
    _require_memory(encoder, text)
    bank = _Bank(source, encoder.search, encoder.device, encoder.max_bytes, {})
    walk = Walk(bank, text.token_ids, shrink)
    walk.begin()
    for unit, items in plan.groups().items():
        if unit.startswith("layer-") or unit == "head":
            layer = int(unit.removeprefix("layer-")) if unit != "head" else None
            for _ in walk.head(items) if layer is None else walk.layer(layer, items):
                pass
            log.info("%s: compressed at every rate", unit)
    trial = _Trial(source, encoder.device, text.token_ids)
    about = {
        "source": source.checkpoint.folder.name,
        "text": text.sha256,
        "rows_sha256": text.rows_sha256,
        "rows": text.token_ids.shape[0],
        "cols": text.token_ids.shape[1],
        "seed": seed,
        "shrink_tokens": shrink,
        "device": encoder.device.type,
    }
    own = source_digest(source.checkpoint.tensors)
    return made_sensitivity(trial.losses(bank.made), about, own)


@dataclass(frozen=True, slots=True)
class _Bank(Encoder):
    """Compresses what the budget decides on at every rate and keeps it; the text stays as it is."""

    made: Bank

    def __call__(
        self,
        items: Sequence[Item],
        hessian: Callable[[Item], Hessian],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Iterator[Encoded]:
        for group in self.groups(_measured(items)):
            hessians = [hessian(item) for item in group]
            read = [self.weight(item, weights) for item in group]
            for rate in rates_of(group[0]):
                plans = [seeded_plan(item, rate) for item in group]
                made = quantize(read, hessians, plans, self.search, device=self.device)
                for item, one in zip(group, made, strict=True):
                    place = self.made.setdefault(group_of(item.name, item.part), {})
                    place.setdefault(rate, []).append((item, one.tensor))
        return iter(())


def _measured(items: Sequence[Item]) -> list[Item]:
    """What the text reaches and decides on: no group of the vision tower or the MTP layer."""
    return [i for i in items if i.target.format == "exl3" and i.part is Part.TRUNK]


def rates_of(item: Item) -> tuple[float, ...]:
    """That can be chosen for it: half rates exist for one codebook alone."""
    whole = tuple(rate for rate in MEASURED_RATES if rate == int(rate))
    return MEASURED_RATES if item.target.codebook == "mul1" else whole


def _require_memory(encoder: Encoder, text: Calibration) -> None:
    """Raises MemoryRefused if the decoded network and the text before every layer do not fit."""
    config, device = encoder.source.config.text, Device.detect(str(encoder.device))
    Lane("weights", device, 1, text.token_ids.shape[1]).require_memory(
        encoder.source.checkpoint.folder
    )
    states = config.num_hidden_layers * config.hc_mult * config.hidden_size * 4
    found = assign(encoder.source.config, encoder.source.checkpoint.tensors)
    free = device.free_memory_bytes() - found.loaded_bytes(4, decoded=True)
    needed = text.token_ids.numel() * states
    if needed > free:
        raise MemoryRefused(
            f"sensitivity: the text before every layer takes {needed:,} bytes; beside the network "
            f"{free:,} are free",
            hint="measure on fewer rows",
        )


class _Trial:
    """The source's network, what it makes of the text, and where the text is before each layer."""

    def __init__(self, source: Source, device: torch.device, token_ids: Tensor) -> None:
        config, checkpoint = source.config, source.checkpoint
        found = load_parameters(
            checkpoint, assign(config, checkpoint.tensors), device=device, dtype=torch.float32
        )
        self.params = {
            name: value.decode() if isinstance(value, QuantTensor) else value
            for name, value in found.items()
        }
        self.config = config.text
        self.network = Network(config, self.params, bind_all(device))
        R, T = token_ids.shape
        self.parts = tuple(Span(r * T, (r + 1) * T, 0, r, ()) for r in range(R))
        self.streams: list[Tensor] = []  # [R T, S, H] before each layer
        with torch.inference_mode():
            x = self.network.embed(Batch(token_ids.flatten().to(device), self.parts))
            streams = open_streams(x, self.config.hc_mult)
            for layer in self.network.layers:
                self.streams.append(streams)
                streams = layer(streams, self.parts, None)
            self.hidden = self.network.norm(mean_of_streams(streams))

    @torch.inference_mode()
    def losses(self, bank: Bank) -> dict[Group, dict[float, float]]:
        """Every group at every rate."""
        found: dict[Group, dict[float, float]] = {}
        for group, rates in bank.items():
            found[group] = {rate: self._loss(group.layer, made) for rate, made in rates.items()}
            log.info("layer %d %s is measured", group.layer, group.kind)
        return found

    def _loss(self, layer: int, made: Made) -> float:
        params = self.params | dict(self._exchanged(made))
        if layer < 0:
            return self._divergence(self.hidden, params[f"lm_head{WEIGHT}"])
        changed = DecoderLayer(self.config, self.network.ops, params, layer)
        streams = changed(self.streams[layer], self.parts, None)
        for later in self.network.layers[layer + 1 :]:
            streams = later(streams, self.parts, None)
        hidden = self.network.norm(mean_of_streams(streams))
        return self._divergence(hidden, self.params[f"lm_head{WEIGHT}"])

    def _exchanged(self, made: Made) -> Iterator[tuple[str, Tensor]]:
        """Parameters as a reader of the result would decode them."""
        for item, tensor in made:
            weight, start = tensor.to(self.hidden.device).decode(), 0
            for source in item.sources:
                name = source + WEIGHT
                stop = start + self.params[name].shape[0]
                yield name, weight[start:stop].reshape(self.params[name].shape)
                start = stop

    def _divergence(self, hidden: Tensor, head: Tensor) -> float:
        """Mean KL(source || candidate) over all tokens."""
        own = self.params[f"lm_head{WEIGHT}"]
        return mean_divergence((self.hidden, hidden), (own, head))


def tokens_at_once(vocabulary: int) -> int:
    """Of logits that `mean_divergence` holds."""
    return max(1, min(TOKENS_AT_ONCE, DIVERGENCE_BYTES // (COPIES * 4 * vocabulary)))


def mean_divergence(hidden: tuple[Tensor, Tensor], heads: tuple[Tensor, Tensor]) -> float:
    """Mean KL over n tokens of what source and candidate make of them; sums in float64.

    hidden: both [n, H]; heads: both [V, H]; float32. Takes DIVERGENCE_BYTES beside them.
    """
    total, block = 0.0, tokens_at_once(len(heads[0]))
    for start in range(0, len(hidden[0]), block):
        rows = slice(start, start + block)
        source, candidate = (
            log_softmax(states[rows] @ head.T, -1)
            for states, head in zip(hidden, heads, strict=True)
        )
        lost = source.exp() * (source - candidate)
        total += float(lost.sum(dtype=torch.float64))
    return total / len(hidden[0])
