"""Two tiny models that differ a little, and a small panel for them."""

import json
import random
from pathlib import Path

import torch
from torch import Tensor

from emberbox.measure.panel import SCHEMA, Panel, load_panel
from emberbox.model.config import Glm5NextConfig
from tests.helpers.tiny import tiny_config, tiny_tensors, write_folder

LENGTHS = (2, 67, 130)  # tokens of a window: the shortest, more than a page, more than two


def pair_tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors calm enough for figures of ordinary size, and the same with 5 % noise."""
    random_ones = tiny_tensors(Glm5NextConfig.from_dict(tiny_config()))
    one = {n: (t * 0.3 if t.dim() > 1 else t).to(t.dtype) for n, t in random_ones.items()}
    generator = torch.Generator().manual_seed(1)

    def noisy(tensor: Tensor) -> Tensor:
        factors = 1 + 0.05 * torch.randn(tensor.shape, generator=generator)
        return (tensor.float() * factors).to(tensor.dtype)

    return one, {name: noisy(tensor) for name, tensor in one.items()}


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Folders "reference" and "candidate"."""
    one, other = pair_tensors()
    return (
        write_folder(folder / "reference", tiny_config(), one),
        write_folder(folder / "candidate", tiny_config(), other),
    )


def panel_document(lengths=LENGTHS, seed: int = 0, **changes) -> dict[str, object]:
    r = random.Random(seed)
    windows = [
        {
            "id": f"w{number}",
            "document": f"d{number}",
            "domain": "noise" if number % 2 else "words",
            "token_ids": [r.randrange(80) for _ in range(length)],
        }
        for number, length in enumerate(lengths)
    ]
    return {"schema": SCHEMA, "name": "tiny", "windows": windows} | changes


def write_panel(folder: Path, **changes) -> Path:
    path = folder / "panel.json"
    path.write_text(json.dumps(panel_document(**changes)))
    return path


def tiny_panel(folder: Path, **changes) -> Panel:
    return load_panel(write_panel(folder, **changes))
