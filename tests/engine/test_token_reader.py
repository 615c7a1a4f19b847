"""Whatever the runs and the drafts, a reply is that of one token at a time."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.chat.detokenizer import Detokenizer
from emberbox.chat.tokenizer import Tokenizer
from emberbox.engine.request import FinishReason, SamplingParams
from emberbox.engine.token_reader import TokenReader
from emberbox.ops.sample_rows import sample_rows
from emberbox.testing.coin_drafter import CoinDrafter, oracle_of

TOKENIZER = Tokenizer.open(Path(__file__).parents[2] / "models" / "ember-nano")
VOCAB = 4096
EOS = (TOKENIZER.special_id("<|user|>"), TOKENIZER.special_id("<|endoftext|>"))
ID_OF_BYTE = {
    TOKENIZER.token_bytes(i): i for i in range(VOCAB) if len(TOKENIZER.token_bytes(i)) == 1
}
NO_ROWS = torch.empty(0)  # whoever looks at a row of it fails


def letters(text: str) -> list[int]:
    """One token per byte, so that characters and stop strings are cut everywhere."""
    return [ID_OF_BYTE[bytes([byte])] for byte in text.encode()]


def reader_of(params, *, budget=100, prompt_ids=(5, 6)):
    return TokenReader(params, Detokenizer(TOKENIZER), EOS, budget, prompt_ids, sample_rows)


def greedy_run(reader, ids):
    """Every event of a plain greedy reply whose tokens would be `ids`, one at a time."""
    events = []
    for token in ids:
        events.extend(reader.read(NO_ROWS, [token], []))
        if reader.is_finished:
            break
    return events


def text_of(events):
    return "".join(event.text for event in events)


class Network:
    """Stands for the forward pass: logits depend on all tokens before, as the real ones do."""

    def __init__(self, favourites, seed):
        self.favourites, self.seed = favourites, seed

    def row(self, tokens):
        generator = torch.Generator().manual_seed(hash((self.seed, *tokens)) % 2**31)
        logits = torch.randn(VOCAB, generator=generator)
        logits[self.favourites] += 9.0
        return logits

    def run(self, reader, drafts_for, most):
        """A reply: runs of 1..8 tokens with the drafts that `drafts_for(tokens, most)` proposes."""
        events, at = [], itertools.cycle(most)
        while not reader.is_finished:
            tokens = [event.token_id for event in events]
            drafts = drafts_for(tokens, next(at))
            rows = torch.stack([self.row([*tokens, *drafts[:n]]) for n in range(1 + len(drafts))])
            new = reader.read(rows, rows.argmax(-1).tolist(), drafts)
            assert 1 <= len(new) <= 1 + len(drafts)
            assert [event.token_id for event in new[:-1]] == list(drafts[: len(new) - 1])
            events.extend(new)
            assert len(events) <= 100, "no budget of these tests is larger"
        return events


params_of_all_kinds = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 40]),
    top_p=st.sampled_from([0.9, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((300, 3.0),)]),
    logprobs=st.sampled_from([None, 0, 2]),
    seed=st.integers(0, 99),
    stop=st.sampled_from([(), ("ab",), ("é!", "bba"), ("汉", "aé")]),
    stop_token_ids=st.sampled_from([(), (letters("!")[0],)]),
    min_tokens=st.sampled_from([0, 0, 4]),
    ignore_eos=st.booleans(),
)


@given(
    params_of_all_kinds,
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.integers(1, 24),
    st.integers(0, 999),
)
def test_drafts_right_or_wrong_change_neither_tokens_nor_text(
    params, probability, most, budget, seed
):
    network = Network([*letters("abé!汉"), *EOS[:1]], seed)
    alone = network.run(reader_of(params, budget=budget), lambda *_: (), [0])
    tokens = [event.token_id for event in alone]
    # Beyond its end the drafter goes on guessing, as a real one would.
    drafter = CoinDrafter(probability, seed, oracle_of({1: tokens + letters("abé!汉")}))
    drafted = network.run(
        reader_of(params, budget=budget), lambda known, n: drafter.propose(1, known, n), most
    )
    assert drafted == alone
    assert len(alone) <= budget
    assert [event.finish for event in alone[:-1]] == [None] * (len(alone) - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_at", range(8))
def test_a_wrong_draft_ends_the_run_with_the_right_token(wrong_at, temperature):
    params = SamplingParams(temperature=temperature, seed=4, frequency_penalty=0.5)
    network = Network(letters("abcdefgh"), 3)
    alone = network.run(reader_of(params, budget=8), lambda *_: (), [0])
    tokens = [event.token_id for event in alone]
    drafts = tokens[:7]
    if wrong_at < 7:
        drafts[wrong_at] += 1
    rows = torch.stack([network.row(drafts[:n]) for n in range(8)])
    events = reader_of(params, budget=8).read(rows, rows.argmax(-1).tolist(), drafts)
    assert list(events) == alone[: wrong_at + 1]


def test_plain_greedy_takes_the_argmax_and_never_touches_the_rows():
    ids = letters("abc")
    events = reader_of(SamplingParams()).read(NO_ROWS, ids, [ids[0], ids[2]])
    assert [event.token_id for event in events] == ids[:2]
    assert events[0].logprobs is None


def test_logprobs_travel_with_their_token():
    network = Network(letters("ab"), 1)
    events = network.run(reader_of(SamplingParams(logprobs=1), budget=3), lambda *_: (), [0])
    for at, event in enumerate(events):
        logprobs = torch.log_softmax(network.row([e.token_id for e in events[:at]]).double(), -1)
        assert event.logprobs.chosen.token_id == event.token_id
        assert event.logprobs.top == (event.logprobs.chosen,)  # greedy: the likeliest itself
        assert event.logprobs.chosen.logprob == pytest.approx(float(logprobs.max()), abs=1e-12)


@given(st.text("abé汉🙂", max_size=14), st.lists(st.text("abé汉🙂", min_size=1, max_size=3)))
def test_text_ends_before_the_first_complete_stop_string(text, stops):
    events = greedy_run(reader_of(SamplingParams(stop=tuple(stops))), [*letters(text), EOS[0]])
    # The first prefix that holds a stop string ends with it; of several the longest.
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    found = max((s for s in stops if ends and text[: ends[0]].endswith(s)), key=len, default="")
    assert text_of(events) == (text[: ends[0] - len(found)] if ends else text)
    assert events[-1].finish is FinishReason.STOP
    assert len(events) == (len(text[: ends[0]].encode()) if ends else len(text.encode()) + 1)


def test_a_character_is_shown_whole_and_a_held_stop_string_when_it_fails():
    events = greedy_run(reader_of(SamplingParams(stop=("é!",)), budget=7), letters("aéb汉"))
    assert [event.text for event in events] == ["a", "", "", "éb", "", "", "汉"]
    assert events[-1].finish is FinishReason.LENGTH


def test_the_budget_ends_a_reply_and_shows_what_was_held():
    events = greedy_run(reader_of(SamplingParams(stop=("abc",)), budget=2), letters("abc"))
    assert [(event.text, event.finish) for event in events] == [
        ("", None),
        ("ab", FinishReason.LENGTH),
    ]
    events = greedy_run(reader_of(SamplingParams(), budget=2), letters("a汉"))
    assert text_of(events) == "a\ufffd"
    assert events[-1].finish is FinishReason.LENGTH


def test_a_cut_character_at_the_end_stands_behind_held_text_and_may_end_a_stop_string():
    ids = letters("ab汉")
    for stop, text, finish in (
        ("abc", "ab\ufffd", FinishReason.LENGTH),
        ("b\ufffd", "a", FinishReason.STOP),
    ):
        events = greedy_run(reader_of(SamplingParams(stop=(stop,)), budget=3), ids)
        assert (text_of(events), events[-1].finish) == (text, finish)


def test_the_budget_ends_a_run_in_its_middle():
    ids = letters("abcdefgh")
    events = reader_of(SamplingParams(), budget=3).read(NO_ROWS, ids, ids[:7])
    assert [event.token_id for event in events] == ids[:3]
    assert events[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [3, 9])
def test_a_stop_on_the_last_token_of_the_budget_is_a_stop(budget):
    for params, ids, text in (
        (SamplingParams(), [*letters("ab"), EOS[1]], "ab"),
        (SamplingParams(stop=("bc",)), letters("abc"), "a"),
        (SamplingParams(stop_token_ids=tuple(letters("c"))), letters("abc"), "ab"),
    ):
        events = greedy_run(reader_of(params, budget=budget), [*ids, *letters("xyz")])
        assert (text_of(events), len(events)) == (text, 3)
        assert events[-1].finish is FinishReason.STOP


def test_end_tokens_are_ignored_when_asked_but_stop_tokens_are_not():
    params = SamplingParams(ignore_eos=True, stop_token_ids=(EOS[1],))
    ids = [*letters("a"), EOS[0], *letters("b"), EOS[1], *letters("c")]
    events = greedy_run(reader_of(params), ids)
    assert [event.token_id for event in events] == ids[:4]
    assert text_of(events) == "ab"


def test_min_tokens_bans_ends_and_looks_for_no_stop_string_before():
    a, b = letters("ab")
    logits = torch.zeros(VOCAB)
    logits[EOS[0]], logits[b], logits[a] = 3.0, 2.0, 1.0
    params = SamplingParams(min_tokens=3, stop=("bb",), stop_token_ids=(b,))
    events = []
    reader = reader_of(replace(params, stop=("aa",)))
    while not reader.is_finished:
        events.extend(reader.read(logits[None], [EOS[0]], []))
    assert [event.token_id for event in events] == [a, a, a, EOS[0]]
    assert text_of(events) == "aaa"
    reader = reader_of(replace(params, stop=("aa",), logit_bias=((a, 50.0),)))
    events = []
    while not reader.is_finished:
        events.extend(reader.read(logits[None], [EOS[0]], []))
    assert text_of(events) == "aaa"  # the fourth and fifth are the stop string
    assert len(events) == 5


@given(st.integers(0, 12), params_of_all_kinds)
def test_a_copy_goes_on_alone(cut, params):
    network = Network(letters("abé!汉"), 5)
    whole = network.run(reader_of(params, budget=14), lambda *_: (), [0])
    reader = reader_of(params, budget=14)
    tokens: list[int] = []
    for event in whole[: min(cut, len(whole) - 1)]:
        row = network.row(tokens)
        assert reader.read(row[None], [int(row.argmax())], []) == (event,)
        tokens.append(event.token_id)
    twin = reader.copy()
    # The reader strays; its copy must not notice.
    stray = network.row([1, 2, 3])
    stray[letters("z")] += 50.0
    for _ in range(3):
        if not reader.is_finished:
            reader.read(stray[None], [int(stray.argmax())], [])
    for event in whole[len(tokens) :]:
        row = network.row(tokens)
        assert twin.read(row[None], [int(row.argmax())], []) == (event,)
        tokens.append(event.token_id)
    assert twin.is_finished


def test_a_finished_reply_takes_no_more_tokens():
    reader = reader_of(SamplingParams(), budget=1)
    reader.read(NO_ROWS, [5], [])
    with pytest.raises(AssertionError):
        reader.read(NO_ROWS, [5], [])


END, BANG = EOS[1], letters("!")[0]


@pytest.mark.parametrize(
    ("params", "ids", "is_own_end"),
    [
        ({}, [*letters("ab"), END], True),
        ({"stop_token_ids": (END,)}, [*letters("ab"), END], True),
        ({"stop_token_ids": (END,), "ignore_eos": True}, [*letters("ab"), END], True),
        ({"stop_token_ids": (BANG,)}, [*letters("ab"), BANG], False),
        ({"stop": ("b",)}, [*letters("ab"), END], False),
        ({"stop": ("bx",)}, [*letters("ab"), END], True),
        # The letter that the end cuts off completes the stop string.
        ({"stop": ("\ufffd",)}, [*letters("é")[:1], END], False),
        ({}, [*letters("abc")], False),
    ],
    ids=["own", "also named", "named", "other", "string", "half a string", "cut letter", "length"],
)
def test_the_last_event_tells_the_models_own_end_from_other_stops(params, ids, is_own_end):
    events = greedy_run(reader_of(SamplingParams(**params), budget=3), ids)
    assert events[-1].finish is not None
    assert events[-1].is_own_end is is_own_end
    assert not any(event.is_own_end for event in events[:-1])
