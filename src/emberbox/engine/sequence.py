"""The scheduler's own record of one request, changed by the scheduler alone. Knows no tensors."""

from collections import deque
from dataclasses import dataclass

from emberbox.engine.plan import Arrival, Limits, Save
from emberbox.engine.snapshots import PrefixKeys, Snapshot
from emberbox.model.config import PAGE_TOKENS


def num_pages_of(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class Sequence:
    """Known tokens, and how many of them are computed.

    Between steps it holds the pages of what is computed, and at most one more: never more than its
    known tokens need. `named_points` are the positions of its prompt that get a snapshot: before
    the generation suffix, and the end.
    """

    def __init__(self, arrival: Arrival) -> None:
        self.request_id, self.num_prompt = arrival.request_id, len(arrival.token_ids)
        self.tokens, self.keys = list(arrival.token_ids), PrefixKeys(arrival.key_ids)
        self.num_most = self.num_prompt + arrival.max_tokens
        self.named_points = (self.num_prompt - arrival.num_suffix_tokens, self.num_prompt)
        self.periodic: deque[Snapshot] = deque()  # the newest it saved; some may be gone
        self.was_preempted = False
        self.stop()

    def stop(self) -> None:
        """From now on it holds nothing, and nothing of it is computed."""
        self.is_running, self.slot, self.num_computed = False, -1, 0
        self.pages: tuple[int, ...] = ()
        self.found: Snapshot | None = None  # its best snapshot at that version of the index
        self.found_version = -1

    @property
    def is_decoding(self) -> bool:
        """Only the token sampled last is not computed. A prompt's last token is still prefill."""
        return self.num_computed == len(self.tokens) - 1 >= self.num_prompt

    def extend(self, token_ids: tuple[int, ...]) -> None:
        """Append tokens that were sampled."""
        self.tokens.extend(token_ids)
        self.keys.extend(token_ids)

    def next_stop(self, limits: Limits) -> int:
        """Where its next chunk of prefill has to end: a snapshot point, or the known tokens."""
        least = max(self.num_computed + 1, limits.min_snapshot_tokens)
        end, every = len(self.tokens), limits.snapshot_every
        if not limits.num_snapshots:
            return end
        points = (*self.named_points, -(-least // every) * every)
        return min((point for point in points if least <= point <= end), default=end)

    def partial_page(self, position: int) -> int | None:
        """The page that its first `position` tokens fill partly, if they do."""
        return self.pages[position // PAGE_TOKENS] if position % PAGE_TOKENS else None


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A snapshot to be: the number is reserved, nobody can find it yet."""

    sequence: Sequence
    number: int
    digest: bytes
    position: int
    is_periodic: bool

    def save(self) -> Save:
        """The copy that makes it, while the sequence runs."""
        page = self.sequence.partial_page(self.position)
        return Save(self.number, self.sequence.slot, page)
