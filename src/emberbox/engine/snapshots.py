"""Which prefixes have a snapshot on the device, and which of them goes when room is needed.

A snapshot shares the full pages of its prefix with the sequence that made it; what is partly
filled is copied into storage of its own on the device, known here by number. Prefixes are found by
the digest of their keys. Knows neither requests nor tensors.
"""

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from emberbox.engine.pages import PagePool


class PrefixKeys:
    """The keys of one growing sequence, and the digests of its prefixes.

    A digest goes on from the longest shorter prefix hashed before, so that asking for ascending
    lengths hashes every key once.
    """

    def __init__(self, key_ids: Iterable[int]) -> None:
        self._keys = array("q", key_ids)
        self._lengths = [0]  # ascending; _hashers[i] has seen the first _lengths[i] keys
        self._hashers = [blake2b(digest_size=32)]

    def extend(self, key_ids: Iterable[int]) -> None:
        """Append keys."""
        self._keys.extend(key_ids)

    def digest(self, length: int) -> bytes:
        """The digest of the first `length` keys."""
        assert 0 <= length <= len(self._keys), f"{length} of {len(self._keys)} keys"
        at = bisect_right(self._lengths, length) - 1
        if self._lengths[at] != length:
            hasher = self._hashers[at].copy()
            hasher.update(memoryview(self._keys)[self._lengths[at] : length])
            at += 1
            self._lengths.insert(at, length)
            self._hashers.insert(at, hasher)
        return self._hashers[at].digest()


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The first `position` tokens of a sequence; `pages` are the position // 64 full ones."""

    number: int
    digest: bytes
    position: int
    pages: tuple[int, ...]


class SnapshotIndex:
    """At most `num_snapshots` snapshots, least recently used first to go.

    A number is reserved when its save is planned and becomes findable by `add`, when the device
    has been told to write it: nobody restores what is not there yet. `version` changes whenever
    another answer of `find` becomes possible.
    """

    def __init__(self, num_snapshots: int, pool: PagePool) -> None:
        self.num_snapshots, self.version = num_snapshots, 0
        self._pool = pool
        self._by_digest: OrderedDict[bytes, Snapshot] = OrderedDict()  # least recently used first
        self._num_at: Counter[int] = Counter()  # position -> snapshots there
        self._numbers = list(reversed(range(num_snapshots)))

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, keys: PrefixKeys, below: int) -> Snapshot | None:
        """The longest prefix of `keys` shorter than `below` that has a snapshot; not touched."""
        best = None
        for position in sorted(p for p in self._num_at if p < below):
            best = self._by_digest.get(keys.digest(position), best)
        return best

    def touch(self, digest: bytes) -> bool:
        """Make it the most recently used one. False when there is none of this digest."""
        if digest not in self._by_digest:
            return False
        self._by_digest.move_to_end(digest)
        return True

    def reserve(self) -> int | None:
        """A number to save under, the least recently used snapshot's if need be.

        None when all numbers are reserved, or there are none.
        """
        if not self._numbers and self._by_digest:
            self.drop(next(iter(self._by_digest.values())))
        return self._numbers.pop() if self._numbers else None

    def cancel(self, number: int) -> None:
        """Give a reserved number back."""
        assert 0 <= number < self.num_snapshots
        assert number not in self._numbers, f"snapshot {number} is free"
        self._numbers.append(number)

    def add(self, snapshot: Snapshot) -> None:
        """Under a reserved number and a digest that has no snapshot. Its pages are kept."""
        assert snapshot.digest not in self._by_digest, "a prefix is saved once"
        self._pool.keep(snapshot.pages)
        self._by_digest[snapshot.digest] = snapshot
        self._num_at[snapshot.position] += 1
        self.version += 1

    def drop(self, snapshot: Snapshot) -> None:
        """Forget it, if it is still there."""
        if self._by_digest.get(snapshot.digest) is not snapshot:
            return
        del self._by_digest[snapshot.digest]
        self._num_at[snapshot.position] -= 1
        if not self._num_at[snapshot.position]:
            del self._num_at[snapshot.position]
        self._pool.drop(snapshot.pages)
        self.cancel(snapshot.number)
        self.version += 1

    def make_room(self, num_pages: int) -> bool:
        """Drop least recently used snapshots until so many pages are free, sparing the useless.

        Who holds a page holds all pages before it, so a snapshot whose last page a sequence uses
        would free nothing. False, and nothing dropped, when dropping all would not be enough.
        """
        if self._pool.num_free >= num_pages:
            return True
        if self._pool.num_available < num_pages:
            return False
        for snapshot in tuple(self._by_digest.values()):
            if snapshot.pages and not self._pool.is_used(snapshot.pages[-1]):
                self.drop(snapshot)
            if self._pool.num_free >= num_pages:
                return True
        raise AssertionError("a page that no sequence uses is neither free nor kept")

    def clear(self) -> None:
        """Drop all snapshots."""
        for snapshot in tuple(self._by_digest.values()):
            self.drop(snapshot)
