"""Who holds which page of the cache. Knows numbers only: no contents, no sequences.

A page is used by running sequences and kept by snapshots, each any number of times; it is free
when neither holds it. The two are counted apart because what only snapshots keep can be had
without taking anything from a running sequence.
"""

from collections.abc import Iterable


class PagePool:
    """Pages 0 .. num_pages - 1, all free at first.

    Giving up what is not held, or holding a page that is free, is an AssertionError: a bug of ours.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))  # a stack; low numbers leave first
        self._num_users = [0] * num_pages
        self._num_keepers = [0] * num_pages
        self._num_used = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that no sequence uses: free ones, and those that dropping snapshots would free."""
        return self.num_pages - self._num_used

    def is_used(self, page: int) -> bool:
        """Whether a sequence uses it."""
        return self._num_users[page] > 0

    def take(self, num_pages: int) -> tuple[int, ...]:
        """That many free pages, each used once from now on."""
        assert 0 <= num_pages <= len(self._free), f"{num_pages} of {len(self._free)} free pages"
        taken = tuple(self._free.pop() for _ in range(num_pages))
        for page in taken:
            self._num_users[page] = 1
        self._num_used += num_pages
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more sequence uses each of these pages, which are not free."""
        for page in pages:
            assert self._num_users[page] + self._num_keepers[page], f"page {page} is free"
            self._num_used += self._num_users[page] == 0
            self._num_users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence less uses each of these pages."""
        for page in pages:
            assert self._num_users[page], f"no sequence uses page {page}"
            self._num_users[page] -= 1
            if not self._num_users[page]:
                self._num_used -= 1
                if not self._num_keepers[page]:
                    self._free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """One more snapshot keeps each of these pages, which are not free."""
        for page in pages:
            assert self._num_users[page] + self._num_keepers[page], f"page {page} is free"
            self._num_keepers[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One snapshot less keeps each of these pages."""
        for page in pages:
            assert self._num_keepers[page], f"no snapshot keeps page {page}"
            self._num_keepers[page] -= 1
            if not self._num_keepers[page] and not self._num_users[page]:
                self._free.append(page)
