"""Small receipts of made-up models, written by the real writer; and ways to make them crooked."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from emberbox.device import Device
from emberbox.measure.metrics import Positions, position_metrics
from emberbox.measure.panel import Panel, Window
from emberbox.measure.receipt import Measured, Receipt, file_bytes, run_of, save, seal_of

VOCABULARY = 41
DOMAINS = ("prose", "code")


def small_panel(name: str = "small", windows: int = 7, tokens: int = 24, seed: int = 0) -> Panel:
    """Windows w00, w01, ... of odd lengths around `tokens`, every second one "code"."""
    chosen = torch.Generator().manual_seed(1000 + seed)
    found = []
    for index in range(windows):
        shape = (tokens + index % 3,)
        ids = torch.randint(VOCABULARY, shape, generator=chosen).tolist()
        found.append(Window(f"w{index:02d}", f"d{index}", DOMAINS[index % 2], tuple(ids)))
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    return Panel(name, tuple(found), digest)


def small_windows(panel: Panel, noise: float, seed: int = 0) -> list[tuple[str, Positions]]:
    """Positions of a candidate whose logits are the reference's with `noise` on them."""
    drawn = torch.Generator().manual_seed(7)  # the reference is the same for every candidate
    added = torch.Generator().manual_seed(seed)
    found = []
    for window in panel.windows:
        shape = (window.num_positions, VOCABULARY)
        reference = 3 * torch.randn(shape, generator=drawn)
        candidate = reference + noise * torch.randn(shape, generator=added)
        targets = torch.tensor(window.token_ids[1:])
        found.append((window.id, position_metrics(reference, candidate, targets)))
    return found


def artifact_facts(name: str, num_bytes: int = 8000) -> dict[str, object]:
    """What a receipt says of a checkpoint with two kinds of storage."""
    rest = num_bytes // 4
    return {
        "name": name,
        "map_sha256": hashlib.sha256(name.encode()).hexdigest(),
        "num_bytes": num_bytes,
        "num_tensors": 3,
        "storage": [
            {
                "part": "routed experts",
                "format": "exl3",
                "bits": round(8 * (num_bytes - rest) / 24000, 4),
                "weights": 24000,
                "bytes": num_bytes - rest,
            },
            {
                "part": "attention",
                "format": "bf16",
                "bits": round(8 * rest / 1000, 4),
                "weights": 1000,
                "bytes": rest,
            },
        ],
        "files": {"model.safetensors": hashlib.sha256(name[::-1].encode()).hexdigest()},
        "config_sha256": hashlib.sha256(b"config").hexdigest(),
        "about": {"recipe": "base2", "seed": 3},
    }


def measured(panel: Panel, windows: Sequence[tuple[str, Positions]], **changed: Any) -> Measured:
    """What a measurement of `windows` hands over, with some of it `changed`."""
    facts: dict[str, Any] = {
        "panel": panel,
        "lane": "weights",
        "command": "emberbox measure fidelity big small --panel small -o small.json",
        "reference": artifact_facts("big", 50_000),
        "candidate": artifact_facts("small"),
        "device": Device.detect("cpu").describe(),
        "op_table": {"rms_norm": "reference"},
        "settings": {"dtype": "float32", "chunk": 512},
        "runs": [run_of(windows)] * 2,
    }
    return Measured(**{**facts, **changed})


def write_receipt(
    path: Path, noise: float = 0.5, seed: int = 0, panel: Panel | None = None, **changed: Any
) -> Receipt:
    """A good receipt at `path`, its candidate named after the file; one that is there is gone."""
    panel = panel or small_panel()
    windows = small_windows(panel, noise, seed)
    name = path.name.removesuffix(".json")
    changed.setdefault("candidate", artifact_facts(name))
    return save(path, measured(panel, windows, **changed), windows, may_replace=True)


def edit(path: Path, change: Callable[[dict[str, Any]], object], *, reseal: bool = True) -> None:
    """Change the document at `path`; with a new hash of the whole, as a crook would."""
    document = json.loads(path.read_bytes())
    change(document)
    if reseal:
        document["sha256"] = seal_of(document)
    path.write_bytes(file_bytes(document))


def fix_record_hash(path: Path) -> None:
    """Make the receipt at `path` name the record that lies beside it now, whatever it is."""

    def change(document: dict[str, Any]) -> None:
        raw = path.with_name(document["record"]["file"]).read_bytes()
        document["record"]["sha256"] = hashlib.sha256(raw).hexdigest()
        document["record"]["bytes"] = len(raw)

    edit(path, change)
