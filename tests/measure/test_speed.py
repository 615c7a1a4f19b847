"""What is timed is what was asked for, and every figure follows from the raw times."""

import copy
import json
from dataclasses import replace
from statistics import median

import pytest

from emberbox.engine.request import Prompt, SamplingParams
from emberbox.engine.runner import ModelRunner
from emberbox.errors import MeasureError, SettingsError
from emberbox.measure.speed import SpeedOptions, measure_speed
from emberbox.measure.speed_receipt import (
    SpeedFacts,
    build_speed_receipt,
    check_speed_output,
    figures,
    load_speed,
    save_speed,
    show_speed,
    verify_speed,
)
from emberbox.measure.speed_runs import SPARE_TOKENS, RandomDrafter, Stopwatch, room_of
from emberbox.store.durable import write_file
from tests.engine.small_engine import engine_of

OPTIONS = SpeedOptions(
    contexts=(97, 200),
    tokens=5,
    warm_up=2,
    step_tokens=(1, 3, 8),
    concurrency=(1, 3),
    prompt_tokens=17,
    reply_tokens=7,
)
FACTS = SpeedFacts(
    command="emberbox measure speed here --engine",
    model={"name": "here"},
    device={"name": "this one"},
    op_table={"linear": "reference"},
    settings={"device": "cpu"},
    plan={"weights": 700, "cache pages": 50, "reserve": 9},
    peak_bytes=745,
)


@pytest.fixture(scope="module")
def engine():
    return engine_of(num_pages=14, num_slots=3, num_snapshots=0, prefill_tokens=64)


@pytest.fixture(scope="module")
def runs(engine):
    return measure_speed(engine, OPTIONS)


class Ticks:
    """A clock that advances by 1, 2, 3 ... seconds."""

    def __init__(self):
        self.now = self.calls = 0

    def __call__(self):
        self.calls += 1
        self.now += self.calls
        return self.now


# -- what is timed ---------------------------------------------------------------------------------


def test_every_run_that_was_asked_for_is_there_in_order(runs):
    shapes = [(r.kind, r.context, r.step_tokens, r.num_requests, r.num_tokens) for r in runs]
    assert shapes == [
        ("decode", 97, 1, 1, 5),
        ("decode", 97, 3, 1, runs[1].num_tokens),
        ("decode", 97, 8, 1, runs[2].num_tokens),
        ("decode", 200, 1, 1, 5),
        ("replies", 17, 1, 1, 7),
        ("replies", 17, 1, 3, 21),
    ]
    assert all(len(run.step_ms) == 5 for run in runs[:4])
    assert len(runs[4].step_ms) == 7
    assert all(5 <= run.num_tokens <= 5 + SPARE_TOKENS for run in runs[:4])
    for run in runs:
        assert min(run.step_ms) > 0
        assert sum(run.step_ms) <= run.wall_ms * (1 + 1e-9)
        assert not run.is_filled


def test_the_engine_is_left_as_it_was(engine, runs):
    assert not engine.has_work
    assert engine.drafter is None
    assert isinstance(engine.runner, ModelRunner)
    assert engine.stats().pages_used == 0


def test_each_step_verifies_the_drafts_that_were_asked_for(engine):
    before = engine.stats()
    timed = Stopwatch(engine, 3).decode(120, (2, 6), step_tokens=4, is_filled=False)
    after = engine.stats()
    assert after.drafted_tokens - before.drafted_tokens == 3 * (2 + 6)
    assert after.steps - before.steps == 2 + 2 + 6  # two chunks of prompt, of at most 64 tokens
    assert after.prompt_tokens - before.prompt_tokens == 120 - room_of(8, 4)
    assert len(timed.step_ms) == 6


def test_times_are_those_of_the_clock(engine):
    timed = Stopwatch(engine, 3, Ticks()).decode(120, (2, 4), step_tokens=1, is_filled=False)
    assert timed.step_ms == (2000, 3000, 4000, 5000)  # the first tick begins, 2 s to the next
    assert (timed.wall_ms, timed.num_tokens) == (14_000, 4)
    timed = Stopwatch(engine, 3, Ticks()).replies(2, 5, 3)
    assert timed.step_ms == (3000, 4000, 5000)  # the clock was read before they were submitted
    assert (timed.wall_ms, timed.num_tokens) == (14_000, 6)


