"""Hidden states of one whole prompt, beside the engine: for scoring and measuring."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from emberbox.engine.runner import Features
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import CacheSize
from emberbox.model.config import PAGE_TOKENS
from emberbox.model.network import Network


@torch.inference_mode()
def hidden_states(
    network: Network,
    token_ids: Sequence[int],
    features: Features,
    *,
    chunk: int,
    latent_dtype: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Hidden states after the final norm, [n, hidden], of successive chunks.

    Allocates a cache of one sequence, which lives as long as the iterator. `features`: position
    -> embedding of an image token. `latent_dtype`: as Network.new_cache takes it.
    """
    pages = tuple(range(-(-len(token_ids) // PAGE_TOKENS)))
    cache = network.new_cache(CacheSize(num_pages=len(pages), num_slots=1), latent_dtype)
    for start in range(0, len(token_ids), chunk):
        ids = token_ids[start : start + chunk]
        here = {i - start: f for i, f in features.items() if start <= i < start + len(ids)}
        rows = SequenceRows(ids, start, 0, pages, features=here)
        yield network.forward(Batch.of([rows], network.embedding.device), cache)
