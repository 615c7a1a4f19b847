"""What each group of matrices costs at each rate, measured, and the rates that a budget affords.

loss[group][rate]: mean KL(source || source with that group alone at that rate), nats. The losses of
groups are taken to add up; at the sizes that matter they nearly do (docs/log.md). A file is bound
to the weights that were measured: of another model it says nothing.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from emberbox.compress.bit_budget import Group
from emberbox.errors import CheckpointError, SettingsError
from emberbox.formats.trellis import RATES
from emberbox.model.parameters import Part
from emberbox.store.safetensors_header import TensorInfo

SCHEMA = "emberbox.sensitivity.v1"
CROOKED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
SAMPLE_BYTES = 4096  # that are read of a tensor to know it again
HALVINGS = 100  # of the logarithm of a price: far below the difference of any two choices

_EXPERT = re.compile(r"\.experts\.\d+\.")

Losses: TypeAlias = Mapping[Group, Mapping[float, float]]
Costs: TypeAlias = Mapping[Group, Mapping[float, int]]  # bytes beyond the lowest bits


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """text: the file that says so."""

    losses: Losses
    text: str


def source_digest(tensors: Mapping[str, TensorInfo]) -> str:
    """sha256 that tells a checkpoint from others of its shape, however it is spread over files.

    Of every tensor's name, dtype and shape, and of the first SAMPLE_BYTES of each; of the experts
    of a layer those of the first alone, so that the real model takes 2,000 reads and not 80,000.
    Raises CheckpointError for a file that cannot be read.
    """
    found, sampled = hashlib.sha256(), set()
    for name, info in sorted(tensors.items()):
        found.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
        place = _EXPERT.sub(".experts.", name)
        if place not in sampled:
            sampled.add(place)
            found.update(_first_bytes(info))
    return found.hexdigest()


def _first_bytes(info: TensorInfo) -> bytes:
    try:
        with info.file.open("rb") as file:
            file.seek(info.start)
            return file.read(min(SAMPLE_BYTES, info.num_bytes))
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error.strerror}") from error


def made_sensitivity(
    losses: Losses, about: Mapping[str, object], source_sha256: str
) -> Sensitivity:
    """From what was measured; about: on what; source_sha256: `source_digest` of the source."""
    groups = [
        {
            "part": group.part.value,
            "layer": group.layer,
            "kind": group.kind,
            "loss": {f"{rate:g}": loss for rate, loss in sorted(found.items())},
        }
        for group, found in losses.items()
    ]
    whole = {
        "schema": SCHEMA,
        "source_sha256": source_sha256,
        "about": dict(about),
        "groups": groups,
    }
    return Sensitivity(losses, json.dumps(whole, indent=1) + "\n")


def losses_in(text: str, tensors: Mapping[str, TensorInfo]) -> Losses:
    """Of the file that `made_sensitivity` gave of the checkpoint with these `tensors`.

    Raises SettingsError that says what is wrong, also for the file of another checkpoint.
    """
    try:
        whole = json.loads(text)
        if not isinstance(whole, dict) or whole.get("schema") != SCHEMA:
            raise SettingsError(f"sensitivity: expected a file of the schema {SCHEMA}")
        losses, measured = dict(_groups(whole["groups"])), whole["source_sha256"]
    except CROOKED as error:
        raise SettingsError(f"sensitivity: {type(error).__name__}: {error}") from error
    if len(losses) < len(whole["groups"]):
        raise SettingsError("sensitivity: a group stands twice")
    if measured != (own := source_digest(tensors)):
        about = whole.get("about")
        name = about.get("source") if isinstance(about, dict) else None
        raise SettingsError(
            f"sensitivity: measured on {str(name)[:80]!r} with weights {str(measured)[:12]}; this "
            f"checkpoint has {own[:12]}",
            hint="measure this checkpoint: name a file that does not exist yet",
        )
    return losses


def _groups(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Group, Mapping[float, float]]]:
    for entry in entries:
        group = Group(Part(entry["part"]), int(entry["layer"]), str(entry["kind"]))
        yield group, dict(_rates(group, entry["loss"]))


def _rates(group: Group, losses: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    for name, loss in losses.items():
        rate = float(name)
        if rate * 16 not in RATES:
            raise ValueError(f"{_label(group)}: {name} bits, no rate of exl3")
        if type(loss) not in (int, float) or not math.isfinite(loss):
            raise ValueError(f"{_label(group)}: a loss of {loss!r} at {name} bits")
        yield rate, float(loss)


def _label(group: Group) -> str:
    where = f"layer {group.layer} " if group.layer >= 0 else ""
    return f"{where}{group.kind}"


def choose_measured(
    num_weights: Mapping[Group, int], losses: Losses, free_bytes: int, lowest: float
) -> dict[Group, float]:
    """The rate of each group: the least sum of losses whose bytes fit.

    num_weights: elements of each; free_bytes: to spend beyond all groups at `lowest` bits. First at
    the highest price of a byte for which all fits (every group takes the rate that it would buy),
    then what is left goes, step by step, to whoever gains most for a byte. Raises SettingsError if
    a group was not measured, or not even the smallest choice fits.
    """
    missing = [_label(group) for group in num_weights if group not in losses]
    if missing:
        raise SettingsError(
            f"sensitivity: {len(missing)} groups were not measured, the first {missing[0]}",
            hint="measure this checkpoint anew: name a file that does not exist yet",
        )
    offers = {
        group: {r: loss for r, loss in sorted(losses[group].items()) if r >= lowest}
        for group in sorted(num_weights, key=lambda group: group.priority)
    }
    costs = {
        group: {rate: int(num_weights[group] * (rate - lowest)) // 8 for rate in offer}
        for group, offer in offers.items()
    }
    if not all(offers.values()) or sum(min(cost.values()) for cost in costs.values()) > free_bytes:
        raise SettingsError(
            "budget_bytes: out of reach even at the lowest bits that were measured",
            hint="raise budget_bytes, or give other parts fewer bits",
        )
    bits = _at_one_price(offers, costs, free_bytes)
    left = free_bytes - sum(costs[group][rate] for group, rate in bits.items())
    while steps := list(_steps(bits, offers, costs, left)):
        _, group, rate = max(steps, key=lambda step: step[0])
        left -= costs[group][rate] - costs[group][bits[group]]
        bits[group] = rate
    return bits


def _at_one_price(offers: Losses, costs: Costs, free_bytes: int) -> dict[Group, float]:
    """What all groups buy at the lowest price of a byte at which it fits."""

    def bought(price: float) -> dict[Group, float]:
        return {
            group: min(offer, key=lambda rate: (offer[rate] + price * costs[group][rate], rate))
            for group, offer in offers.items()
        }

    low, high = 1e-30, 1e30
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        spent = sum(costs[group][rate] for group, rate in bought(middle).items())
        low, high = (low, middle) if spent <= free_bytes else (middle, high)
    return bought(high)


def _steps(
    bits: Mapping[Group, float], offers: Losses, costs: Costs, left: int
) -> Iterator[tuple[float, Group, float]]:
    """(gain for a byte, group, rate) of every raise that fits and helps."""
    for group, offer in offers.items():
        now = bits[group]
        for rate, loss in offer.items():
            more = costs[group][rate] - costs[group][now] if rate > now else 0
            if 0 < more <= left and loss < offer[now]:
                yield (offer[now] - loss) / more, group, rate
