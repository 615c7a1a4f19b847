"""What teacher forcing says of the shipped model is what greedy decoding does, here and in
transformers."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers.nano import NANO, nano_llm
from training.data.cases import CaseMaker
from training.data.text import TOKENIZER, held_out
from training.judges import LlmJudge

LONGEST = 160  # tokens of prompt and answer
SKILLS = ("facts", "lists", "echo", "sums", "vision_colour", "video_direction")
PER_SKILL = 4


@pytest.fixture(scope="module")
def judge():
    return LlmJudge(nano_llm())


@pytest.fixture(scope="module")
def maker():
    tokens = Tokenizer.from_file(str(TOKENIZER))
    return CaseMaker(tokens, held_out(tokens))


def cases_of(maker, name, count=PER_SKILL):
    made = (maker.case(name, i) for i in range(200))
    return [case for case in made if len(case) < LONGEST][:count]


def wrong(case):
    """The case with another token asked for at the middle of its answer."""
    answer = case.answer.copy()
    answer[len(answer) // 2] += 1
    return replace(case, answer=answer)


@pytest.mark.parametrize("name", SKILLS)
def test_an_answer_passes_exactly_when_greedy_decoding_gives_it(name, maker, judge):
    cases = cases_of(maker, name)
    cases += [wrong(case) for case in cases[:2]]
    for case, verdict in zip(cases, judge.judge(cases), strict=True):
        told = judge.greedy(case)[: len(case.answer)]
        assert verdict.passed == (told == tuple(case.answer.tolist()))


def test_among_them_some_pass_and_some_fail(maker, judge):
    cases = [case for name in SKILLS for case in cases_of(maker, name, 2)]
    assert any(verdict.passed for verdict in judge.judge(cases))
    assert not any(verdict.passed for verdict in judge.judge([wrong(case) for case in cases]))


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("transformers", minversion="5.24", reason="the oracle is transformers 5.24")
    from tests.oracle.checkpoints import open_reference

    return open_reference(NANO)


SPOKEN = (*SKILLS[:4], "vision_colour", "vision_shape")


@torch.inference_mode()
def generated(reference, prompt, most):
    """Greedy tokens of transformers, at most `most`, the stop token included."""
    media = {}
    if prompt.images:
        (patches,) = prompt.images
        media = {
            "pixel_values": torch.from_numpy(patches.pixel_values.copy()),
            "image_grid_thw": torch.tensor([patches.grid]),
        }
    ids = torch.tensor([prompt.token_ids])
    out = reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, **media
    )
    return tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("name", SPOKEN)
def test_transformers_gives_the_same_greedy_answers(name, maker, judge, reference):
    for case in cases_of(maker, name, 2):
        prompt = judge.prompt(case)
        expected = judge.greedy(case)
        assert len(expected) >= 2
        assert generated(reference, prompt, len(case.answer) + 1) == expected
