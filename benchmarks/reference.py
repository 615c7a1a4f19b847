"""transformers on the same checkpoint: what the engine is compared with."""

import time
from pathlib import Path

import torch


class Reference:
    """Greedy `generate` with its cache, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import Glm5NextForConditionalGeneration as Model

        self.model = Model.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens of the reply and when each came."""
        streamer = _Times()
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            streamer=streamer,
        )
        return out[0, len(prompt) :].tolist(), streamer.times[1:]  # the first is the prompt's


class _Times:
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
