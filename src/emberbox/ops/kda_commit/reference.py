"""The KDA state after accepted tokens, in plain torch."""

from torch import Tensor


def kda_commit(k: Tensor, deltas: Tensor, gate: Tensor, state: Tensor) -> Tensor:
    for t in range(k.shape[0]):
        state = state * gate[t].exp().unsqueeze(-1)
        state = state + k[t].unsqueeze(-1) * deltas[t].unsqueeze(-2)
    return state