def test_drafts_and_prompts_are_random_tokens_without_end_or_picture(engine):
    watch = Stopwatch(engine, 0)
    tokens = watch.random_tokens(5000)
    config = engine.config
    assert len(set(tokens)) > 1000
    assert not {config.image_token_id, *config.text.eos_token_ids} & set(tokens)
    assert 0 <= min(tokens) <= max(tokens) < config.text.vocab_size
    assert watch.random_tokens(5000) != tokens
    assert Stopwatch(engine, 0).random_tokens(5000) == tokens
    assert Stopwatch(engine, 1).random_tokens(5000) != tokens
    drafter = RandomDrafter(watch, 3)
    assert [len(drafter.propose(0, (), most)) for most in (7, 3, 2, 0)] == [3, 3, 2, 0]


def test_drafts_that_are_right_too_often_give_no_figure(engine, monkeypatch):
    """The reply would end before the steps are timed."""
    reply = []
    engine.submit(0, Prompt((5, 6, 7)), SamplingParams(max_tokens=80, ignore_eos=True))
    while engine.has_work:
        reply += [event.event.token_id for event in engine.step()]
    monkeypatch.setattr(Stopwatch, "_submit", lambda watch, *_: submit_known(watch.engine))
    monkeypatch.setattr(
        RandomDrafter,
        "propose",
        lambda _, __, done, most: reply[len(done) : len(done) + min(7, most)],
    )
    with pytest.raises(MeasureError, match="steps verified"):
        Stopwatch(engine, 0).decode(120, (2, 8), step_tokens=8, is_filled=False)
    assert not engine.has_work
    assert engine.drafter is None


def submit_known(engine):
    params = SamplingParams(max_tokens=room_of(10, 8), ignore_eos=True)
    engine.submit(0, Prompt((5, 6, 7)), params)
    return [0]


# -- a cache that is filled ------------------------------------------------------------------------


