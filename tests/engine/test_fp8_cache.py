"""Latents cached in 8 bits: little is lost, and every part of the engine works with them."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from emberbox.engine.core import Engine
from emberbox.engine.llm import LLM
from emberbox.engine.plan import Limits
from emberbox.engine.request import SamplingParams
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import FP8, CacheSize
from emberbox.settings import EngineSettings
from tests.engine.small_engine import TINY, ids, run
from tests.helpers.nano import NANO, nano_llm

QUESTIONS = (
    "Count from 3 to 9.",
    "Count down from 12 to 4.",
    "Say hello.",
    "Which word is longer, cat or horse?",
)
CPU = torch.device("cpu")
TEXT = (NANO.parents[1] / "README.md").read_text(encoding="utf-8")
MEAN_KL = 1e-3  # nats a token; 4e-4 are found


@pytest.fixture(scope="module")
def narrow() -> LLM:
    settings = EngineSettings(
        device="cpu", dtype="float32", cache_dtype="fp8", max_model_len=2048, max_running=2
    )
    return LLM(NANO, settings)


def test_the_cache_of_engine_and_of_scores_holds_eight_bits(narrow):
    cache = narrow.engine.runner.cache
    assert cache.latents.dtype is FP8
    assert cache.scales is not None
    assert nano_llm().engine.runner.cache.latents.dtype is torch.float32
    pages, slots = narrow.memory.lines[1:3]
    assert cache.num_bytes == pages.num_bytes + slots.num_bytes


def test_logits_are_nearly_those_of_a_wide_cache(narrow):
    tokens = narrow.prepare(TEXT).token_ids[:700]
    found, expected = (log_softmax(llm.score_all(tokens), -1) for llm in (narrow, nano_llm()))
    divergence = kl_div(found, expected, log_target=True, reduction="batchmean")
    assert 1e-9 < divergence < MEAN_KL  # 0 if scores kept a cache of their own type


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(narrow, chunk):
    network, ids = narrow.network, narrow.prepare(TEXT).token_ids[:201]
    found = []
    for size in (len(ids), chunk):
        cache = network.new_cache(CacheSize(4, 1), FP8)
        parts = []
        for at in range(0, len(ids), size):
            batch = Batch.of([SequenceRows(ids[at : at + size], at, 0, (3, 1, 0, 2))], CPU)
            with torch.inference_mode():
                parts.append(network.logits(network.forward(batch, cache)))
        found.append(torch.cat(parts))
    divergence = kl_div(*(log_softmax(x, -1) for x in found), log_target=True, reduction="none")
    assert divergence.sum(-1).max() < 1e-5  # 4e-4 and more where own tokens are not rounded


def test_greedy_answers_are_mostly_the_same(narrow):
    params = SamplingParams(max_tokens=40)
    answers = [
        [llm.chat([{"role": "user", "content": q}], params).text for q in QUESTIONS]
        for llm in (narrow, nano_llm())
    ]
    same = sum(found == expected for found, expected in zip(*answers, strict=True))
    assert same >= len(QUESTIONS) - 1


def test_a_prompt_that_goes_on_from_a_snapshot_gives_the_tokens_of_a_cold_one(narrow):
    prompt = ids(150)
    cold = run(engine_of(narrow), (*prompt, 5, 6), 12)
    engine = engine_of(narrow)
    run(engine, prompt, 3)
    assert run(engine, (*prompt, 5, 6), 12) == cold
    assert engine.runner.cache.latents.dtype is FP8


def engine_of(llm: LLM) -> Engine:
    limits: Limits = replace(TINY, num_pages=8)
    names = ("num_pages", "num_slots", "num_snapshots", "max_model_len")
    memory = replace(llm.memory, **{name: getattr(limits, name) for name in names})
    return Engine(llm.network, memory, llm._detokenizer, limits=limits)
