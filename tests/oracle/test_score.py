"""LLM.score against transformers, from a folder to logits: the nano model and random ones."""

from pathlib import Path

import pytest
import torch

from emberbox import LLM
from emberbox.settings import EngineSettings
from tests.oracle.checkpoints import open_reference, write_checkpoint
from tests.oracle.harness import TOLERANCE as RANDOM_TOLERANCE
from tests.oracle.harness import Oracle, difference

NANO = Path(__file__).parents[2] / "models" / "ember-nano"
TOLERANCE = 5e-4  # measured 2.5e-5


@pytest.fixture(scope="module")
def llm():
    return LLM(NANO, EngineSettings(dtype="float32", device="cpu", max_model_len=512))


@pytest.fixture(scope="module")
def text(llm):
    sentence = "The lamp by the window is blue; its code is 4417, and Ada counts: 3, 4, 5, 6, 7. "
    return llm.format.tokenizer.encode(sentence * 9)[:230]


@pytest.mark.parametrize(("chunk", "length"), [(512, 230), (61, 230), (1, 40)])
def test_scores_agree(llm, text, chunk, length):
    ids = text[:length]
    expected = open_reference(NANO)(input_ids=torch.tensor([ids])).logits[0]
    parts = list(llm.score(ids, chunk=chunk))
    assert max(len(part) for part in parts) <= chunk
    assert all(part.dtype == torch.float32 for part in parts)
    assert difference(torch.cat(parts), expected) <= TOLERANCE
    assert difference(llm.score_all(ids), expected) <= TOLERANCE


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("weights", RANDOM_TOLERANCE)
def test_scores_agree_on_folders_that_transformers_wrote(weights, seed, tmp_path):
    write_checkpoint(tmp_path, weights, seed=seed)
    oracle = Oracle(weights, tmp_path)
    ids = oracle.token_ids(139, seed)
    scorer = LLM(tmp_path, EngineSettings(dtype="float32", device="cpu", max_model_len=192))
    oracle.check(torch.cat(list(scorer.score(ids.tolist(), chunk=37))), ids)
