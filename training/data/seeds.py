"""Random streams that cannot meet: every stream is named by what it is for.

A seed is the hash of a purpose and labels, so training, evaluation, calibration and panels never
share one, whatever the numbers.
"""

import hashlib
import random
from enum import StrEnum


class Purpose(StrEnum):
    """What data is made for. The value is part of every seed; never change one."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    CALIBRATION = "calibration"
    PANEL = "panel"
    TOKENIZER = "tokenizer"
    TUNING = "tuning"


def stream(purpose: Purpose, *labels: str | int) -> random.Random:
    """A generator that depends on the purpose and all labels, and on nothing else."""
    text = "\x1f".join((purpose.value, *map(str, labels)))
    digest = hashlib.sha256(text.encode()).digest()
    return random.Random(int.from_bytes(digest, "big"))
