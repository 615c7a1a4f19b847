"""Read many tensors through one buffer while those read before are still hashed.

sha256 of one core is slower than a good disk. With b bytes of weights and h bytes hashed per second
and core, n threads need b / (n h), beside the reading and not after it; a load takes the longer of
the two. Knows no torch.
"""

import hashlib
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from emberbox.errors import DamagedTensor
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.checkpoint import Checkpoint
from emberbox.store.digests import require_same
from emberbox.store.safetensors_header import TensorInfo

MAX_THREADS = 4
# Room for tensors that are being hashed, where the largest tensor takes less.
RING_BYTES = 64 << 20
# Hashing less costs about what handing it to a thread does.
INLINE_BYTES = 64 << 10
ALIGNMENT = 64  # of a tensor in the buffer, for whoever views it as its dtype


def ring_bytes(sizes: list[int]) -> int:
    """Of a buffer for tensors of these sizes: it holds the largest, and some that are hashed."""
    rounded = [_rounded(size) for size in sizes]
    return max([*rounded, min(sum(rounded), RING_BYTES)], default=0)


@dataclass(frozen=True, slots=True)
class _Hashing:
    info: TensorInfo
    start: int  # of its bytes in the buffer
    stop: int
    sha256: Future[str]


class VerifiedReader:
    """Context manager. Leaving it raises DamagedTensor that names every tensor whose bytes are not
    those of its digest, also in place of what the damaged values have caused meanwhile.
    """

    def __init__(self, checkpoint: Checkpoint, buffer: Buffer) -> None:
        """`buffer` has room for every tensor that will be read: see `ring_bytes`."""
        self._checkpoint = checkpoint
        self._view = byte_view(buffer)
        self._digests: Mapping[str, str] = checkpoint.digests
        self._position = 0
        self._hashing: deque[_Hashing] = deque()
        self._damaged: list[DamagedTensor] = []
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    def __enter__(self) -> "VerifiedReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._hashing:
            self._take_oldest()
        self._threads.shutdown()
        is_ended = error is not None and not isinstance(error, Exception)
        if self._damaged and not is_ended:
            raise _all_of(self._damaged)

    def read(self, info: TensorInfo) -> int:
        """Where in the buffer the bytes of `info` begin; they stay there until the next call.

        Raises as `Checkpoint.read_into`, but for damage, which is told at the end.
        """
        if self._position + info.num_bytes > len(self._view):
            self._position = 0
        start, stop = self._position, self._position + info.num_bytes
        while any(one.start < stop and start < one.stop for one in self._hashing):
            self._take_oldest()
        data = self._view[start:stop]
        self._checkpoint.read_as_it_is(info, data)
        self._position = _rounded(stop)
        if info.name not in self._digests:
            return start
        if info.num_bytes <= INLINE_BYTES:
            self._compare(info, _sha256(data))
        else:
            found = self._threads.submit(_sha256, data)
            self._hashing.append(_Hashing(info, start, stop, found))
        return start

    def _take_oldest(self) -> None:
        one = self._hashing.popleft()
        self._compare(one.info, one.sha256.result())

    def _compare(self, info: TensorInfo, sha256: str) -> None:
        try:
            require_same(info, self._digests[info.name], sha256)
        except DamagedTensor as damaged:
            self._damaged.append(damaged)


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _all_of(damaged: list[DamagedTensor]) -> DamagedTensor:
    if len(damaged) == 1:
        return damaged[0]
    lines = "".join(f"\n  - {one.message}" for one in damaged)
    return DamagedTensor(f"{len(damaged)} tensors are damaged:{lines}", hint=damaged[0].hint)
