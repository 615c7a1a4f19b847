"""Micro-batches from worker processes, in an order that depends on the seed alone.

Batch number i is a function of (seed, i). Worker w of n makes numbers w, w + n, ...; they are
handed out in turn, so that neither the number of workers nor their speed changes what is trained,
and a run can go on from any number.
"""

import multiprocessing as mp
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.recipe import Bucket

Arrays: TypeAlias = tuple[NDArray[np.int16], NDArray[np.float16], NDArray[np.uint8] | None]
Make: TypeAlias = Callable[[int, Bucket], Arrays]  # (seed of the batch, bucket) -> arrays
Item: TypeAlias = tuple[int, tuple[Tensor, Tensor, Tensor | None]]  # bucket index, tensors
AHEAD = 4  # finished batches that wait per worker


def make_item(make: Make, buckets: Sequence[Bucket], seed: int, number: int) -> tuple[int, Arrays]:
    """Batch `number` of the run with `seed`: its bucket by share, then its content."""
    rng = np.random.default_rng([seed, number])
    shares = np.array([bucket.share for bucket in buckets])
    index = int(rng.choice(len(buckets), p=shares / shares.sum()))
    return index, make(int(rng.integers(2**62)), buckets[index])


def as_tensors(arrays: Arrays, *, pin: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids int16, weights float16, pixels uint8 or None) as tensors, page-locked with `pin`."""
    ids, weights, pixels = (None if a is None else torch.from_numpy(a) for a in arrays)
    if ids is None or weights is None:
        raise ValueError("a batch came without ids or weights")
    if not pin:
        return ids, weights, pixels
    return ids.pin_memory(), weights.pin_memory(), None if pixels is None else pixels.pin_memory()


class InlineFeed:
    """The same batches, made when asked for."""

    def __init__(self, make: Make, buckets: Sequence[Bucket], seed: int, first: int) -> None:
        self.make, self.buckets, self.seed, self.number = make, buckets, seed, first

    def next(self) -> Item:
        index, arrays = make_item(self.make, self.buckets, self.seed, self.number)
        self.number += 1
        return index, as_tensors(arrays, pin=False)

    def close(self) -> None:
        """Nothing to stop."""


class WorkerFeed:
    """Batches made ahead by forked processes and pinned by a thread.

    Fork before the device is touched; `pin` afterwards, once.
    """

    def __init__(
        self, make: Make, buckets: Sequence[Bucket], seed: int, first: int, *, num_workers: int
    ) -> None:
        context = mp.get_context("fork")  # workers share what `make` holds
        self._queues = [context.Queue(AHEAD) for _ in range(num_workers)]
        self._workers = [
            context.Process(
                target=_work,
                args=(make, buckets, seed, range(first + w, 2**62, num_workers), self._queues[w]),
                daemon=True,
            )
            for w in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._ready: queue.Queue[Item] = queue.Queue(12)
        self._thread: threading.Thread | None = None

    def next(self) -> Item:
        if self._thread is None:
            self._thread = threading.Thread(target=self._pin, daemon=True)
            self._thread.start()
        return self._ready.get(timeout=300)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _pin(self) -> None:
        pin = torch.cuda.is_available()  # page-locked memory is the driver's; tests have none
        while True:
            for each in self._queues:
                index, arrays = each.get()
                self._ready.put((index, as_tensors(arrays, pin=pin)))


def _work(
    make: Make,
    buckets: Sequence[Bucket],
    seed: int,
    numbers: range,
    out: "mp.Queue[tuple[int, Arrays]]",
) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        out.put(make_item(make, buckets, seed, number))
