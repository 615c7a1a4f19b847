"""A receipt of speed with any kind of damage is refused in words, by the library itself."""

import copy
import json

import pytest

from emberbox.errors import MeasureError
from emberbox.measure.receipt import seal_of
from emberbox.measure.speed import Run, SpeedOptions
from emberbox.measure.speed_receipt import (
    SpeedFacts,
    build_speed_receipt,
    is_speed,
    load_speed,
    show_speed,
    verify_speed,
)

FACTS = SpeedFacts(
    command="emberbox measure speed here --engine",
    model={"name": "here", "seed": 0, "is_synthetic": True},
    device={"name": "this one", "capability": [9, 0], "kind": "cpu"},
    op_table={"linear": "reference"},
    settings={"device": "cpu", "cache_tokens": None},
    plan={"weights": 700, "cache pages": 50, "reserve": 9},
    peak_bytes=745,
)
OPTIONS = SpeedOptions(
    contexts=(97,), tokens=3, step_tokens=(1,), concurrency=(3,), prompt_tokens=97
)
DAMAGE = (None, "text", [1], -1, True, {"a": {"b": 1}}, 10**400)
# Facts that no figure follows from: another of the same form is as good.
TOLD = {"command", "emberbox", "model", "device", "op_table", "settings"}
NOT_COUNTED = {
    ("command",),
    ("settings",),
    *(("options", name) for name in ("tokens", "warm_up", "reply_tokens", "seed")),
    ("plan", "reserve"),
    ("raw", 1, "step_ms"),
}


def run_of(kind, num_requests, step_ms):
    return Run(kind=kind, context=97, step_tokens=1, num_requests=num_requests, num_tokens=3,
               wall_ms=sum(step_ms), step_ms=step_ms)  # fmt: skip


def document():
    runs = [run_of("decode", 1, (2.0, 3.5, 4.0)), run_of("replies", 3, (5.0, 6.0))]
    return json.loads(json.dumps(build_speed_receipt(FACTS, OPTIONS, runs)))


