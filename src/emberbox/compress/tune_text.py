"""The rows a tuning run learns from, those it is judged by, and the order in which steps take them.

Text comes as for calibration, or as rows of token ids in an .npz file. Knows no network.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import torch
from torch import Tensor

from emberbox.compress.calibration import Calibration, load_calibration
from emberbox.errors import SettingsError
from emberbox.model.config import Glm5NextConfig

IDS_SUFFIX, IDS_KEY = ".npz", "token_ids"
MAX_IDS_BYTES = 256 << 20  # of the file, and of the ids in it
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


def draws(learnt: tuple[int, ...], steps: int, step_rows: int, seed: int) -> Iterator[list[int]]:
    """The rows of one step after another: all in a chance order, then all in another, and so on."""
    generator = torch.Generator().manual_seed(seed)

    def endless() -> Iterator[int]:
        while True:
            order = torch.randperm(len(learnt), generator=generator).tolist()
            yield from (learnt[i] for i in order)

    rows = endless()
    for _ in range(steps):
        yield [next(rows) for _ in range(step_rows)]


def _load_ids(path: Path, config: Glm5NextConfig, choice: RowChoice) -> Calibration:
    ids = _read(path)
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


def _read(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """int64 [rows, cols] of an .npz file, which may be anyone's."""
    try:
        if not path.is_file() and path.exists():
            raise SettingsError(f"{path}: is no file, expected an .npz file with {IDS_KEY}")
        if (size := path.stat().st_size) > MAX_IDS_BYTES:
            raise SettingsError(f"{path}: {size} bytes of rows; at most {MAX_IDS_BYTES} are taken")
        file = path.open("rb")
    except OSError as error:
        raise SettingsError(f"{path}: not readable: {error.strerror}") from error
    try:
        with file, ZipFile(file) as archive, _member(archive) as member:
            return _array(path, member)
    except SettingsError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds at damaged bytes
        said = str(error) or type(error).__name__
        raise SettingsError(
            f"{path}: expected an .npz file with {IDS_KEY}, whole numbers [rows, cols]: {said}",
            hint="write it with numpy.savez_compressed",
        ) from error


def _member(archive: ZipFile) -> IO[bytes]:
    found = archive.getinfo(f"{IDS_KEY}.npy")
    if found.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # others expand without a bound
        raise ValueError(f"compression {found.compress_type}, expected deflate or none")
    return archive.open(found)


def _array(path: Path, member: IO[bytes]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """The ids of an .npy file; what its header promises is judged before any is read."""
    version = np.lib.format.read_magic(member)
    if version != (1, 0):  # the others are for headers of structured arrays, without a bound
        raise ValueError(f"npy version {version}, expected (1, 0)")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(member)
    if len(shape) != 2 or dtype.kind not in "iu" or min(shape) < 0:
        raise SettingsError(
            f"{path}: {IDS_KEY} is {dtype} {list(shape)}, expected whole numbers [rows, cols]"
        )
    size = shape[0] * shape[1] * dtype.itemsize
    if size > MAX_IDS_BYTES:
        raise SettingsError(
            f"{path}: {IDS_KEY} is {dtype} {list(shape)}, {size} bytes; at most {MAX_IDS_BYTES} "
            f"are taken",
            hint="give fewer rows",
        )
    raw = member.read(size + 1)
    if len(raw) != size:
        raise ValueError(f"{IDS_KEY} has other bytes than the {size} of its header")
    found = np.frombuffer(raw, dtype).reshape(shape, order="F" if is_fortran else "C")
    return found.astype(np.int64, order="C")


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
