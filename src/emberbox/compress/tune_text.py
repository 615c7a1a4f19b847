"""The rows a tuning run learns from, those it is judged by, and the order in which steps take them.

Text comes as for calibration, or as rows of token ids in an .npz file. Knows no network.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from emberbox.compress.calibration import Calibration, load_calibration
from emberbox.errors import SettingsError
from emberbox.model.config import Glm5NextConfig

IDS_SUFFIX, IDS_KEY = ".npz", "token_ids"
MAX_IDS_BYTES = 256 << 20
# One row in eight is held out, but no more than an evaluation in the time of a few steps takes.
HELD_SHARE, HELD_STEPS, MAX_HELD = 8, 4, 64


@dataclass(frozen=True, slots=True)
class TuningText:
    """token_ids of `text` [rows, cols]: the rows `held` are never learnt from."""

    text: Calibration
    held: tuple[int, ...]
    every: int  # of so many rows the last is held

    @property
    def learnt(self) -> tuple[int, ...]:
        """All other rows."""
        held = set(self.held)
        return tuple(i for i in range(len(self.text.token_ids)) if i not in held)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """At most `rows` rows of `cols` tokens, chosen by `seed`."""

    rows: int
    cols: int
    seed: int


def load_text(
    folder: Path, config: Glm5NextConfig, source: Path | None, choice: RowChoice, step_rows: int
) -> TuningText:
    """Rows and which of them are held out: every n-th, so that both are spread over the text.

    folder: of tokenizer and chat template. source: what `load_calibration` takes, or an .npz file
    with token_ids, whole numbers [rows, cols]. Raises SettingsError, CheckpointError.
    """
    if source is not None and Path(source).suffix == IDS_SUFFIX:
        text = _load_ids(Path(source), config, choice)
    else:
        text = load_calibration(folder, source, choice.rows, choice.cols, choice.seed)
    found = len(text.token_ids)
    if found < 2:
        raise SettingsError(
            f"{text.source}: {found} row of {choice.cols} tokens; one to learn from and one to be "
            f"judged by are needed",
            hint="give more text, more rows, or shorter ones",
        )
    num_held = max(1, min(found // HELD_SHARE, HELD_STEPS * step_rows, MAX_HELD))
    every = found // num_held
    return TuningText(text, tuple(every * (i + 1) - 1 for i in range(num_held)), every)


def draws(learnt: tuple[int, ...], steps: int, step_rows: int, seed: int) -> list[list[int]]:
    """The rows of each step: all in a chance order, then all in another, and so on."""
    generator = torch.Generator().manual_seed(seed)

    def endless() -> Iterator[int]:
        while True:
            order = torch.randperm(len(learnt), generator=generator).tolist()
            yield from (learnt[i] for i in order)

    rows = endless()
    return [[next(rows) for _ in range(step_rows)] for _ in range(steps)]


def _load_ids(path: Path, config: Glm5NextConfig, choice: RowChoice) -> Calibration:
    ids = _array(path, _read(path))
    per_row = ids.shape[1] // choice.cols
    if not per_row or not len(ids):
        raise SettingsError(
            f"{path}: {IDS_KEY} is {list(ids.shape)}; one row needs {choice.cols} tokens",
            hint="give shorter rows",
        )
    pieces = torch.from_numpy(ids[:, : per_row * choice.cols].reshape(-1, choice.cols))
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(choice.seed))
    chosen = pieces[order[: choice.rows].sort().values].contiguous()
    _check_ids(path, torch.from_numpy(ids), config)
    # Of the ids: an archive of the same rows has other bytes under another zlib.
    narrow = ids.astype("<u2" if config.text.vocab_size <= 1 << 16 else "<u4")
    digest = hashlib.sha256(narrow.tobytes()).hexdigest()
    return Calibration(chosen, path.resolve().name, digest)


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_IDS_BYTES:
            raise SettingsError(f"{path}: {size} bytes of rows; at most {MAX_IDS_BYTES} are taken")
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: not readable: {error.strerror}") from error


def _array(path: Path, raw: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """int64 [rows, cols] from the bytes of an .npz file."""
    try:
        with np.load(BytesIO(raw), allow_pickle=False) as file:
            found = file[IDS_KEY]
    except (BadZipFile, KeyError, OSError, ValueError) as error:
        raise SettingsError(f"{path}: expected an .npz file with {IDS_KEY}: {error}") from error
    if found.ndim != 2 or found.dtype.kind not in "iu":
        raise SettingsError(
            f"{path}: {IDS_KEY} is {found.dtype} {list(found.shape)}, expected whole numbers "
            f"[rows, cols]"
        )
    return np.asarray(found, dtype=np.int64)


def _check_ids(path: Path, ids: Tensor, config: Glm5NextConfig) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.text.vocab_size:
        raise SettingsError(
            f"{path}: token {low if low < 0 else high}; the vocabulary has "
            f"{config.text.vocab_size}",
            hint="the rows were made with another tokenizer",
        )
    media = torch.tensor([config.image_token_id, config.video_token_id])
    if bool(torch.isin(ids, media).any()):
        raise SettingsError(f"{path}: holds a token that stands for a picture; tuning takes text")


def warm_up_and_cosine(step: int, steps: int, warm_up: int) -> float:
    """The share of the learning rate at `step` of `steps`."""
    warm = min(warm_up, max(1, steps // 5))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
