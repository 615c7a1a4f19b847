"""A run on disk: parameters, optimiser, and where it stands. Files stay under 16 MB.

`weights-*.safetensors` alone are enough for an export or for a new stage; `optimiser-*.safetensors`
are what makes a resumed run equal to an uninterrupted one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.optim import Optimiser

MAX_FILE_BYTES = 15_500_000
PROGRESS = "progress.json"


@dataclass(slots=True)
class Progress:
    """Counts of the whole run, and seconds and steps within its present stage."""

    seed: int = 0
    step: int = 0
    micro_batches: int = 0  # also the number of the next batch
    tokens: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def next_stage(self) -> None:
        self.stage, self.stage_step, self.stage_seconds = self.stage + 1, 0, 0.0


def save_run(folder: Path, optimiser: Optimiser, progress: Progress) -> None:
    """Write everything; the progress last, and only when the rest is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    _save(folder, "weights", optimiser.params)
    pieces = {
        f"{name}.{i}": piece
        for name, tensor in optimiser.state().items()
        for i, piece in enumerate(torch.split(tensor.flatten(), MAX_FILE_BYTES // 8))
    }
    _save(folder, "optimiser", pieces)
    temporary = folder / f".{PROGRESS}"
    temporary.write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / PROGRESS)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Parameters under the names of parameters.py, float32 on the CPU."""
    return _load(folder, "weights")


def load_progress(folder: Path) -> Progress:
    return Progress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))


def load_optimiser(folder: Path, optimiser: Optimiser) -> None:
    """Fill the optimiser's state. Raises FileNotFoundError if only weights were kept."""
    pieces = _load(folder, "optimiser")
    with torch.no_grad():
        for name, tensor in optimiser.state().items():
            count = sum(key.rpartition(".")[0] == name for key in pieces)
            whole = torch.cat([pieces[f"{name}.{i}"] for i in range(count)])
            tensor.copy_(whole.view(tensor.shape))


def _save(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > MAX_FILE_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"{kind}-{index}.safetensors")


def _load(folder: Path, kind: str) -> dict[str, Tensor]:
    files = sorted(folder.glob(f"{kind}-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no {kind}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
