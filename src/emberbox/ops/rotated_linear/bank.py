"""Prepared EXL3 weights that are multiplied side by side, and the launches that this takes."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.moe_experts.bank import kind_of
from emberbox.ops.prepared import PREPARED, prepared

MAX_MATRICES = 4  # of one launch
NEVER = (1 << 31) - 1
NO_MATRIX = (None, None, NEVER, 0, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """Matrices of one kind. args: words, svh, first output group of the launch, number among the
    bank's, first column of the result; for each of MAX_MATRICES, NO_MATRIX where there is none."""

    kind: int
    args: tuple[object, ...]
    output_groups: int


class LinearBank(tuple[QuantTensor, ...]):
    """Weights [N_i, I], all prepared, in whole Hadamard blocks and on one device; a tuple to a
    reference. Kinds and N_i may differ."""

    @property
    def inputs(self) -> int:
        """I."""
        return self[0].shape[1]

    @cached_property
    def outputs(self) -> int:
        """Sum of N_i."""
        return sum(weight.shape[0] for weight in self)

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """One for up to MAX_MATRICES of each kind."""
        by_kind: dict[int, list[int]] = {}
        for number, weight in enumerate(self):
            by_kind.setdefault(kind_of(weight), []).append(number)
        return tuple(
            self._launch(kind, numbers[at : at + MAX_MATRICES])
            for kind, numbers in by_kind.items()
            for at in range(0, len(numbers), MAX_MATRICES)
        )

    def _launch(self, kind: int, numbers: list[int]) -> Launch:
        args: list[object] = []
        groups = 0
        for number in numbers:
            parts = self[number].parts
            column = sum(weight.shape[0] for weight in self[:number])
            args += [parts["words"], parts["svh"], groups, number, column]
            groups += self[number].shape[0] // exl3.BLOCK
        missing = MAX_MATRICES - len(numbers)
        return Launch(kind, (*args, *(NO_MATRIX * missing)), groups)


def bank_of(weights: tuple[Tensor | QuantTensor, ...]) -> tuple[Tensor | QuantTensor, ...]:
    """A LinearBank of EXL3 weights of one width, in whole Hadamard blocks; others as they are."""
    if isinstance(weights, LinearBank):
        return weights
    found = [w for w in weights if isinstance(w, QuantTensor) and _is_whole(w)]
    if len(found) < len(weights) or len({w.shape[1] for w in found}) != 1:
        return weights
    bank = LinearBank(prepared(weight) for weight in found)
    bank.launches  # noqa: B018  now: a step has better things to do
    return bank


def _is_whole(weight: QuantTensor) -> bool:
    is_exl3 = weight.format in (exl3.FORMAT, PREPARED)
    return is_exl3 and not any(size % exl3.BLOCK for size in weight.shape)
