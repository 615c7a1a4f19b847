"""What one step of the engine does, as values: the seam between the scheduler and the device.

The device executes a plan in this order: restores, the forward pass over `work`, the commit of the
accepted drafts, `saves`, then the saves that `Scheduler.commit` returns. So a snapshot number may
be restored and saved anew in one plan, and the last save of a number is the one that counts. Knows
no tensors, no text, no HTTP.
"""

from dataclasses import dataclass

MAX_DRAFTS = 7  # with the token that is certain, the eight rows a forward pass verifies at most


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's tokens of a step: those that are certain, then the drafts.

    `position` is the first token's; page i of `pages` holds tokens 64 i .. 64 i + 63, and they
    cover all of `token_ids`. `samples`: the rows of the last certain token and of every draft are
    sampled, and `Scheduler.commit` wants a result.
    """

    request_id: int
    token_ids: tuple[int, ...]
    position: int
    slot: int
    pages: tuple[int, ...]
    num_drafts: int = 0
    samples: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a snapshot into a slot before the forward pass.

    `page` is the sequence's own page for the snapshot's partly filled one; None when the snapshot's
    position is a multiple of 64.
    """

    snapshot: int
    slot: int
    page: int | None


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a slot, and the page that is partly filled there, into a snapshot after the commit."""

    snapshot: int
    slot: int
    page: int | None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that begins to run in this step, `num_cached` of its tokens from a snapshot.

    A request that was preempted is admitted again.
    """

    request_id: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `work` is oldest request first; when it is empty there is nothing to do."""

    work: tuple[Work, ...]
    restores: tuple[Restore, ...]
    saves: tuple[Save, ...]
    admitted: tuple[Admitted, ...]
    preempted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What was sampled for one Work: the accepted drafts in order, then one new token."""

    tokens: tuple[int, ...]
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much there is, fixed at start. Raises ValueError for numbers nothing can run with.

    `prefill_tokens` is for one step of all sequences together. `snapshot_every` counts tokens of
    prefill; no snapshot is shorter than `min_snapshot_tokens`.
    """

    num_pages: int
    num_slots: int
    num_snapshots: int
    prefill_tokens: int
    max_model_len: int
    snapshot_every: int = 4096
    min_snapshot_tokens: int = 64

    def __post_init__(self) -> None:
        least = dict.fromkeys(self.__slots__, 1) | {"num_snapshots": 0}
        for name, minimum in least.items():
            if (value := getattr(self, name)) < minimum:
                raise ValueError(f"{name} is {value}; at least {minimum}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as the scheduler sees it.

    `key_ids` are the token ids, but an image token carries a negative number made from its picture
    (int64), so that equal keys mean equal input. `max_tokens` bounds the reply.
    `num_suffix_tokens`: how many tokens at the prompt's end are the generation suffix; 0 = none.
    """

    request_id: int
    token_ids: tuple[int, ...]
    key_ids: tuple[int, ...]
    max_tokens: int
    num_suffix_tokens: int = 0

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if not num_tokens or len(self.key_ids) != num_tokens:
            raise ValueError(
                f"request {self.request_id} has {num_tokens} tokens and {len(self.key_ids)} keys; "
                "at least one, and as many of each"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; at least 1")
        if not 0 <= self.num_suffix_tokens <= num_tokens:
            raise ValueError(
                f"num_suffix_tokens is {self.num_suffix_tokens} of {num_tokens} prompt tokens"
            )
