"""What a result holds beside its weights: configuration, recipe, and how it was made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from emberbox.compress.calibration import Calibration
from emberbox.compress.keep_map import KeepMap
from emberbox.compress.recipe import SENSITIVITY_NAME
from emberbox.errors import CheckpointError

if TYPE_CHECKING:  # it imports this module
    from emberbox.compress.pipeline import Prepared

COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
REPORT_NAME = "compression.json"
GROUP_BYTES = 4 << 30  # unless something else is asked for
HOW = "how"  # in it: the digest of all that decided the result


def config_of(prepared: "Prepared") -> dict[str, object]:
    """config.json."""
    found = prepared.calibration
    rows = None
    if found is not None:
        rows = {"rows": found.token_ids.shape[0], "cols": found.token_ids.shape[1]}
    return prepared.plan.config_json(prepared.checkpoint.config, rows)


def report_of(prepared: "Prepared", reports: Mapping[str, object]) -> bytes:
    """compression.json: how each matrix came out, and what is needed to do it again."""
    options, mass = prepared.options, prepared.mass

    def about(text: Calibration) -> dict[str, object]:
        chosen = {"rows": options.rows, "cols": options.cols, "seed": options.seed}
        hashes = {"sha256": text.sha256, "rows_sha256": text.rows_sha256}
        return {"source": text.source, **hashes, **chosen}

    found = prepared.calibration
    whole: dict[str, object] = {
        "command": _command(prepared),
        HOW: prepared.how,
        "calibration": found and about(found),
        "matrices": reports,
    }
    if mass is not None:
        whole["routing_mass"] = {"text": about(mass.text), "layers": mass.layers}
    return (json.dumps(whole, indent=1) + "\n").encode()


def _command(prepared: "Prepared") -> str:
    """What makes this result again, for whoever has the source and the recipe."""
    recipe, options = prepared.plan.recipe, prepared.options
    name = recipe.name if not Path(recipe.name).is_absolute() else Path(recipe.name).name
    words = [f"emberbox compress SRC DST --recipe {name}"]
    if recipe.budget is not None:
        words.append(f"--budget-bytes {recipe.budget.num_bytes}")
        words += [f"--sensitivity {SENSITIVITY_NAME}"] * (recipe.budget.sensitivity is not None)
    if prepared.calibration is not None or prepared.mass is not None:
        words.append(f"--rows {options.rows} --cols {options.cols} --seed {options.seed}")
        words.append(f"--device {options.device.partition(':')[0]}")
        words += ["--text TEXT"] * (options.text is not None)
    if options.group_bytes != GROUP_BYTES:
        words.append(f"--group-bytes {options.group_bytes}")
    return " ".join(words)


def files_of(prepared: "Prepared") -> dict[str, bytes | Path]:
    """What lies beside the weights."""
    folder, recipe = prepared.checkpoint.folder, prepared.plan.recipe
    files: dict[str, bytes | Path] = {
        name: folder / name for name in COPIED if (folder / name).is_file()
    }
    files["recipe.toml"] = recipe.text.encode()
    if recipe.sensitivity is not None:
        files[SENSITIVITY_NAME] = recipe.sensitivity.encode()
    if isinstance(recipe.keep, KeepMap) and recipe.keep.file and recipe.keep.text:
        files[Path(recipe.keep.file).name] = recipe.keep.text.encode()
    quantization = config_of(prepared).get("quantization_config")
    if isinstance(quantization, dict):
        whole = quantization | {"tensor_storage": prepared.plan.tensor_storage()}
        files["quantization_config.json"] = (json.dumps(whole, indent=1) + "\n").encode()
    return files


def require_same(prepared: "Prepared", folder: Path) -> None:
    """See that the finished `folder` is what `prepared` would write. Raises CheckpointError."""
    try:
        found = json.loads((folder / REPORT_NAME).read_bytes()).get(HOW)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / REPORT_NAME}: cannot be read: {error}") from error
    if found != prepared.how:
        raise CheckpointError(
            f"{folder}: is complete, and was made by another recipe, text, seed, device or "
            f"group_bytes",
            hint="give another folder, or the flags that its compression.json tells",
        )
