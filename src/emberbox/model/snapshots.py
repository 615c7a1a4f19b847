"""Copies of what one sequence leaves in a Cache, so that another can go on from the same point.

A snapshot holds KDA state, convolution inputs and the ring of one slot, and the rows of the one
page that is partly filled. Full pages never change and are shared by number: whoever keeps the
snapshot keeps them. All is allocated at construction and nothing grows. Knows no tokens and no
policy of what is worth keeping.
"""

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.model.cache import Cache


class SnapshotStore:
    """Room for `num` snapshots of sequences in `cache`, on its device, in its types.

    Copies are queued like any other work of the device: a snapshot may be restored by whatever is
    queued after its save.
    """

    def __init__(self, cache: Cache, num: int) -> None:
        if num < 0:
            raise OpError(f"snapshots: {num} of them")
        self.cache, self.num = cache, num
        # Each tensor of the cache [layers, slots or pages, ...] and its copies [layers, num, ...].
        self._slot_copies = tuple((tensor, _room(tensor, num)) for tensor in cache.of_slots)
        self._page_copies = tuple((tensor, _room(tensor, num)) for tensor in cache.of_pages)
        self._has_page: list[bool | None] = [None] * num  # None: never saved

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, all of them at construction."""
        copies = (copy for _, copy in self._slot_copies + self._page_copies)
        return sum(copy.numel() * copy.element_size() for copy in copies)

    def save(self, index: int, slot: int, page: int | None) -> None:
        """Copy a slot and its partly filled page (None: every page is full) into snapshot `index`.

        Raises OpError, changing nothing, for a number out of range or a slot that still has tokens
        under verification.
        """
        self._check(index, slot, page)
        for tensor, copy in self._slot_copies:
            copy[:, index] = tensor[:, slot]
        if page is not None:
            for tensor, copy in self._page_copies:
                copy[:, index] = tensor[:, page]
        self._has_page[index] = page is not None

    def restore(self, index: int, slot: int, page: int | None) -> None:
        """Copy snapshot `index` into a slot and a page; the page must be the sequence's own.

        Raises OpError, changing nothing, as `save` does, for a snapshot that was never saved, and
        when a page is named though none was saved, or the other way round.
        """
        self._check(index, slot, page)
        if self._has_page[index] is None:
            raise OpError(f"snapshots: {index} was never saved")
        if self._has_page[index] is not (page is not None):
            held = "one page" if self._has_page[index] else "no page"
            raise OpError(f"snapshots: {index} holds {held}, page {page} is to be restored")
        for tensor, copy in self._slot_copies:
            tensor[:, slot] = copy[:, index]
        if page is not None:
            for tensor, copy in self._page_copies:
                tensor[:, page] = copy[:, index]

    def _check(self, index: int, slot: int, page: int | None) -> None:
        num_slots, num_pages = self.cache.state.shape[1], self.cache.latents.shape[1]
        if not 0 <= index < self.num:
            raise OpError(f"snapshots: {index} of {self.num}")
        if not 0 <= slot < num_slots:
            raise OpError(f"snapshots: slot {slot} of {num_slots}")
        if page is not None and not 0 <= page < num_pages:
            raise OpError(f"snapshots: page {page} of {num_pages}")
        # Between a pass and its commit the slot is neither before the tokens nor after them.
        if self.cache.is_waiting(slot):
            raise OpError(f"snapshots: slot {slot} has tokens under verification; commit first")


def _room(tensor: Tensor, num: int) -> Tensor:
    shape = (tensor.shape[0], num, *tensor.shape[2:])
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
