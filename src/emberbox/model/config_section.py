"""Strict reading of one JSON object: typed values out, every problem noted. Knows no field.

A bad value is noted and replaced by a harmless one, so that reading goes on and all problems are
found at once. The caller refuses when `problems` is not empty: a replacement is never used.
"""

from collections.abc import Mapping, Sequence

_MISSING = object()
# A config is read before anything is known of its weights: no value of it may cost time or memory.
MAX_INTEGER = 2**21  # twice the released context, the largest size there is
MAX_NUMBER = 1e6


class Section:
    """One JSON object, called `where` in the problems noted; knows which keys were asked for."""

    def __init__(self, where: str, data: object, problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        self.known: set[str] = set()
        self.data: Mapping[str, object] = data if isinstance(data, Mapping) else {}
        # Of an object that is not there, nobody wants to read that each of its keys is missing.
        self.usable = isinstance(data, Mapping)
        if not self.usable and data is not _MISSING:
            problems.append(f"{where or 'the file'} is {data!r}, expected an object")

    def path(self, key: str) -> str:
        """`key` as a reader of the file would look for it."""
        return f"{self.where}.{key}" if self.where else key

    def has(self, key: str) -> bool:
        """Whether `key` is there; it counts as asked for either way."""
        self.known.add(key)
        return key in self.data

    def child(self, key: str) -> "Section":
        """The object under `key`."""
        return Section(self.path(key), self._find(key, None), self.problems)

    def value(self, key: str, default: object = None) -> object:
        """The value as it stands. With no default, absence is noted and gives None."""
        found = self._find(key, default)
        return None if found is _MISSING else found

    def integer(
        self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        """An integer from `minimum` to `maximum`; true and false are not integers."""
        found = self._find(key, default)
        if isinstance(found, int) and not isinstance(found, bool) and found >= minimum:
            if found <= maximum:
                return found
            self.mistyped(key, found, f"an integer of at most {maximum}")
            return minimum
        self.mistyped(key, found, f"an integer of at least {minimum}")
        return minimum

    def number(self, key: str, *, default: float | None = None, sign: int = 1) -> float:
        """A number above 0 (`sign` 1) or below 0 (`sign` -1), of at most MAX_NUMBER in size."""
        found = self._find(key, default)
        is_number = not isinstance(found, bool)
        if is_number and isinstance(found, (int, float)) and 0 < found * sign <= MAX_NUMBER:
            return float(found)
        self.mistyped(key, found, "a number above 0" if sign > 0 else "a number below 0")
        return float(sign)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """true or false."""
        found = self._find(key, default)
        if isinstance(found, bool):
            return found
        self.mistyped(key, found, "true or false")
        return False

    def array(self, key: str) -> Sequence[object]:
        """A list."""
        found = self._find(key, None)
        if isinstance(found, list):
            return found
        self.mistyped(key, found, "a list")
        return ()

    def fixed(self, values: Mapping[str, object]) -> None:
        """Each key, where present, must have exactly the value given here."""
        self.known.update(values)
        for key, only in values.items():
            found = self.data.get(key, only)
            if found != only or isinstance(found, bool) is not isinstance(only, bool):
                self.problems.append(
                    f"{self.path(key)} is {found!r}; this network computes only {only!r}"
                )

    def close(self, unused: Mapping[str, str]) -> None:
        """Note every key that nobody asked for and that `unused` does not list."""
        unknown = sorted(set(self.data) - self.known - set(unused))
        self.problems.extend(f"{self.path(key)} is unknown" for key in unknown)

    def mistyped(self, key: str, found: object, expected: str) -> None:
        """Note that `key` holds something else than `expected`; a missing key was noted already."""
        if found is not _MISSING:
            self.problems.append(f"{self.path(key)} is {found!r}, expected {expected}")

    def _find(self, key: str, default: object) -> object:
        self.known.add(key)
        if key in self.data:
            return self.data[key]
        if default is not None:
            return default
        if self.usable:
            self.problems.append(f"{self.path(key)} is missing")
        return _MISSING
