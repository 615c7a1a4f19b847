"""Every exception emberbox raises for something a user can cause. Knows no other module.

EmberboxError
├── SettingsError            a setting, flag or variable has a value we do not accept
├── EnvironmentProblem       the machine lacks something (a package, a device, memory)
│   └── MemoryRefused        model, cache and workspace do not fit; says what each takes
├── OpError                  an operation was handed tensors outside its contract
├── NonFiniteLogits          the network computed something that is not a number
├── CheckpointError          a folder of weights is not what it should be
│   ├── HeaderError          one safetensors file breaks the format
│   │   ├── TruncatedFile        shorter than its header says
│   │   ├── HeaderTooLarge       header length beyond the limit
│   │   ├── HeaderSyntax         not UTF-8 JSON of the right form
│   │   ├── DuplicateName        one name twice in one header
│   │   ├── UnknownDtype         a dtype tag the format does not define
│   │   ├── WrongSize            shape x dtype differs from the byte range
│   │   ├── OverlappingTensors   two tensors share bytes
│   │   └── UncoveredBytes       bytes that belong to no tensor
│   ├── IndexProblem         the index disagrees with the files
│   │   ├── MissingShard         listed, not on disk
│   │   └── MisplacedTensor      not in the shard the index names
│   ├── DamagedTensor        the bytes of a tensor are not those of its digest
│   ├── ConfigError          config.json is incomplete, unknown or contradictory
│   └── LoadRefused          names, shapes, dtypes or values do not fit; carries all reasons
├── MeasureError             a panel, capture, record or receipt is not what it should be
└── RequestError             a request cannot be served as asked
    └── ContextLengthError   prompt and reply exceed the context
"""

import re
from collections.abc import Iterable, Sequence

# A layer or expert number: between dots, or at the end of a name. Short, so that int() takes it.
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,8})(?=[.:])")
_MAX_LINE = 400


class EmberboxError(Exception):
    """Base of all. `hint` says what to do about it; it is part of the printed text."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class SettingsError(EmberboxError):
    """A setting has a value we do not accept."""


class EnvironmentProblem(EmberboxError):
    """The machine lacks something that was asked for."""


class MemoryRefused(EnvironmentProblem):
    """What was asked for does not fit; the text is the whole plan, the hint what to lower."""


class OpError(EmberboxError):
    """An operation was handed tensors outside its contract."""


class NonFiniteLogits(EmberboxError):
    """The network computed something that is not a number; no token may be chosen from it."""


class CheckpointError(EmberboxError):
    """A folder of weights is not what it should be."""


class HeaderError(CheckpointError):
    """One safetensors file breaks the format."""


class TruncatedFile(HeaderError):
    """The file is shorter than its header says."""


class HeaderTooLarge(HeaderError):
    """The header length exceeds the limit."""


class HeaderSyntax(HeaderError):
    """The header is not UTF-8 JSON of the right form."""


class DuplicateName(HeaderError):
    """One tensor name stands twice in a header, or in two files of one folder."""


class UnknownDtype(HeaderError):
    """The dtype tag is not one the format defines."""


class WrongSize(HeaderError):
    """Shape times dtype differs from the byte range."""


class OverlappingTensors(HeaderError):
    """Two tensors share bytes."""


class UncoveredBytes(HeaderError):
    """Some bytes of the data section belong to no tensor."""


class IndexProblem(CheckpointError):
    """The index file disagrees with the files on disk."""


class MissingShard(IndexProblem):
    """The index lists a file that is not there."""


class MisplacedTensor(IndexProblem):
    """A tensor is not in the shard the index names."""


class DamagedTensor(CheckpointError):
    """The bytes of a tensor are not those whose digest the folder records."""


class ConfigError(CheckpointError):
    """config.json is incomplete, has unknown keys, or contradicts itself."""


class LoadRefused(CheckpointError):
    """Tensors do not fit the network.

    `reasons` holds every reason, none is left out. The printed text says them all too, but gathers
    those that differ only in the numbers inside tensor names, and is cut after MAX_LINES lines.
    """

    MAX_LINES = 60

    def __init__(self, where: str, reasons: Sequence[str], *, hint: str = "") -> None:
        self.reasons = tuple(reasons)
        lines = _gathered(self.reasons)
        rest = len(lines) - self.MAX_LINES
        lines = lines[: self.MAX_LINES] + ([f"and {rest} more lines (see .reasons)"] * (rest > 0))
        text = "\n".join(f"  - {line}" for line in lines)
        super().__init__(f"{where}: {len(self.reasons)} reason(s) not to load\n{text}", hint=hint)


class MeasureError(EmberboxError):
    """A measurement cannot be made, trusted or compared: panel, artifacts, record or receipt."""


class RequestError(EmberboxError):
    """A request cannot be served as asked. `param` names the field at fault, if one is."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and reply together exceed the context; both numbers are in the text."""

    code = "context_length_exceeded"


def _gathered(reasons: Sequence[str]) -> list[str]:
    """Reasons alike but for numbers in tensor names as one line: "experts.{0..3,7}.up: missing".

    A line stands for exactly the product of its sets, and says how many reasons that is.
    """
    alike: dict[str, set[tuple[frozenset[int], ...]]] = {}
    for reason in reasons:
        numbers = tuple(frozenset([int(number)]) for number in _NUMBER.findall(reason))
        alike.setdefault(_NUMBER.sub("\0", reason), set()).add(numbers)
    lines = []
    for template, rows in alike.items():
        ordered = sorted(_merged(rows), key=lambda row: [min(numbers) for numbers in row])
        lines += [_line(template, row) for row in ordered]
    return lines


def _merged(rows: set[tuple[frozenset[int], ...]]) -> set[tuple[frozenset[int], ...]]:
    """The same rows of numbers as products of sets, joined at the last place first."""
    num_places = max(map(len, rows))
    for place in reversed(range(num_places)):
        joined: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
        for row in rows:
            others = row[:place] + row[place + 1 :]
            joined[others] = joined.get(others, frozenset()) | row[place]
        rows = {(*others[:place], both, *others[place:]) for others, both in joined.items()}
    return rows


def _line(template: str, row: tuple[frozenset[int], ...]) -> str:
    texts = [_ranges(numbers) for numbers in row]
    count = 1
    for numbers in row:
        count *= len(numbers)
    pieces = template.split("\0")
    text = pieces[0] + "".join(a + b for a, b in zip(texts, pieces[1:], strict=False))
    text = text if len(text) <= _MAX_LINE else text[:_MAX_LINE] + " ..."
    return f"{text} ({count} of these)" if count > 1 else text


def _ranges(numbers: Iterable[int]) -> str:
    """{3} as "3", {0, 1, 2, 7} as "{0..2,7}"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}..{b}" for a, b in runs]
    return texts[0] if texts == [str(runs[0][0])] else "{" + ",".join(texts) + "}"