def test_a_filled_cache_takes_the_place_of_the_prompt(engine, monkeypatch):
    fills, forwards = [], []
    real = ModelRunner.forward

    def fill(_, slot, pages, seed):
        fills.append((slot, len(pages), seed))

    def forward(runner, works, features):
        forwards.append([(work.position, len(work.token_ids)) for work in works])
        return real(runner, works, features)

    monkeypatch.setattr(ModelRunner, "fill_random", fill, raising=False)
    monkeypatch.setattr(ModelRunner, "forward", forward)
    timed = Stopwatch(engine, 11).decode(220, (1, 4), step_tokens=1, is_filled=True)
    prompt = 220 - room_of(5, 1)
    assert fills == [(fills[0][0], -(-prompt // 64), 11)]
    last, *steps = forwards
    assert last == [(192, prompt - 192)]  # the last chunk of 64 tokens at a time
    assert steps == [[(prompt - 1 + step, 1)] for step in range(1, 6)]
    assert (len(timed.step_ms), timed.num_tokens) == (4, 4)
    assert isinstance(engine.runner, ModelRunner)


def test_only_long_sequences_are_filled_and_only_where_the_engine_can(engine, monkeypatch):
    monkeypatch.delattr(ModelRunner, "fill_random", raising=False)
    options = replace(OPTIONS, fill="random", contexts=(97,), concurrency=(), step_tokens=(1,))
    assert [run.is_filled for run in measure_speed(engine, options)] == [False]
    monkeypatch.setattr("emberbox.measure.speed.MAX_PREFILLED", 96)
    with pytest.raises(MeasureError, match="cannot fill its cache") as refused:
        measure_speed(engine, options)
    assert "--fill prefill" in refused.value.hint
    assert not engine.has_work
    assert isinstance(engine.runner, ModelRunner)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fill": "zeros"}, "fill: 'zeros'"),
        ({"tokens": 1}, "tokens: 1"),
        ({"contexts": ()}, "contexts: []"),
        ({"contexts": (5, 5)}, "contexts: [5, 5]"),
        ({"step_tokens": (2, 4)}, "step_tokens: [2, 4]"),
        ({"step_tokens": (1, 9)}, "step_tokens: [1, 9]"),
        ({"concurrency": (0,)}, "concurrency: [0]"),
        ({"concurrency": (2, 2)}, "concurrency: [2, 2]"),
        ({"step_tokens": (1, 1, 2)}, "step_tokens: [1, 1, 2]"),
        ({"step_tokens": ()}, "step_tokens: []"),
        ({"reply_tokens": 1}, "reply_tokens: 1"),
        ({"contexts": (1 << 70,)}, f"contexts: [{1 << 70}]"),
        *(
            ({name: value}, f"{name}: {value}")
            for name in ("seed", "tokens", "warm_up", "prompt_tokens", "reply_tokens")
            for value in (-1, (1 << 62) + 1, 1 << 64, 10**26)
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(changes, said):
    with pytest.raises(SettingsError) as refused:
        SpeedOptions(**changes)
    assert refused.value.message == said  # one thing is named, the one that is wrong


def test_each_list_has_a_hint_of_its_own():
    hints = {}
    for name in ("contexts", "step_tokens", "concurrency"):
        with pytest.raises(SettingsError) as refused:
            SpeedOptions(**{name: (0,)})
        hints[name] = refused.value.hint
    assert hints["contexts"].endswith("one at least")
    assert hints["step_tokens"] == "different numbers from 1 to 8, 1 among them"
    assert hints["concurrency"].endswith("or none")
    assert SpeedOptions(concurrency=(), seed=1 << 62).concurrency == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contexts": (97, 257)}, "a context of 257 tokens, the engine holds 256"),
        ({"contexts": (32,)}, "no room for a prompt: the timed steps take 32"),
        ({"concurrency": (4,)}, "4 requests at once, the engine computes 3"),
        ({"reply_tokens": 240}, "prompt and reply have 257 tokens, the engine holds 256"),
    ],
)
def test_more_than_the_engine_holds_is_refused(engine, changes, said):
    with pytest.raises(MeasureError, match=said):
        measure_speed(engine, replace(OPTIONS, **changes))


def test_an_engine_at_work_is_not_measured(engine):
    engine.submit(5, Prompt((1, 2)), SamplingParams(max_tokens=2))
    with pytest.raises(MeasureError, match="has other work"):
        measure_speed(engine, OPTIONS)
    engine.abort(5)


# -- figures and receipt ---------------------------------------------------------------------------


def decode(context, m, step_ms, num_tokens=None):
    return {
        "kind": "decode",
        "context": context,
        "step_tokens": m,
        "num_requests": 1,
        "num_tokens": num_tokens or len(step_ms),
        "wall_ms": sum(step_ms),
        "step_ms": step_ms,
    }


def test_figures_are_those_of_a_calculation_by_hand():
    raw = [
        decode(1024, 1, [10, 10, 12, 8, 20]),
        decode(1024, 4, [15, 15, 30], num_tokens=4),
        decode(131072, 1, [16, 16, 18]),
        {"kind": "replies", "num_requests": 8, "num_tokens": 3200, "wall_ms": 6400.0},
    ]
    assert figures(raw, {"weights": 80, "workspace": 7, "reserve": 4}, 90) == {
        "decode_tok_s.c1.ctx1k": 83.3333,  # 5 tokens in 60 ms
        "step_ms.c1.ctx1k": 10,
        "step_ms.c1.ctx1k.p10": 8.8,
        "step_ms.c1.ctx1k.p90": 16.8,
        "step_ms.m1": 10,
        "step_ms.m1.p10": 8.8,
        "step_ms.m1.p90": 16.8,
        "step_ms.m4": 15,
        "step_ms.m4.p10": 15,
        "step_ms.m4.p90": 27,
        "decode_tok_s.c1.ctx128k": 60,  # 3 tokens in 50 ms
        "step_ms.c1.ctx128k": 16,
        "step_ms.c1.ctx128k.p10": 16,
        "step_ms.c1.ctx128k.p90": 17.6,
        "decode_tok_s.c8.wall": 500,
        "step_ratio.m4": 1.5,
        "peak_bytes": 90,
        "planned_bytes": 87,
    }


@pytest.fixture
def receipt(runs, tmp_path):
    path = tmp_path / "speed.json"
    save_speed(path, build_speed_receipt(FACTS, OPTIONS, runs))
    return path


def test_a_receipt_holds_the_raw_times_and_verifies(receipt, runs):
    document = load_speed(receipt)
    assert verify_speed(receipt) == []
    assert document["schema"] == "emberbox.speed.v1"
    assert [tuple(run["step_ms"]) for run in document["raw"]] == [run.step_ms for run in runs]
    results = document["results"]
    assert results["step_ms.m1"] == pytest.approx(median(runs[0].step_ms), rel=1e-5)
    assert results["decode_tok_s.c1.ctx200"] == pytest.approx(5e3 / runs[3].wall_ms, rel=1e-5)
    assert results["decode_tok_s.c3.wall"] == pytest.approx(21e3 / runs[5].wall_ms, rel=1e-5)
    assert (results["peak_bytes"], results["planned_bytes"]) == (745, 750)
    assert document["options"]["contexts"] == [97, 200]
    assert "decode_tok_s.c3.wall" in show_speed(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["results"].update({"step_ms.m1": 0.1}), "results.step_ms.m1 is 0.1"),
        (lambda d: d["raw"][0]["step_ms"].sort(), "sha256"),
        (lambda d: d["raw"][5].update(num_tokens=42), "results.decode_tok_s.c3.wall"),
        (lambda d: d["results"].pop("step_ratio.m8"), "results.step_ratio.m8 is None"),
        (lambda d: d["raw"][0].pop("step_ms"), "raw[0].step_ms is missing"),
        (
            lambda d: d["raw"][0].update(step_tokens=2),
            "raw[0] is decode, 97 tokens, 2 a step, 1 at",
        ),
    ],
)
def test_a_receipt_that_was_changed_is_not_good(receipt, change, said):
    document = copy.deepcopy(load_speed(receipt))
    document["raw"][0]["step_ms"].append(document["raw"][0]["step_ms"].pop(0) + 1e-9)
    change(document)
    receipt.write_text(json.dumps(document))
    problems = verify_speed(receipt)
    assert any(problem.startswith(said) for problem in problems), problems
    assert problems[0].startswith("sha256")


