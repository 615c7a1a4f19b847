"""From logits to a token: greedy, or temperature with top-k and top-p."""

import torch
from torch import Tensor

from emberbox.engine.request import SamplingParams
from emberbox.errors import NonFiniteLogits


class Sampler:
    """Chooses the tokens of one request; its random numbers depend on the seed alone."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> int:
        """logits [vocab] -> token id. Order: temperature, top-k, top-p, draw.

        Raises NonFiniteLogits.
        """
        params = self.params
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteLogits(
                "the logits hold values that are not finite",
                hint="the checkpoint is damaged, or its config.json does not belong to it",
            )
        if params.temperature == 0.0:
            return int(logits.argmax())
        # Shifted first: a tiny temperature must not overflow.
        scaled = ((logits - logits.max()).double() / params.temperature).cpu()
        ranked, order = scaled.sort(descending=True, stable=True)
        if params.top_k:
            ranked = ranked[: params.top_k]
        shares = torch.softmax(ranked, dim=-1)
        # A token stays while those before it hold less than top_p; the first always stays.
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= params.top_p, 0.0)
        return int(order[torch.multinomial(shares, 1, generator=self.generator)])
