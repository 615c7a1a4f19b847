"""How much of the routing each expert bears on a text, to keep those that bear most.

The mass of an expert: its share of the routing weight of a token, before routed_scaling_factor,
summed over the tokens; a token's chosen experts share 1. The text passes through the source as it
is, a sublayer at a time, in the memory that walk.py tells. Writes nothing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from emberbox.compress.calibration import Calibration
from emberbox.compress.conversion_items import Chosen, Item, make_items
from emberbox.compress.encode import Encoded, Encoder
from emberbox.compress.hessian import Hessian
from emberbox.compress.keep_map import KeepMap, experts_of, made_map
from emberbox.compress.recipe import Recipe, Target
from emberbox.compress.source import EXPERTS, Source
from emberbox.compress.trellis_steps import Found
from emberbox.compress.walk import Walk
from emberbox.model.parameters import Part
from emberbox.model.weights import assign

log = logging.getLogger(__name__)

# n tokens of a chunk, k experts of a token
Route = Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RoutingMass:
    """layers: layer -> mass of every expert, that of the MTP layer under the number after the last.

    text: that the mass was counted on.
    """

    text: Calibration
    layers: Mapping[int, Sequence[float]]

    def heaviest(self, count: int) -> KeepMap:
        """`count` experts of each layer; of equal ones the first."""
        kept = {}
        for layer, masses in self.layers.items():
            order = sorted(range(len(masses)), key=lambda expert: -masses[expert])
            kept[layer] = sorted(order[:count])
        return made_map(kept)

    def notes(self, keep: KeepMap) -> Iterator[str]:
        """For the user: what stays of each layer."""
        for layer, kept in keep.layers.items():
            masses = self.layers[layer]
            share = sum(masses[expert] for expert in kept) / sum(masses)
            listed = ", ".join(map(str, kept))
            yield (
                f"layer {layer} keeps {len(kept)} of {len(masses)} experts, which have "
                f"{share:.1%} of its routing mass: {listed}"
            )


def routing_mass(source: Source, text: Calibration, device: torch.device) -> RoutingMass:
    """Count on `text`. Raises what Walk raises."""
    walk = Walk(_Untouched(source, _no_search, device, 1), text.token_ids)
    tally = _Tally(walk.ops.route_topk)
    walk.ops = replace(walk.ops, route_topk=tally)
    config, assignment = source.config.text, assign(source.config, source.checkpoint.tensors)
    pieces = [piece for placement in assignment.placements for piece in placement.pieces]
    chosen = [Chosen(p, Target("keep"), p.parameter.name) for p in pieces]
    items = make_items(chosen, (), Recipe(name="", text="", rules=()))
    experts = [item for item in items if EXPERTS in item.name]
    layers: dict[int, tuple[float, ...]] = {}
    walk.begin()
    for layer in range(config.num_hidden_layers):
        _run(walk.layer(layer, [item for item in experts if item.layer == layer]))
        if config.mlp_is_moe[layer]:
            layers[layer] = tally.taken()
            log.info("layer %d: the routing is counted", layer)
    if Part.MTP in assignment.parts:
        _run(walk.mtp([]))  # what its experts make of the text, nothing asks for
        layers[config.num_hidden_layers] = tally.taken()
    assert layers.keys() == experts_of(config, Part.MTP in assignment.parts).keys()
    return RoutingMass(text, layers)


class _Tally:
    """The router of an op table; adds up what it gives out, until it is `taken`."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._mass = torch.zeros(0, dtype=torch.float64)

    def __call__(
        self, x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        chosen, weights = self._route(x, gate, bias, top_k, scaling)  # [n, k]
        # On the CPU: a GPU would add in another order every time.
        shares = weights.cpu().double().flatten() / scaling
        mass = torch.bincount(chosen.cpu().flatten(), shares, minlength=gate.shape[0])
        self._mass = self._mass + mass if self._mass.numel() else mass
        return chosen, weights

    def taken(self) -> tuple[float, ...]:
        """The sums since the last call."""
        mass, self._mass = self._mass, torch.zeros(0, dtype=torch.float64)
        return tuple(mass.tolist())


class _Untouched(Encoder):
    """Encodes nothing: the text goes on through the source's weights."""

    def __call__(
        self,
        items: Sequence[Item],
        hessian: Callable[[Item], Hessian],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Iterator[Encoded]:
        return iter(())


def _run(steps: Iterator[Encoded]) -> None:
    for _ in steps:
        pass


def _no_search(tiles: Tensor, num_words: int, codebook: str) -> Found:
    raise AssertionError("nothing is compressed here")
