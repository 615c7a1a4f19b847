"""Spend a budget of bytes on bits: whole groups are raised, in one order, never beyond it.

A group is one kind of projection in one layer; gate and up are one kind, as are q, k and v; the
vision tower is one group. All start at the lowest rate and climb 1, 2, 3, ... 8 bits in rounds: in
a round each group is raised by one step if the bytes are there, in this order:

1. the head; 2. attention, shared experts, dense layers, which take few bytes and serve every token;
3. down projections of routed experts; 4. their gate and up; 5. the vision tower; 6. the MTP layer,
which changes no answer, only the speed. In 2 to 4 late layers come before early ones.

The round in which a group did not fit is the last: some groups are then one step ahead of others,
never two. What is left over is less than any group that stayed behind would have cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from emberbox.compress.conversion_items import joined, layer_of, projection_of
from emberbox.errors import SettingsError
from emberbox.model.parameters import Part
from emberbox.model.weights import WEIGHT

MAX_BITS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """What always has one rate. `layer` is -1 outside the layers."""

    part: Part
    layer: int
    kind: str

    @property
    def priority(self) -> tuple[int, int, str]:
        """Sorts groups by who is raised first."""
        if self.part is not Part.TRUNK:
            rank = 4 if self.part is Part.VISION else 5
        elif ".experts." in self.kind:
            rank = 2 if self.kind.endswith("down_proj") else 3
        else:
            rank = 1 if self.layer >= 0 else 0
        return rank, -self.layer, self.kind


def group_of(name: str, part: Part) -> Group:
    """The group that the weight `name` is raised with."""
    if part is Part.VISION:
        return Group(part, -1, "vision")
    layer = layer_of(name)
    kind = joined(projection_of(name.removesuffix(WEIGHT)))
    return Group(part, -1 if layer is None else layer, kind)


def choose_bits(
    num_weights: Mapping[Group, int], lowest: float, num_bytes: int, budget_bytes: int
) -> dict[Group, float]:
    """The rate of each group.

    num_weights: elements of each; num_bytes: of everything, with all groups at `lowest` bits.
    Raises SettingsError with the smallest size that can be reached, if that is above the budget.
    """
    if num_bytes > budget_bytes:
        raise SettingsError(
            f"budget_bytes: {budget_bytes:,} is out of reach, the smallest that this recipe makes "
            f"is {num_bytes:,}, with {lowest:g} bits wherever the budget decides",
            hint="raise budget_bytes, lower lowest_bits, or give other parts fewer bits",
        )
    bits = dict.fromkeys(sorted(num_weights, key=lambda group: group.priority), lowest)
    left = budget_bytes - num_bytes
    for rate in (rate for rate in range(1, MAX_BITS + 1) if rate > lowest):
        fits = True
        for group, before in bits.items():
            cost = int(num_weights[group] * (rate - before)) // 8
            if cost <= left:
                bits[group], left = float(rate), left - cost
            else:
                fits = False
        if not fits:
            break
    return bits
