"""A tensor as a file's header shows it, for tests of formats."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]
