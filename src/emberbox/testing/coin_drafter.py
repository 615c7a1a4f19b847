"""A drafter that is right by a coin: drives verification through every pattern of right and wrong.

It knows the replies beforehand (from a run without drafts), so each draft is right with the given
probability and wrong otherwise. An engine must give the same reply whatever it proposes.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from emberbox.errors import SettingsError

# (request id, tokens generated so far) -> the known tokens that follow, () where none is known
Oracle = Callable[[int, int], Sequence[int]]


def oracle_of(replies: Mapping[int, Sequence[int]]) -> Oracle:
    """An oracle that knows the whole reply of each request; nothing of others."""
    return lambda request_id, num_generated: replies.get(request_id, ())[num_generated:]


class CoinDrafter:
    """Each coin depends on (seed, request, position) alone, not on the order of the calls.

    So requests in one batch and alone get the same drafts, and so does a rejected position that is
    proposed again. probability 1 is always right, 0 never.
    """

    def __init__(self, probability: float, seed: int, oracle: Oracle) -> None:
        """Raises SettingsError for a probability outside 0..1."""
        if not 0.0 <= probability <= 1.0:
            raise SettingsError(f"probability is {probability}; 0 to 1")
        self.probability, self.seed, self.oracle = probability, seed, oracle

    def propose(
        self, request_id: int, generated_so_far: Sequence[int], most: int
    ) -> tuple[int, ...]:
        """At most `most` drafts for the positions after `generated_so_far`; fewer near the end.

        A wrong draft is still a token id of the vocabulary that the right one comes from.
        """
        start = len(generated_so_far)
        known = self.oracle(request_id, start)[:most]
        return tuple(self._toss(request_id, start + i, right) for i, right in enumerate(known))

    def _toss(self, request_id: int, position: int, right: int) -> int:
        coin = Random(f"{self.seed} {request_id} {position}")
        if coin.random() < self.probability:
            return right
        return coin.randrange(right) if right else 1  # another id; below it, so surely one
