"""The model card of a compressed checkpoint: README.md with front matter that model hubs read.

Says only what it is given: a fact that is None has no line.
"""

import json
import re
from dataclasses import dataclass

_SAFE_WORD = re.compile(r"[A-Za-z0-9_./@:=+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """One part of the network (routed experts, attention, ...) under one format.

    `bits` per weight as stored, scales included. Proxy errors are relative and None for a part
    that was only rounded or copied; `worst_matrix` is the name of the one with the worst.
    """

    part: str
    format: str
    bits: float
    num_weights: int
    num_bytes: int
    mean_error: float | None = None
    worst_error: float | None = None
    worst_matrix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFacts:
    """The text that the second moments were collected on."""

    source: str
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """All that a card says. `base_model` is a hub id, or a name if there is none.

    device: what computed, cpu or cuda; None if it is not known.
    """

    name: str
    base_model: str | None
    license: str | None
    tags: tuple[str, ...]
    parts: tuple[PartFacts, ...]
    average_bits: float
    num_bytes: int
    calibration: CalibrationFacts | None
    recipe_name: str
    recipe_text: str
    version: str
    device: str | None = None
    library_name: str = "emberbox"


def model_card(facts: CardFacts) -> str:
    """The text of README.md. The same facts give the same text."""
    of_base = f" of {_code(facts.base_model)}" if facts.base_model else ""
    blocks = [
        _front_matter(facts),
        f"# {_inline(facts.name)}",
        f"Compressed weights{of_base}, made with emberbox {_inline(facts.version)}: "
        f"{facts.average_bits:.3f} bits per weight on average, {_gigabytes(facts.num_bytes)} "
        f"({facts.num_bytes:,} bytes) of tensors.",
        "## Formats",
        _table(facts),
        *_errors(facts),
        *_calibration(facts.calibration),
        "## Serve it",
        _fenced(f"emberbox serve {_shell_word(facts.name)}", "sh"),
        "`SHA256SUMS` lists the sha256 of every file; `sha256sum -c SHA256SUMS` compares them.",
        "## How it was made",
        _fenced(f"emberbox compress SRC {_shell_word(facts.name)} --recipe recipe.toml", "sh"),
        *_device(facts.device),
        f"Recipe {_code(facts.recipe_name)}:",
        _fenced(facts.recipe_text.rstrip("\n"), "toml"),
    ]
    return "\n\n".join(blocks) + "\n"


def _front_matter(facts: CardFacts) -> str:
    lines = ["---"]
    if facts.base_model:
        lines += [f"base_model: {_yaml(facts.base_model)}", "base_model_relation: quantized"]
    if facts.license:
        lines.append(f"license: {_yaml(facts.license)}")
    lines.append(f"library_name: {_yaml(facts.library_name)}")
    if facts.tags:
        lines += ["tags:", *(f"  - {_yaml(tag)}" for tag in facts.tags)]
    return "\n".join([*lines, "---"])


def _table(facts: CardFacts) -> str:
    rows = [("part", "format", "bits per weight", "weights", "bytes", "proxy error, mean", "worst")]
    rows += [
        (
            _inline(part.part),
            _inline(part.format),
            f"{part.bits:.3f}",
            f"{part.num_weights:,}",
            f"{part.num_bytes:,}",
            _error(part.mean_error),
            _error(part.worst_error),
        )
        for part in facts.parts
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---|---|--:|--:|--:|--:|--:|", *lines[1:]])


def _errors(facts: CardFacts) -> list[str]:
    """What the error columns mean, and which matrices are the worst; nothing without errors."""
    if all(part.mean_error is None for part in facts.parts):
        return []
    blocks = [
        "The proxy error of a matrix is tr(E H Eᵀ) / tr(W H Wᵀ): W are its weights, E what they "
        "changed by, H the second moments of its inputs on the calibration text."
    ]
    worst = [
        f"- {_inline(part.part)}: {_code(part.worst_matrix)} ({_error(part.worst_error)})"
        for part in facts.parts
        if part.worst_matrix is not None
    ]
    if worst:
        blocks.append("\n".join(["The matrix with the worst error of each part:", "", *worst]))
    return blocks


def _calibration(facts: CalibrationFacts | None) -> list[str]:
    if facts is None:
        return []
    size = f"{facts.num_rows:,} rows, {facts.num_tokens:,} tokens"
    return ["## Calibration", f"{size}. Source: {_inline(facts.source)}."]


def _device(device: str | None) -> list[str]:
    if device is None:
        return []
    return [
        f"Computed with `--device` {_code(device)}. A CPU and a GPU sum in another order, so the "
        "other kind makes other bytes of a searched matrix now and then."
    ]


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.2e}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _yaml(text: str) -> str:
    """A quoted scalar: JSON's strings are YAML's, but for what YAML takes for a line break."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)


def _inline(text: str) -> str:
    """`text` as words in a line or a table cell: no line breaks, no markup."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """`text` as code in a line; backticks cannot be in a name and become quotes."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def _shell_word(text: str) -> str:
    return text if _SAFE_WORD.fullmatch(text) else "FOLDER"


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
