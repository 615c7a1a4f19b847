"""What a conversion will write, tensor by tensor, from headers alone.

Promises: every contradiction between a recipe and a model is found here, all at once, before a
byte of weights is read; sizes are exact. Reads no weights and writes nothing.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod

from emberbox.compress.bit_budget import choose_bits, group_of
from emberbox.compress.conversion_items import (
    FORMAT_BY_NAME,
    Chosen,
    Item,
    joined,
    layer_of,
    make_items,
    stored_as,
)
from emberbox.compress.keep_map import Heaviest, KeepMap
from emberbox.compress.quantization_config import average_bits, config_json, tensor_storage
from emberbox.compress.recipe import Recipe, Rule, Target
from emberbox.compress.sensitivity import choose_measured, losses_in
from emberbox.errors import SettingsError
from emberbox.formats.exl3 import BLOCK
from emberbox.model.config import Glm5NextConfig, TextConfig
from emberbox.model.parameters import TEXT, Kind, Part
from emberbox.model.weights import WEIGHT, Piece, assign
from emberbox.store.safetensors_header import TensorInfo

_EXPERT = re.compile(re.escape(TEXT) + r"layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_ROUTER = re.compile(
    re.escape(TEXT) + r"layers\.(\d+)\.mlp\.gate\.(?:weight|e_score_correction_bias)"
)
# Sources of which a weight can be had without a loss on top of a loss.
CONVERTIBLE = ("bf16", "fp8_block")


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything a conversion writes, in the order of `units`.

    num_experts: `n_routed_experts` of the result. notes: sentences for the user.
    """

    recipe: Recipe
    items: tuple[Item, ...]
    num_experts: int
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.num_bytes for item in self.items)

    @property
    def num_tensors(self) -> int:
        """How many tensors are written."""
        return sum(len(item.outputs) for item in self.items)

    @property
    def average_bits(self) -> float:
        """Mean bits of a quantised weight of the trunk without its head, scales left out."""
        return average_bits(self.items)

    @property
    def digest(self) -> str:
        """sha256 of all that decides what is written, the weights themselves aside."""
        digest = hashlib.sha256(self.recipe.digest.encode())
        for item in self.items:
            digest.update(repr(item).encode())
        return digest.hexdigest()

    def groups(self) -> dict[str, tuple[Item, ...]]:
        """Unit name -> its items: embedding, vision, layer-000 and on, head, mtp."""
        units: dict[str, list[Item]] = {}
        for item in self.items:
            units.setdefault(item.unit, []).append(item)
        return {unit: tuple(items) for unit, items in units.items()}

    def config_json(
        self, source: Mapping[str, object], calibration: Mapping[str, int] | None = None
    ) -> dict[str, object]:
        """config.json of the result; calibration: rows and cols of the text used for a trellis."""
        return config_json(self.items, source, self.num_experts, calibration)

    def tensor_storage(self) -> dict[str, object]:
        """`tensor_storage` of quantization_config.json."""
        return tensor_storage(self.items)


def plan_conversion(
    config: Glm5NextConfig, infos: Mapping[str, TensorInfo], recipe: Recipe
) -> ConversionPlan:
    """What `recipe` makes of a model with these tensors.

    Which experts are the heaviest, headers do not tell: the first stand for them, sizes are right.
    Raises LoadRefused if the tensors are not those of `config`, SettingsError with every reason
    why the recipe does not fit them.
    """
    assignment = assign(config, infos)
    pieces = [piece for placement in assignment.placements for piece in placement.pieces]
    has_mtp = Part.MTP in assignment.parts
    _refuse(recipe, list(_expert_problems(config.text, has_mtp, recipe)))
    keep = recipe.keep
    if isinstance(keep, Heaviest):
        keep = keep.stand_in(config.text, has_mtp)
    choice = _Choice(config.text, recipe, keep)
    chosen = [one for piece in pieces for one in choice.of(piece)]
    _refuse(recipe, [*choice.problems(), *choice.unmatched({p.parameter.part for p in pieces})])
    notes = choice.notes()
    if recipe.name == "measured" and recipe.sensitivity is None:
        notes.append("no --sensitivity: the budget is spent in a fixed order, not by measurement")
    items = make_items(chosen, assignment.spare, recipe)
    if recipe.budget_bytes is not None:
        num_bytes = sum(item.num_bytes for item in items)
        chosen = _within_budget(chosen, recipe, recipe.budget_bytes, num_bytes, infos)
        items = make_items(chosen, assignment.spare, recipe)
    if not recipe.allow_mixed_experts:
        _refuse(recipe, list(_mixed(items)))
    dropped = 0 if recipe.keep_fused_vision else len(assignment.spare)
    if dropped:
        notes.append(f"{dropped} tensors of the source fill no parameter and are left out")
    items.sort(key=_position)
    num_experts = recipe.keep.num_experts if recipe.keep else config.text.n_routed_experts
    return ConversionPlan(recipe, tuple(items), num_experts, tuple(notes))