def test_a_receipt_is_not_written_over_what_is_there(receipt, tmp_path):
    before = receipt.read_bytes()
    with pytest.raises(MeasureError, match="is there already"):
        check_speed_output(receipt, may_replace=False)
    check_speed_output(receipt, may_replace=True)
    with pytest.raises(MeasureError, match="is there already"):
        save_speed(receipt, {})
    assert receipt.read_bytes() == before
    other = tmp_path / "other.json"
    other.write_text('{"schema": "emberbox.fidelity.v1"}')
    with pytest.raises(MeasureError, match=r"not a receipt of speed: schema 'emberbox\.fid"):
        check_speed_output(other, may_replace=True)
    other.write_text('{"mine": 1}')
    with pytest.raises(MeasureError, match="not a receipt of speed: it has no schema, not "):
        check_speed_output(other, may_replace=True)
    with pytest.raises(MeasureError, match="not a place for a receipt"):
        check_speed_output(tmp_path / "speed.txt", may_replace=False)
    for place in (
        "none/speed.json",
        f"{'a' * 300}.json",
        f"{'b' * 245}.json",
        f"{'c' * 300}/a.json",
    ):
        for may_replace in (False, True):
            with pytest.raises(MeasureError, match="not a place for a receipt: "):
                check_speed_output(tmp_path / place, may_replace=may_replace)
    check_speed_output(tmp_path / "new.json", may_replace=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "speed.json"]


def test_of_two_that_write_at_once_the_first_is_kept(receipt, tmp_path, monkeypatch):
    """The name is taken while the second is written."""
    path = tmp_path / "late.json"

    def write(partial, chunks):
        path.write_text("first")
        return write_file(partial, chunks)

    monkeypatch.setattr("emberbox.measure.speed_receipt.write_file", write)
    with pytest.raises(MeasureError, match=r"late\.json: is there already"):
        save_speed(path, load_speed(receipt))
    assert path.read_text() == "first"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["late.json", "speed.json"]