def places(value, at=()):
    """Every key and every index."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*at, key)
        if isinstance(each, dict | list):
            yield from places(each, (*at, key))


PLACES = list(places(document()))


def damaged(place, value, *, is_sealed):
    """None where nothing would change."""
    content = document()
    *before, last = place
    at = content
    for key in before:
        at = at[key]
    if type(at[last]) is type(value) and at[last] == value:
        return None
    at[last] = copy.deepcopy(value)
    if is_sealed and place != ("sha256",):
        content["sha256"] = seal_of(content)
    return content


def problems_of(path, text):
    """What is said, of whatever kind; anything but MeasureError gets out."""
    path.write_text(text)
    try:
        return verify_speed(path)
    except MeasureError as error:
        return [error.message]


def test_the_document_is_good_as_it_is(tmp_path):
    assert problems_of(tmp_path / "speed.json", json.dumps(document())) == []
    assert len(PLACES) > 60


@pytest.mark.parametrize("value", DAMAGE, ids=lambda value: str(value)[:12])
def test_what_is_damaged_anywhere_is_refused(tmp_path, value):
    for place in PLACES:
        content = damaged(place, value, is_sealed=False)
        if content is not None:
            assert problems_of(tmp_path / "speed.json", json.dumps(content)), place


@pytest.mark.parametrize("value", DAMAGE, ids=lambda value: str(value)[:12])
def test_what_is_damaged_and_sealed_again_is_refused(tmp_path, value):
    for place in PLACES:
        content = damaged(place, value, is_sealed=True)
        if content is not None:
            found = problems_of(tmp_path / "speed.json", json.dumps(content))
            is_free = place in NOT_COUNTED or (place[0] in TOLD and len(place) > 1)
            assert found or is_free, place
            assert all(isinstance(problem, str) for problem in found)


@pytest.mark.parametrize("word", ["1e400", "-1e400", "Infinity", "NaN"])
def test_a_number_that_is_not_finite_is_refused(tmp_path, word):
    for place in PLACES:
        text = json.dumps(damaged(place, "<number>", is_sealed=False))
        path = tmp_path / "speed.json"
        path.write_text(text.replace('"<number>"', word))
        with pytest.raises(MeasureError, match=r"speed\.json: "):
            verify_speed(path)


def test_what_is_missing_is_refused(tmp_path):
    for place in PLACES:
        content = document()
        *before, last = place
        at = content
        for key in before:
            at = at[key]
        del at[last]
        content["sha256"] = seal_of(content) if place != ("sha256",) else ""
        found = problems_of(tmp_path / "speed.json", json.dumps(content))
        is_free = place[:3] in NOT_COUNTED or (place[0] in TOLD and len(place) > 1)
        assert (found or is_free) if len(place) > 1 else found, place


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(plan=[1]), "plan is [1], expected an object"),
        (lambda d: d.update(results="x"), "results is 'x', expected an object"),
        (lambda d: d["raw"][0].update(num_tokens=10**400), "raw[0].num_tokens is 1000"),
        (lambda d: d["raw"][0].update(wall_ms=0), "raw: not the times of a measurement (ZeroDiv"),
        (lambda d: d["raw"][0].update(step_ms=[1.0]), "raw: not the times of a measurement (Stat"),
        (lambda d: d["raw"][0].update(step_tokens=2), "raw[0] is decode, 97 tokens, 2 a step, 1"),
        (
            lambda d: d["options"].update(fill="all"),
            "options.fill: 'all', expected prefill or rand",
        ),
        (lambda d: d["options"].update(seed=-1), "options.seed is -1, expected"),
        (
            lambda d: d["options"].update(step_tokens=[1, 1]),
            "options.step_tokens: [1, 1], expected",
        ),
        (lambda d: d["raw"][1].update(step_ms=9), "raw[1].step_ms is 9, expected a list"),
        (lambda d: d["raw"][1].pop("step_ms"), "raw[1].step_ms is missing"),
        (lambda d: d["device"].pop("name"), "device.name is None, expected a text"),
        (lambda d: d.update(more=1), "more is unknown"),
    ],
)
def test_the_place_is_named(tmp_path, change, said):
    content = document()
    change(content)
    content["sha256"] = seal_of(content)
    found = problems_of(tmp_path / "speed.json", json.dumps(content))
    assert found[0].startswith(said), found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"contexts": [98]}, "raw[0] is decode, 97 tokens, 1 a step, 1 at once, the options ask f"),
        ({"contexts": [97, 3000]}, "raw[1] is replies, 97 tokens, 1 a step, 3 at once, the option"),
        ({"step_tokens": [1, 2]}, "raw[1] is replies, 97 tokens, 1 a step, 3 at once, the options"),
        ({"concurrency": [3, 4]}, "raw[2] is None, the options ask for replies, 97 tokens, 1 a st"),
        (
            {"concurrency": []},
            "raw[1] is replies, 97 tokens, 1 a step, 3 at once, the options ask ",
        ),
        ({"prompt_tokens": 5}, "raw[1] is replies, 97 tokens, 1 a step, 3 at once, the options as"),
    ],
)
def test_runs_that_the_options_do_not_ask_for_are_told(tmp_path, options, said):
    content = document()
    content["options"].update(options)
    content["sha256"] = seal_of(content)
    found = problems_of(tmp_path / "speed.json", json.dumps(content))
    assert found[0].startswith(said), found


def test_rows_that_were_filled_are_told_where_the_options_do_not_fill(tmp_path):
    content = document()
    content["raw"][0]["is_filled"] = True
    content["sha256"] = seal_of(content)
    assert problems_of(tmp_path / "speed.json", json.dumps(content)) == [
        "raw[0] is decode, 97 tokens, 1 a step, 1 at once, filled, the options ask for decode, "
        "97 tokens, 1 a step, 1 at once"
    ]


@pytest.mark.parametrize("letters", ["\x1b[31mred", "a\rb", "a\nb", "\x07", "\x9b2J", "\u202e1"])
def test_what_a_terminal_would_obey_is_refused_wherever_it_stands(tmp_path, letters):
    path = tmp_path / "speed.json"
    shown = (
        lambda d: d["device"].update(name=letters),
        lambda d: d["model"].update(name=letters),
        lambda d: d["emberbox"].update(version=letters),
        lambda d: d["results"].update({letters: 1.0}),
        lambda d: d["results"].update({"peak_bytes": letters}),
    )
    for change in shown:
        content = document()
        change(content)
        content["sha256"] = seal_of(content)
        path.write_text(json.dumps(content))
        said = verify_speed(path)
        assert said
        with pytest.raises(MeasureError, match=r"speed\.json: not a whole receipt") as refused:
            load_speed(path)
        assert letters not in refused.value.message + "".join(said)
        assert is_speed(path)


def test_no_figures_are_shown_as_none(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({**document(), "results": {}}))
    assert show_speed(load_speed(path)).startswith("here on this one, emberbox ")
