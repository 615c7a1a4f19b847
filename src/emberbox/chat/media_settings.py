"""The numbers of picture preprocessing, from a checkpoint's `preprocessor_config.json`.

Strict: a processor of another name, an unknown key, or a step set to something else than is done
here is refused, since a picture prepared otherwise is answered fluently and wrongly.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberbox.chat.decode_image import MAX_PIXELS
from emberbox.errors import CheckpointError

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSORS = tuple(f"Glm5NextImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))

# Keys with one value that is implemented; 3 is bicubic.
_FIXED: dict[str, tuple[object, ...]] = {
    "image_processor_type": PROCESSORS,
    "processor_class": ("Glm5NextProcessor",),
    "do_convert_rgb": (True,),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "resample": (3,),
    "patch_expand_factor": (1,),
    "default_to_square": (False,),
    "data_format": ("channels_first",),
}
_COUNTS = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "min_image_tokens",
    "max_image_tokens",
)
# Counts that sizes in memory follow from.
_BOUNDED = ("patch_size", "temporal_patch_size", "merge_size")
MAX_BOUNDED = 1024
MAX_NUMBER = 1e6
_TRIPLES = ("image_mean", "image_std")
# `size` says nothing here: the canvas follows from the token limits alone.
_IGNORED = ("size", "return_tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Defaults are the released values (architecture.md 5). Sizes in pixels, limits in tokens."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    min_image_tokens: int = 16
    max_image_tokens: int = 8000
    max_video_tokens: int = 240_000
    max_frames: int = 2048
    video_fps: float = 2.0
    max_pixels: int = MAX_PIXELS

    @classmethod
    def open(cls, folder: Path) -> "MediaSettings":
        """From the checkpoint's file, defaults when there is none. Raises CheckpointError."""
        path = Path(folder) / PREPROCESSOR_FILE
        if not path.is_file():
            return cls()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict):
                raise CheckpointError(f"{path}: expected a JSON object")
            # Inside, since naming a deeply nested value recurses too.
            return cls.from_dict(document, str(path))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from error

    @classmethod
    def from_dict(cls, document: Mapping[str, object], where: str) -> "MediaSettings":
        """Checks every key; names all that are wrong in one CheckpointError."""
        known = {*_FIXED, *_COUNTS, *_TRIPLES, *_IGNORED, "rescale_factor"}
        problems = [f"unknown key {key!r}" for key in document if key not in known]
        for key, allowed in _FIXED.items():
            if key in document and document[key] not in allowed:
                expected = " or ".join(repr(value) for value in allowed)
                problems.append(f"{key} is {document[key]!r}, expected {expected}")
        found: dict[str, object] = {}
        for key in _COUNTS:
            if key in document:
                found[key] = _count(document[key], key, problems)
        for key in _TRIPLES:
            if key in document:
                found[key] = _triple(document[key], key, problems)
        if "rescale_factor" in document:
            found["rescale_factor"] = _positive(document["rescale_factor"], problems)
        if problems:
            raise CheckpointError(f"{where}: {'; '.join(problems)}")
        return cls(**found)  # type: ignore[arg-type]  # each value was checked above

    @property
    def block_pixels(self) -> int:
        """Side of the square of pixels that one token stands for."""
        return self.patch_size * self.merge_size

    def normalised_values(self) -> NDArray[np.float32]:
        """float32 [3, 256]: what each pixel value becomes, in each channel."""
        scaled = (np.arange(256) * self.rescale_factor).astype(np.float32)
        mean = np.array(self.image_mean, dtype=np.float32)[:, None]
        std = np.array(self.image_std, dtype=np.float32)[:, None]
        return ((scaled - mean) / std).astype(np.float32)


def _count(value: object, key: str, problems: list[str]) -> int:
    is_bounded = key in _BOUNDED
    if type(value) is int and value >= 1 and not (is_bounded and value > MAX_BOUNDED):
        return value
    expected = f"from 1 to {MAX_BOUNDED}" if is_bounded else "of at least 1"
    problems.append(f"{key} is {value!r}, expected a whole number {expected}")
    return 1


def _triple(value: object, key: str, problems: list[str]) -> tuple[float, ...]:
    if isinstance(value, list) and len(value) == 3:
        numbers = [v for v in value if isinstance(v, int | float) and abs(v) <= MAX_NUMBER]
        if len(numbers) == 3 and (key != "image_std" or min(numbers) > 0):
            return tuple(float(v) for v in numbers)
    problems.append(f"{key} is {value!r}, expected three numbers")
    return ()


def _positive(value: object, problems: list[str]) -> float:
    if isinstance(value, int | float) and 0 < value <= MAX_NUMBER:
        return float(value)
    problems.append(f"rescale_factor is {value!r}, expected a number above 0")
    return 1.0
