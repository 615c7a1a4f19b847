"""What a user wants a model to become: rules, parsed once and strictly from TOML. Knows no model.

layout = "released"            # or "exllamav3": names and dtypes as that program writes them
allow_mixed_experts = false    # one format and rate per projection over a layer's experts
budget_bytes = 96_000_000_000  # in place of `bits`: see bit_budget.py
lowest_bits = 2                # where the budget starts from
sensitivity = "sensitivity.json" # beside it, how the budget is spent: see sensitivity.py
expert_moments = "routed"      # or "all", the default: which tokens an expert is fitted to
shrink_tokens = 256            # of "routed": tokens of the layer's mean beside an expert's own

[[rule]]                       # the last rule that matches a module decides; no rule: it moves
match = "**.mlp.experts.**"    # one pattern or several: * stays between dots, ** does not
part = "mtp"                   # only in "trunk", "mtp" or "vision"; left out: anywhere
attention = "mla"              # only in layers with "mla" or "kda"; left out: anywhere
format = "exl3"                # or "nvfp4", "fp8_block", "bf16", "keep"
bits = 2                       # of exl3: 1 to 8, 1.5, 2.5 or 3.5
codebook = "mul1"              # of exl3: or "mcg", "3inst"

[keep]                         # which experts stay: see keep_map.py
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeVar, cast

from emberbox.compress.keep_map import Heaviest, KeepMap, read_keep_map
from emberbox.errors import SettingsError
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.trellis import RATES, is_half_rate

RECIPES = files("emberbox.compress") / "recipes"
FORMAT_NAMES = ("exl3", "nvfp4", "fp8_block", "bf16", "keep")
LAYOUTS = ("released", "exllamav3")
PARTS = ("trunk", "mtp", "vision")
ATTENTIONS = ("mla", "kda")
CODEBOOK = "mul1"  # the best of the three from 2 bits on, and the only one with half rates
BITS = tuple(sorted(num_words / 16 for num_words in RATES))
SENSITIVITY_NAME = "sensitivity.json"
EXPERT_MOMENTS = ("all", "routed")
SHRINK_TOKENS = 256
MAX_SHRINK_TOKENS = 1 << 30
MAX_RECIPE_BYTES = 1 << 24
MAX_BUDGET_BYTES = 1 << 50

TOP_KEYS = (
    "layout",
    "keep_fused_vision",
    "allow_mixed_experts",
    "budget_bytes",
    "lowest_bits",
    "sensitivity",
    "expert_moments",
    "shrink_tokens",
    "rule",
    "keep",
)
RULE_KEYS = ("match", "part", "attention", "format", "bits", "codebook")
_Value = TypeVar("_Value")
_GLOB = re.compile(r"(\*\*|\*|\?|\[!?(?:\w-\w|\w)+\])")


@dataclass(frozen=True, slots=True)
class Target:
    """How a weight is stored. `bits` and `codebook`: of exl3 only.

    format: "exl3", "nvfp4", "fp8_block"; "bf16": plain, whatever the dtype; "keep": its stored
    bytes, unchanged.
    """

    format: str
    bits: float | None = None
    codebook: str | None = None

    def __str__(self) -> str:
        return " ".join(str(x) for x in (self.format, self.codebook) if x) + (
            f" at {self.bits:g} bits" if self.bits else ""
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose released name fits one of `patterns` become `target`.

    `is_budgeted`: the byte budget chooses the bits. `where`: for messages.
    """

    patterns: tuple[str, ...]
    target: Target
    part: str = ""
    attention: str = ""
    is_budgeted: bool = False
    where: str = "rule"

    def matches(self, module: str, part: str, attention: str) -> bool:
        """Whether this rule speaks of `module`, a name without `.weight`.

        attention: "mla" or "kda" inside a layer, else empty.
        """
        here = self.part in ("", part) and self.attention in ("", attention)
        return here and any(_compiled(p).fullmatch(module) for p in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A parsed recipe. `text` is the file as it was read, for the folder that is made by it.

    keep_fused_vision: beside q, k and v of the vision tower, store them fused as well.
    sensitivity: the file that says how `budget_bytes` is spent. budget: both, where they were given
    beside the recipe.
    shrink_tokens: experts are fitted to the tokens that choose them, see compress.routing; None:
    to all tokens.
    """

    name: str
    text: str
    rules: tuple[Rule, ...]
    layout: str = "released"
    keep_fused_vision: bool = False
    allow_mixed_experts: bool = False
    budget_bytes: int | None = None
    lowest_bits: float = 1.0
    keep: KeepMap | Heaviest | None = None
    shrink_tokens: int | None = None
    sensitivity: str | None = None
    budget: "Budget | None" = None

    @property
    def digest(self) -> str:
        """sha256 of everything the recipe says, the keep-map's own file included."""
        kept = self.keep.text if isinstance(self.keep, KeepMap) else ""
        whole = f"{self.text}\0{kept}\0{self.sensitivity or ''}"
        return hashlib.sha256(whole.encode()).hexdigest()


def recipe_names() -> tuple[str, ...]:
    """The recipes that the package ships."""
    found = (entry.name for entry in RECIPES.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of all tensors, and how they are spent: a file of measured losses, or None."""

    num_bytes: int
    sensitivity: Path | None = None

    def added_to(self, text: str) -> str:
        """The recipe in `text` with this budget: what the result's folder says."""
        lines = f"budget_bytes = {self.num_bytes}\n"
        if self.sensitivity is not None:
            lines += f'sensitivity = "{SENSITIVITY_NAME}"\n'
        return lines + text


def load_recipe(name_or_path: str | Path, budget: Budget | None = None) -> Recipe:
    """A shipped recipe by its name, else the one in a file; with a budget that it does not name.

    Raises SettingsError with everything that is wrong in it.
    """
    names = recipe_names()
    if isinstance(name_or_path, str) and name_or_path in names:
        text = (RECIPES / f"{name_or_path}.toml").read_text(encoding="utf-8")
        return parse_recipe(text, name_or_path, budget=budget)
    path = Path(name_or_path)
    if not path.is_file():
        meant = _meant(path.name, names)
        raise SettingsError(
            f"recipe: {str(name_or_path)!r} is neither shipped nor a file{meant}",
            hint=f"shipped are {', '.join(names)}",
        )
    return parse_recipe(_read(path, "a recipe"), str(path), path.parent, budget)


def _read(path: Path, what: str) -> str:
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise SettingsError(f"{path}: larger than {MAX_RECIPE_BYTES} bytes, not {what}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


def parse_recipe(
    text: str, name: str, folder: Path | None = None, budget: Budget | None = None
) -> Recipe:
    """The recipe in `text`; files that it names lie in `folder`. Raises SettingsError."""
    measured = None
    if budget is not None and re.search(r"^\s*(budget_bytes|sensitivity)\s*=", text, re.MULTILINE):
        raise SettingsError(
            f"recipe {name}: has a budget of its own", hint="leave out --budget-bytes, or change it"
        )
    if budget is not None:
        text, measured = budget.added_to(text), budget.sensitivity
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of more digits than are read
        raise SettingsError(f"recipe {name}: not TOML: {error}") from error
    reader = _Reader(text)
    reader.unknown(data, TOP_KEYS, "", 0)
    recipe = Recipe(
        name=name,
        budget=budget,
        text=text,
        rules=tuple(reader.rules(data)),
        layout=reader.value(data, "layout", LAYOUTS) or "released",
        keep_fused_vision=reader.value(data, "keep_fused_vision", (True, False)) or False,
        allow_mixed_experts=reader.value(data, "allow_mixed_experts", (True, False)) or False,
        budget_bytes=reader.value(data, "budget_bytes", range(1, MAX_BUDGET_BYTES)),
        lowest_bits=float(reader.value(data, "lowest_bits", BITS) or BITS[0]),
        shrink_tokens=_shrink_tokens(data, reader),
        keep=read_keep_map(data["keep"], folder, reader.problems) if "keep" in data else None,
    )
    reader.problems += _contradictions(recipe, data)
    if reader.problems:
        lines = "\n".join(f"  - {problem}" for problem in reader.problems)
        raise SettingsError(f"recipe {name}: {len(reader.problems)} problem(s)\n{lines}")
    if "sensitivity" in data:
        if data["sensitivity"] != SENSITIVITY_NAME:  # the name it has beside the result's recipe
            raise SettingsError(f"recipe {name}: sensitivity: expected {SENSITIVITY_NAME!r}")
        found = (folder or Path()) / SENSITIVITY_NAME
        recipe = replace(recipe, sensitivity=_read(measured or found, "measured losses"))
    return recipe


def _shrink_tokens(data: Mapping[str, object], reader: "_Reader") -> int | None:
    found = reader.value(data, "shrink_tokens", range(1, MAX_SHRINK_TOKENS + 1))
    moments = reader.value(data, "expert_moments", EXPERT_MOMENTS)
    return (found or SHRINK_TOKENS) if moments == "routed" else None


def _contradictions(recipe: Recipe, data: Mapping[str, object]) -> Iterator[str]:
    """Values that are sound alone and disagree with another."""
    budgeted = [rule for rule in recipe.rules if rule.is_budgeted]
    if recipe.budget_bytes is None:
        yield from (
            f"{rule.where}: exl3 without bits, and there is no budget (--budget-bytes)"
            for rule in budgeted
        )
        if "sensitivity" in data:
            yield "sensitivity: without budget_bytes it says nothing"
        if "lowest_bits" in data:
            yield "lowest_bits: without budget_bytes it says nothing"
    elif not budgeted:
        yield "budget_bytes: no exl3 rule leaves its bits to the budget"
    if "shrink_tokens" in data and data.get("expert_moments") != "routed":
        yield 'shrink_tokens: only expert_moments = "routed" shrinks anything'
    if recipe.keep_fused_vision and recipe.layout != "exllamav3":
        yield 'keep_fused_vision: only layout = "exllamav3" splits them'
    if not recipe.rules and recipe.keep is None:
        yield "neither a [[rule]] nor a [keep]: nothing to do"
    for rule in recipe.rules:
        bits = recipe.lowest_bits if rule.is_budgeted else rule.target.bits
        if bits and is_half_rate(int(16 * bits)) and rule.target.codebook != "mul1":
            yield f"{rule.where}: {bits:g} bits, a half rate, only with codebook mul1"


class _Reader:
    """Typed values out of the parsed TOML; a bad one is noted and replaced by a harmless one."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.problems: list[str] = []

    def rules(self, data: Mapping[str, object]) -> Iterator[Rule]:
        """Every [[rule]]."""
        tables = data.get("rule", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.problems.append("rule: expected tables, each under its own [[rule]]")
            return
        headers = [n for n, line in enumerate(self.lines) if line.strip().startswith("[[rule]]")]
        for index, table in enumerate(tables):
            line = headers[index] if len(headers) == len(tables) else None
            where = f"rule {index + 1}" + (f" (line {line + 1})" if line is not None else "")
            self.unknown(table, RULE_KEYS, f"{where}: ", line or 0)
            yield self._rule(table, where)

    def _rule(self, table: Mapping[str, object], where: str) -> Rule:
        at = f"{where}: "
        if "format" not in table:
            self.problems.append(f"{at}format is missing, expected {', '.join(FORMAT_NAMES)}")
        name = self.value(table, "format", FORMAT_NAMES, at) or "keep"
        part = self.value(table, "part", PARTS, at) or ""
        attention = self.value(table, "attention", ATTENTIONS, at) or ""
        patterns = tuple(self._patterns(table, at))
        if name != "exl3":
            for key in ("bits", "codebook"):
                if key in table and "format" in table:
                    self.problems.append(f"{at}{key}: only exl3 has that, this is {name}")
            return Rule(patterns, Target(name), part, attention, where=where)
        codebook = self.value(table, "codebook", tuple(CODEBOOKS), at) or CODEBOOK
        bits = self.value(table, "bits", BITS, at)
        target = Target(name, float(bits) if bits else None, codebook)
        return Rule(patterns, target, part, attention, "bits" not in table, where)

    def _patterns(self, table: Mapping[str, object], at: str) -> Iterator[str]:
        found = table.get("match")
        patterns = found if isinstance(found, list) and found else [found]
        for pattern in patterns:
            if not isinstance(pattern, str):
                self.problems.append(f"{at}match is {found!r}, expected a pattern or several")
                continue
            try:
                _compiled(pattern)
            except re.error:
                wild = "*, **, ?, [abc], [0-9] and [!abc]"
                self.problems.append(f"{at}match: {pattern!r} is not a name with {wild}")
            else:
                yield pattern

    def unknown(
        self, table: Mapping[str, object], known: tuple[str, ...], at: str, start: int
    ) -> None:
        """Note every key that is not `known`, its line (from `start` on) and what may be meant."""
        for key in sorted(table.keys() - set(known)):
            assigned = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}\b")
            lines = (n for n in range(start, len(self.lines)) if assigned.match(self.lines[n]))
            line = next(lines, None)
            where = f" (line {line + 1})" if line is not None else ""
            self.problems.append(f"{at}{key!r}{where} is unknown{_meant(key, known)}")

    def value(
        self, table: Mapping[str, object], key: str, allowed: Sequence[_Value], at: str = ""
    ) -> _Value | None:
        """The value if it is one of `allowed` and of their type, else None."""
        found = table.get(key)
        # In Python 1 == True == 1.0: a number is good for a number, nothing else for anything else.
        kinds = (int, float) if allowed is BITS else (type(allowed[0]),)
        if found is None or (type(found) in kinds and found in allowed):
            return cast("_Value | None", found)
        # A range holds no words, and up to 2**50 numbers to look through.
        is_word = isinstance(found, str) and not isinstance(allowed, range)
        near = _meant(str(found), allowed) if is_word else ""
        self.problems.append(f"{at}{key} is {found!r}, expected {_listed(allowed)}{near}")
        return None


def _listed(allowed: Sequence[object]) -> str:
    if isinstance(allowed, range):
        return f"a whole number from {allowed.start:,} to {allowed.stop - 1:,}"
    if isinstance(allowed[0], bool):
        return "true or false"
    return "one of " + ", ".join(
        f"{each:g}" if isinstance(each, float) else str(each) for each in allowed
    )


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """What names `pattern` stands for. Raises re.error for a text that is no pattern."""
    pieces = _GLOB.split(pattern)
    if not pattern or any(mark in piece for piece in pieces[::2] for mark in "[]"):
        raise re.error("not a pattern")
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    for index, piece in enumerate(pieces):
        is_wild = index % 2 == 1
        pieces[index] = wild.get(piece, piece.replace("!", "^")) if is_wild else re.escape(piece)
    return re.compile("".join(pieces))


def _meant(word: str, known: Sequence[object]) -> str:
    near = get_close_matches(word, [each for each in known if isinstance(each, str)], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
