"""What a tuned folder says about how it was tuned: compression.json and the model card.

An entry `tuning` joins what the candidate's compression.json holds, so that a receipt names it; the
card gets a section. Knows no tensors.
"""

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emberbox import __version__
from emberbox.compress.beside import HOW, REPORT_NAME
from emberbox.compress.output import CARD_NAME
from emberbox.compress.tune_operands import SCALES, Entry
from emberbox.errors import CheckpointError

if TYPE_CHECKING:
    from emberbox.compress.tune import Tuning

TUNING = "tuning"  # in compression.json


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. curve: (steps done, held-out KL in nats a token), from step 0 on."""

    curve: tuple[tuple[int, float], ...]
    num_refused: int
    entries: tuple[Entry, ...]

    @property
    def first(self) -> float:
        """Held-out KL of the candidate as it came."""
        return self.curve[0][1]

    @property
    def last(self) -> float:
        """Held-out KL after the last step."""
        return self.curve[-1][1]

    @property
    def best_step(self) -> int:
        """The step that is written, 0 for none."""
        return min(self.curve, key=lambda point: point[1])[0]

    @property
    def best(self) -> float:
        """Held-out KL of what is written."""
        return min(kl for _, kl in self.curve)

    @property
    def num_scales(self) -> int:
        """Vectors of scales that were tuned."""
        return sum(entry.role in SCALES for entry in self.entries)


def documents_of(prepared: "Tuning", outcome: Outcome, map_sha256: str) -> dict[str, bytes]:
    """compression.json and README.md; map_sha256: of the candidate's tensors, as in a receipt.

    Raises CheckpointError if the candidate's compression.json is not an object.
    """
    folder = prepared.candidate.checkpoint.folder
    found = tuning_entry(prepared, outcome, map_sha256)
    report = report_of(folder)
    if HOW in report:  # another result than the candidate, so `compress --resume` must not take it
        both = json.dumps([report[HOW], found], sort_keys=True)
        report[HOW] = hashlib.sha256(both.encode()).hexdigest()
    report[TUNING] = found
    return {
        REPORT_NAME: (json.dumps(report, indent=1) + "\n").encode(),
        CARD_NAME: _card(prepared, outcome).encode(),
    }


def tuning_entry(prepared: "Tuning", outcome: Outcome, map_sha256: str) -> dict[str, object]:
    """All that decides the result, and how it went."""
    options, text = prepared.options, prepared.text
    shape = text.text.token_ids.shape
    return {
        "command": command_of(prepared),
        "reference": {"name": prepared.reference.checkpoint.folder.name},
        "candidate": {
            "name": prepared.candidate.checkpoint.folder.name,
            "map_sha256": map_sha256,
        },
        "text": {
            "source": text.text.source,
            "sha256": text.text.sha256,
            "rows": shape[0],
            "cols": shape[1],
            "seed": options.seed,
            "held_out_rows": len(text.held),
            "held_out": f"the last of each {text.every} rows",
        },
        "steps": options.steps,
        "step_rows": options.step_rows,
        "lr": options.rate,
        "device": options.device.partition(":")[0],
        "emberbox": __version__,
        "tuned": {
            "scales": outcome.num_scales,
            "norms": len(outcome.entries) - outcome.num_scales,
        },
        "refused_steps": outcome.num_refused,
        "held_out_kl": {
            "first": outcome.first,
            "last": outcome.last,
            "written": outcome.best,
            "written_step": outcome.best_step,
            "curve": [list(point) for point in outcome.curve],
        },
    }


def command_of(prepared: "Tuning") -> str:
    """What makes this result again, for whoever has both folders."""
    options, words = prepared.options, ["emberbox tune SRC CANDIDATE DST"]
    words += ["--text TEXT"] * (options.text is not None)
    names = ("rows", "cols", "seed", "steps", "step_rows")
    words += [f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names]
    return " ".join([*words, f"--lr {options.rate:g} --device {options.device.partition(':')[0]}"])


def report_of(folder: Path) -> dict[str, object]:
    """What compression.json holds, {} where there is none. Raises CheckpointError."""
    path = folder / REPORT_NAME
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected an object, as `emberbox compress` writes it")
    return found


def _card(prepared: "Tuning", outcome: Outcome) -> str:
    """The candidate's card under the new name, and a section on tuning."""
    old, new = prepared.candidate.checkpoint.folder, prepared.folder.name
    try:
        card = (old / CARD_NAME).read_text("utf-8")
    except FileNotFoundError:
        card = f"# {new}\n"
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{old / CARD_NAME}: cannot be read: {error}") from error
    name = re.escape(old.name)
    for line in ("# {}", "emberbox serve {}"):
        at = re.compile(f"^{line.format(name)}$", re.MULTILINE)
        card = at.sub(lambda _, line=line: line.format(shlex.quote(new)), card)  # type: ignore[misc]
    return f"{card.rstrip()}\n\n{_section(prepared, outcome)}"


def _section(prepared: "Tuning", outcome: Outcome) -> str:
    text = prepared.text
    shape = text.text.token_ids.shape
    num_norms = len(outcome.entries) - outcome.num_scales
    lines = [
        "## Tuning",
        "After quantising, scales (`suh`, `svh`) and norms of the trunk were tuned against the "
        f"source: {outcome.num_scales} vectors of scales and {num_norms} norms. Every other tensor "
        "is as it was, and so are all sizes. Proxy errors above are from before.",
        f"Text: {shape[0]:,} rows of {shape[1]:,} tokens (seed {prepared.options.seed}), of which "
        f"{len(text.held)} were held out. Source: {text.text.source} (sha256 {text.text.sha256}). "
        "Mean KL divergence from the source on the held-out rows: "
        f"{outcome.first:.4f} nats before, {outcome.best:.4f} after.",
        f"```sh\n{command_of(prepared)}\n```",
    ]
    return "\n\n".join(lines) + "\n"