def _expert_problems(text: TextConfig, has_mtp: bool, recipe: Recipe) -> Iterator[str]:
    """Why the experts that stay are not what one config.json can say."""
    if recipe.keep is not None:
        yield from recipe.keep.problems(text, has_mtp)
    elif has_mtp and text.mtp_experts != text.n_routed_experts:
        yield (
            f"the MTP layer has {text.mtp_experts} experts, the others {text.n_routed_experts}; "
            f"the result has one number for all, cut them with [keep]"
        )


class _Choice:
    """Applies rules and keep-map to one piece after another, and remembers what was odd."""

    def __init__(self, text: TextConfig, recipe: Recipe, keep: KeepMap | None) -> None:
        self.text, self.recipe, self.keep = text, recipe, keep
        self.matched: set[Rule] = set()
        self.modules: set[str] = set()  # layer and expert numbers replaced by *
        self.stuck: dict[tuple[Rule, Target], list[str]] = {}
        self.uneven: dict[Rule, list[str]] = {}
        self.folded: list[str] = []

    def of(self, piece: Piece) -> Iterator[Chosen]:
        """The piece as it is chosen; nothing for an expert that goes."""
        name, rows = piece.parameter.name, None
        if self.keep is not None:
            layers = self.keep.layers
            if match := _EXPERT.match(name):
                kept, expert = layers[int(match[1])], int(match[2])
                if expert not in kept:
                    return
                start, stop = match.span(2)
                name = f"{name[:start]}{kept.index(expert)}{name[stop:]}"
            elif match := _ROUTER.fullmatch(name):
                kept = layers[int(match[1])]
                rows = kept if len(kept) < piece.parameter.shape[0] else None
        target = self._target(piece) if piece.parameter.kind is Kind.LINEAR else Target("keep")
        is_budgeted = target.format == "exl3" and target.bits is None
        if is_budgeted:
            target = replace(target, bits=self.recipe.lowest_bits)
        yield Chosen(piece, target, name, rows, is_budgeted)

    def _target(self, piece: Piece) -> Target:
        """What the last matching rule makes of a matrix, if that can be done."""
        module, part = piece.parameter.name.removesuffix(WEIGHT), piece.parameter.part
        self.modules.add(re.sub(r"(?<=\.)\d+(?=\.)", "*", module))
        attention = self._attention(module, part)
        rules = [r for r in self.recipe.rules if r.matches(module, part.value, attention)]
        self.matched.update(rules)
        rule = rules[-1] if rules else None
        if rule is None or rule.target.format == "keep":
            return Target("keep")
        target, stored = rule.target, stored_as(piece)
        if target == stored and (target.format != "bf16" or piece.infos["weight"].dtype == "BF16"):
            return Target("keep")
        if stored.format not in CONVERTIBLE:
            self.stuck.setdefault((rule, stored), []).append(module)
            return Target("keep")
        shape = piece.parameter.shape
        steps = (
            (BLOCK, BLOCK) if target.format == "exl3" else FORMAT_BY_NAME[target.format].multiple
        )
        if target.format == "exl3" and module.endswith("kv_b_proj"):
            self.folded.append(module)  # attention takes it apart: it is never a product's weight
            return Target("keep")
        if any(size % step for size, step in zip(shape, steps, strict=True)):
            self.uneven.setdefault(rule, []).append(f"{module} {list(shape)}")
            return Target("keep")
        return target

    def _attention(self, module: str, part: Part) -> str:
        layer = layer_of(module)
        if layer is None:
            return ""
        return "mla" if part is Part.MTP or self.text.layer_is_sparse[layer] else "kda"

    def problems(self) -> Iterator[str]:
        """What the rules ask for and no one can do."""
        for (rule, stored), modules in self.stuck.items():
            yield (
                f"{rule.where}: {len(modules)} weights are stored as {stored} already and can only "
                f"move, the first {modules[0]}; asked for was {rule.target}"
            )

    def unmatched(self, parts: set[Part]) -> Iterator[str]:
        """Rules that speak of no weight, unless they are for a part that the model lacks."""
        for rule in self.recipe.rules:
            if rule not in self.matched and (not rule.part or Part(rule.part) in parts):
                near = get_close_matches(rule.patterns[0], sorted(self.modules), n=1, cutoff=0.4)
                hint = f"; there is {near[0]}" if near else ""
                patterns = ", ".join(map(repr, rule.patterns))
                yield f"{rule.where}: {patterns} matches no weight that can be converted{hint}"

    def notes(self) -> list[str]:
        """What stays as it is although a rule speaks of it."""
        found = [
            f"{len(shown)} weights stay as they are, their sides do not divide as "
            f"{rule.target.format} needs: {', '.join(shown[:3])}" + ", ..." * (len(shown) > 3)
            for rule, shown in self.uneven.items()
        ]
        if self.folded:
            found.append(
                f"{len(self.folded)} kv_b_proj stay as they are: attention takes them apart"
            )
        return found


