"""The model card of a conversion, from its plan and from what was measured while it ran."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from emberbox import __version__
from emberbox.compress.card import CalibrationFacts, CardFacts, PartFacts, model_card
from emberbox.compress.conversion_items import Item
from emberbox.model.parameters import Part

if TYPE_CHECKING:
    from emberbox.compress.pipeline import Prepared


def card_of(prepared: "Prepared", name: str, reports: Mapping[str, Mapping[str, Any]]) -> str:
    """README.md; reports: item name -> the fields of its QuantReport."""
    plan, found = prepared.plan, prepared.calibration
    formats = {item.stored.format for item in plan.items if item.is_linear}
    calibration = None
    if found is not None:
        rows = found.token_ids.shape[0]
        calibration = CalibrationFacts(
            source=f"{found.source} (sha256 {found.sha256})",
            num_rows=rows,
            num_tokens=found.token_ids.numel(),
        )
    facts = CardFacts(
        name=name,
        base_model=prepared.checkpoint.folder.name,
        license=_license(prepared.checkpoint.folder / "README.md"),
        tags=tuple(sorted(formats - {"bf16"})),
        parts=tuple(_parts(plan.items, reports)),
        average_bits=plan.average_bits,
        num_bytes=plan.num_bytes,
        calibration=calibration,
        recipe_name=plan.recipe.name,
        recipe_text=plan.recipe.text,
        version=__version__,
        device=prepared.options.device.partition(":")[0],
    )
    return model_card(facts)


def _license(card: Path) -> str | None:
    """What the source's own card says in its front matter, if it has one."""
    try:
        head = card.read_text("utf-8").split("---")[1]
    except (OSError, ValueError, IndexError):
        return None
    found = re.search(r"^license: *(\S+)\s*$", head, re.MULTILINE)
    return found[1].strip("\"'") if found else None


def _parts(items: Sequence[Item], reports: Mapping[str, Mapping[str, Any]]) -> list[PartFacts]:
    """One row per part of the network and format, in the order of the network."""
    rows: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        rows.setdefault((_part(item), str(item.stored) if item.is_linear else "plain"), []).append(
            item
        )
    return [_row(part, stored, found, reports) for (part, stored), found in rows.items()]


def _row(
    part: str, stored: str, items: Sequence[Item], reports: Mapping[str, Mapping[str, Any]]
) -> PartFacts:
    num_weights = sum(item.num_weights for item in items)
    num_bytes = sum(item.num_bytes for item in items)
    errors = {i.name: float(reports[i.name]["proxy_error"]) for i in items if i.name in reports}
    worst = max(errors, key=errors.__getitem__) if errors else None
    return PartFacts(
        part=part,
        format=stored,
        bits=8 * num_bytes / num_weights,
        num_weights=num_weights,
        num_bytes=num_bytes,
        mean_error=mean(errors.values()) if errors else None,
        worst_error=errors[worst] if worst else None,
        worst_matrix=worst,
    )


def _part(item: Item) -> str:
    """What a reader calls the place of a weight."""
    prefix = "MTP layer, " if item.part is Part.MTP else ""
    if item.part is Part.VISION:
        return "vision tower"
    if item.layer is None:
        return item.unit
    if ".experts." in item.name:
        return prefix + "routed experts"
    if ".shared_experts." in item.name:
        return prefix + "shared expert"
    if item.is_linear and ".self_attn." in item.name:
        return prefix + "attention"
    if item.is_linear and ".mlp." in item.name:
        return prefix + "dense feed-forward"
    return prefix + "norms, routers and the rest"
