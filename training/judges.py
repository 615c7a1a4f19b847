"""Two ways to judge a case by teacher forcing: the batch graph, fast; emberbox.LLM, the product.

An answer passes when each of its tokens, the stop marker included, is the most likely one after
the prompt and the tokens before it: then greedy decoding gives exactly this answer.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from emberbox.chat.media import Patches, prepare_image, prepare_video
from emberbox.engine.llm import LLM
from emberbox.engine.request import Prompt, SamplingParams
from training.context import Rows
from training.data.cases import Case
from training.network import TrainingNetwork
from training.recipe import MAX_CHAIN
from training.shape import PAD_ID
from training.skills import Verdict

ROW_MULTIPLE = 64  # row lengths: the graph's chunks and the indexer's pools divide it
CLIP_FPS = 2.0  # both frames of a clip fall into one slice


class Judge(Protocol):
    """Says of each case whether it passes."""

    def judge(self, cases: Sequence[Case]) -> list[Verdict]: ...


class GraphJudge:
    """Many cases at once on the training graph, with drafts. `dense`: no selection."""

    def __init__(
        self, network: TrainingNetwork, *, dense: bool = False, tokens: int = 32768
    ) -> None:
        self.network, self.tokens = network, tokens
        self.device = next(iter(network.ctx.params.values())).device
        self.dense = torch.tensor(float(dense), device=self.device)

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        order = sorted(range(len(cases)), key=lambda i: len(cases[i]))
        verdicts: dict[int, Verdict] = {}
        while order:
            length = _row_length([cases[order[-1]]])
            part = order[-max(1, self.tokens // length) :]
            del order[-len(part) :]
            verdicts |= dict(zip(part, self._judge([cases[i] for i in part]), strict=True))
        return [verdicts[i] for i in range(len(cases))]

    @torch.no_grad()
    def _judge(self, cases: Sequence[Case]) -> Iterator[Verdict]:
        ids, valid = _rows(cases, _row_length(cases))
        B, T = ids.shape
        rows = Rows(B, T, valid.flatten().to(self.device), self.dense)
        trunk = self.network.trunk(ids.to(self.device), _pixels(cases, self.device), rows)
        choices = self._choices(trunk.hidden, ids)
        drafts = [
            self._choices(draft.hidden, ids)
            for draft in self.network.drafts(trunk, rows, MAX_CHAIN)
        ]
        hits = [draft[:, :-1] == choices[:, 1:] for draft in drafts]
        for row, case in enumerate(cases):
            start = len(case.prompt) - 1
            right = choices[row, start : start + len(case.answer)] == case.answer
            yield _verdict(case, right, chains=_chains([hit[row] for hit in hits], case))

    def _choices(self, hidden: Tensor, ids: Tensor) -> NDArray[np.int64]:
        choices: NDArray[np.int64] = (
            self.network.logits(hidden).argmax(-1).view(ids.shape).cpu().numpy()
        )
        return choices


def _row_length(cases: Sequence[Case]) -> int:
    return -(-max(map(len, cases)) // ROW_MULTIPLE) * ROW_MULTIPLE


def _rows(cases: Sequence[Case], length: int) -> tuple[Tensor, Tensor]:
    """ids [B, T] int64 and valid [B, T] float32."""
    ids, valid = torch.full((len(cases), length), PAD_ID), torch.zeros(len(cases), length)
    for row, case in enumerate(cases):
        whole = np.concatenate([case.prompt, case.answer])
        ids[row, : len(whole)] = torch.from_numpy(whole)
        valid[row, : len(whole)] = 1.0
    return ids, valid


def _pixels(cases: Sequence[Case], device: torch.device) -> Tensor | None:
    shown = [case.pixels for case in cases if case.pixels is not None]
    if not shown:
        return None
    if len(shown) != len(cases):
        raise ValueError("cases with and without pictures cannot share a batch")
    return torch.from_numpy(np.stack(shown)).to(device)


def _chains(hits: Sequence[NDArray[np.bool_]], case: Case) -> tuple[int, tuple[int, ...]]:
    """(places, places where the first 1, 2, 3 drafts hold) inside the answer.

    Draft d of place t is for token t + 2; a chain begun at t goes on at t + 1 and t + 2.
    """
    first = len(case.prompt) - 1
    starts = max(0, len(case.answer) - len(hits))
    whole = np.ones(starts, np.bool_)
    counts = []
    for depth, hit in enumerate(hits):
        whole = whole & hit[first + depth : first + depth + starts]
        counts.append(int(whole.sum()))
    return starts, tuple(counts)


def _verdict(
    case: Case,
    right: NDArray[np.bool_],
    chains: tuple[int, tuple[int, ...]] = (0, ()),
) -> Verdict:
    return Verdict(case.held_out, bool(right.all()), bool(right[-1]), *chains)


class LlmJudge:
    """One case at a time through the product, as a user's request runs."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        return [_verdict(case, self.choices(case) == case.answer) for case in cases]

    @torch.inference_mode()
    def choices(self, case: Case) -> NDArray[np.int64]:
        """The most likely token at each place of the answer."""
        prompt = self.prompt(case, with_answer=True)
        hidden = torch.cat(list(self.llm.hidden(prompt)))
        logits = self.llm.network.logits(hidden[len(case.prompt) - 1 :])
        choices: NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
        return choices

    def greedy(self, case: Case) -> tuple[int, ...]:
        """What is generated, at most one token more than the right answer."""
        params = SamplingParams(max_tokens=len(case.answer) + 1)
        return self.llm.complete(self.prompt(case), params).token_ids

    def prompt(self, case: Case, *, with_answer: bool = False) -> Prompt:
        """The case as the engine takes it; the answer without its last token, which is only
        asked for."""
        ids = np.concatenate([case.prompt, case.answer[:-1]]) if with_answer else case.prompt
        images = () if case.pixels is None else (self._patches(case),)
        return Prompt(tuple(ids.tolist()), images)

    def _patches(self, case: Case) -> Patches:
        assert case.pixels is not None
        frames = [Image.fromarray(frame) for frame in case.pixels]
        if case.is_clip:
            return prepare_video(frames, CLIP_FPS, self.llm.format.media)
        return prepare_image(frames[0], self.llm.format.media)