def _within_budget(
    chosen: Sequence[Chosen],
    recipe: Recipe,
    budget_bytes: int,
    num_bytes: int,
    infos: Mapping[str, TensorInfo],
) -> list[Chosen]:
    """The same with the bits that the budget allows; `num_bytes`: of a plan with the fewest."""
    groups = {
        one.name: group_of(one.name, one.piece.parameter.part) for one in chosen if one.is_budgeted
    }
    num_weights = dict.fromkeys(groups.values(), 0)
    for one in chosen:
        if one.is_budgeted:
            num_weights[groups[one.name]] += prod(one.piece.parameter.shape)
    bits = choose_bits(num_weights, recipe.lowest_bits, num_bytes, budget_bytes)
    if recipe.sensitivity is not None:
        left = budget_bytes - num_bytes
        losses = losses_in(recipe.sensitivity, infos)
        bits = choose_measured(num_weights, losses, left, recipe.lowest_bits)
    return [
        replace(one, target=replace(one.target, bits=bits[groups[one.name]]))
        if one.is_budgeted
        else one
        for one in chosen
    ]


def _mixed(items: Sequence[Item]) -> Iterator[str]:
    """Layers whose routed experts, or gate and up, are not all stored alike.

    Other programs need them alike. Layers that only move are none of our business.
    """
    alike: dict[tuple[int, str], dict[str, Target]] = {}
    changed: set[tuple[int, str]] = set()
    for item in items:
        product = joined(item.projection)
        if item.is_linear and item.layer is not None and not product.endswith("qkv"):
            key = (item.layer, product)
            alike.setdefault(key, {}).setdefault(str(item.stored), item.stored)
            if item.target.format != "keep":
                changed.add(key)
    reasons: dict[str, list[int]] = {}
    for (layer, product), found in alike.items():
        if len(found) > 1 and (layer, product) in changed:
            text = f"{product.replace('gate_up', 'gate_proj and up_proj')}: {', '.join(found)}"
            reasons.setdefault(text, []).append(layer)
    for text, layers in reasons.items():
        where = ", ".join(map(str, layers))
        yield f"{text} within a layer (in {where}); other programs need one, allow_mixed_experts"


def _position(item: Item) -> tuple[int, int]:
    """Order of the units: what comes first in the network, then the MTP layer."""
    if item.part is not Part.TRUNK:
        return (1, 0) if item.part is Part.VISION else (4, 0)
    if item.layer is not None:
        return 2, item.layer
    return (0, 0) if item.unit == "embedding" else (3, 0)


def _refuse(recipe: Recipe, problems: Sequence[str]) -> None:
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        count = len(problems)
        raise SettingsError(
            f"recipe {recipe.name}: {count} reason(s) why it does not fit this model\n{lines}"
        )
