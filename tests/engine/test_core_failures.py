"""A step that fails, an interrupt, a submit that fails: what is given up, and that all goes on."""

from threading import Thread

import pytest
import torch

from emberbox.engine.llm import LLM
from emberbox.engine.request import Prompt, SamplingParams
from emberbox.errors import CheckpointError, RequestError
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import INDEX_NAME
from emberbox.testing.coin_drafter import CoinDrafter, oracle_of
from tests.engine.small_engine import drain, engine_of, ids, params, run, tokens_of
from tests.helpers.nano import NANO, nano_llm


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("method", ["restore", "forward", "commit", "save"])
def test_after_a_failed_step_the_engine_goes_on_with_what_comes_then(monkeypatch, error, method):
    expected = run(engine_of(), ids(40), 6)
    drafter = CoinDrafter(1.0, 0, oracle_of({0: expected, 1: expected}))
    engine = engine_of(drafter)
    engine.submit(0, Prompt(ids(40)), params(6))
    engine.step()

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, method, fail)
        with pytest.raises(error):
            engine.step()
    assert not engine.knows(0)
    assert not engine.has_work
    engine.submit(1, Prompt(ids(40)), params(6))
    assert tokens_of(drain(engine)[1]) == expected
    engine.scheduler.snapshots.clear()
    assert engine.stats().pages_used == 0


def test_a_snapshot_whose_copy_failed_is_not_gone_on_from(monkeypatch):
    engine, prompt = engine_of(num_snapshots=1), ids(40)
    reply = run(engine_of(), prompt, 6)
    engine.submit(0, Prompt(prompt), params(6))
    for _ in reply[:-1]:
        engine.step()
    save = engine.runner.save

    def fail(saves):  # the copies of a plan are made, those of the reply's end are not
        if saves:
            raise KeyboardInterrupt
        save(saves)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.knows(0)
    assert not engine.has_work
    longer = (*prompt, *reply, *ids(9))
    assert run(engine, longer, 6) == run(engine_of(), longer, 6)


def test_an_interrupted_reply_leaves_the_llm_usable_and_other_streams_told(monkeypatch):
    llm = LLM(NANO, EngineSettings(dtype="float32", device="cpu", max_model_len=512))
    question = [{"role": "user", "content": "Count from 3 to 9."}]
    expected = llm.chat(question).text
    stream = llm.stream(llm.prepare_chat(question))
    next(stream)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.chat(question)
    with pytest.raises(RequestError, match="was given up"):
        list(stream)
    assert llm.chat(question).text == expected
    assert llm._mail == {}


def test_a_submit_that_fails_leaves_nothing(tmp_path):
    for file in [*NANO.glob("*.safetensors"), NANO / "config.json", NANO / INDEX_NAME]:
        (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, EngineSettings(dtype="float32", device="cpu", max_model_len=512))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="tokenizer"):
            llm.generate([5, 6, 7])
        assert not llm.has_work
        assert llm.stats().num_waiting == 0
        assert llm._mail == {}


def test_a_bad_row_behind_a_draft_counts_only_when_it_is_reached(monkeypatch):
    expected = run(engine_of(), ids(40), 6)
    wrong = [expected[0], (expected[1] + 1) % 4000, *expected[2:]]
    for guess in (wrong, expected):
        engine = engine_of(CoinDrafter(1.0, 0, oracle_of({0: guess})))
        logits = engine.runner.network.logits

        def poisoned(hidden, logits=logits):
            rows = logits(hidden)
            if rows.shape[0] > 1:  # rows of drafts: only the first is sound
                rows[1:] = torch.nan
            return rows

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.network, "logits", poisoned)
            engine.submit(0, Prompt(ids(40)), params(6))
            assert tokens_of(drain(engine)[0]) == expected


def test_sampling_parameters_of_other_vocabularies_are_refused_by_name():
    prompt = Prompt((5, 6))
    for name, value in (("logit_bias", ((5000, 1.0),)), ("stop_token_ids", (5000,))):
        with pytest.raises(RequestError, match=f"{name}: token 5000 is outside") as caught:
            nano_llm().check(prompt, SamplingParams(**{name: value}))
        assert caught.value.param == name


def test_a_second_thread_is_told_and_the_first_goes_on(monkeypatch):
    expected = run(engine_of(), ids(40), 6)
    engine = engine_of()
    engine.submit(0, Prompt(ids(40)), params(6))
    forward, told = engine.runner.forward, []

    def interfered(*arguments):
        def step():
            with pytest.raises(RequestError, match="another thread"):
                engine.step()
            told.append(True)

        thread = Thread(target=step)
        thread.start()
        thread.join()
        return forward(*arguments)

    monkeypatch.setattr(engine.runner, "forward", interfered)
    assert tokens_of(drain(engine)[0]) == expected
    assert len(told) == engine.stats().steps
