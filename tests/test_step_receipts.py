"""tools/receipts.py: what is not true to itself, or is of another step, gives no figure."""

import re

import pytest

from tests.helpers.step_receipts import (
    PEAK_SETTINGS,
    edited,
    put,
    quality,
    repository,
    resealed,
    speed,
    summary_of,
    timeline,
    with_raw,
    without,
)
from tools import summarise
from tools.step_figures import LAUNCHES


@pytest.fixture
def root(tmp_path):
    return repository(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("speed.json", speed(name="ember-nano"), "its model is 'ember-nano', expected 'glm-5.3"),
        ("speed.json", speed(reply_tokens=64), "reply_tokens is 64, expected 400"),
        ("speed.json", speed((2048,), ()), "its first context is 2048, expected 1024"),
        (
            "speed_peak.json",
            speed(settings={**PEAK_SETTINGS, "prefill_tokens": 512}),
            "prefill_tokens is 512, expected 4096",
        ),
    ],
)
def test_a_receipt_of_something_else_is_refused(root, name, content, said):
    put(root, name, content)
    with pytest.raises(SystemExit, match=re.escape(said)):
        summary_of(root)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("speed.json", edited(speed, "results", "step_ms.m4", value=9.0), "sha256: the document"),
        ("speed_peak.json", edited(speed, "peak_bytes", value=1), "sha256: the document"),
        ("speed.json", edited(speed, "schema", value="other"), "not a receipt of speed"),
        (
            "step_timeline.json",
            edited(timeline, "results", "small_ops_ms", value=1.1),
            "small_ops_ms is 1.1, its own numbers give 1.5",
        ),
        (
            "step_timeline.json",
            edited(timeline, "by_kernel", 0, "us", value=1.0),
            "by_kernel is not what its kernels sum up to",
        ),
        ("step_timeline.json", edited(timeline, "kernels", 0, "own_us", value=1.0), "raw_sha256"),
        ("step_timeline.json", edited(timeline, "step_ms", value=[6.0]), "raw_sha256"),
        (
            "step_timeline.json",
            resealed(edited(timeline, "step_ms", value=[6.0])),
            "step_ms is 6.9, its own numbers give 6",
        ),
        (
            "decode_quality.json",
            edited(quality, "cases", 0, "last", "ratio", value=1.2),
            "cases[0].last.ratio is 1.2, its own sums give 1.55",
        ),
        (
            "decode_quality.json",
            edited(quality, "cases", 0, "kl", value=0.001),
            "cases[0].kl is 0.001, its own sums give 0.0012",
        ),
        (
            "decode_quality.json",
            edited(quality, "results", "ember-nano.fp8", value=1.0),
            "results.ember-nano.fp8 is 1.0",
        ),
        ("decode_quality.json", edited(quality, "cases", 1, "bar", value=9.0), "cases[1].bar is 9"),
        (
            "decode_quality.json",
            edited(quality, "raw", 0, "texts", 0, "bfloat16", 0, value=1.0),
            "raw: not what its raw_sha256 is of",
        ),
    ],
)
def test_an_edited_receipt_is_refused(root, name, content, said):
    put(root, name, content)
    with pytest.raises(SystemExit, match=re.escape(said)):
        summary_of(root)


def halve(sums):
    """What a text's KL adds up to, without one block."""
    sums[-1] /= 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda texts: halve(texts[0]["bfloat16"]), "cases[0].kl is "),
        (lambda texts: halve(texts[0]["plain_bf16"]), "cases[0].kl_plain_bf16 is "),
        (lambda texts: halve(texts[2]["fp8"]), "cases[1].kl is "),
        (lambda texts: halve(texts[-1]["bfloat16"]), "cases[0].long.kl is "),
        (lambda texts: texts[-1]["bfloat16"].reverse(), "cases[0].last.kl is "),
        (lambda texts: texts[0]["bfloat16"].pop(), "its sums give no figures (ValueError"),
        (lambda texts: texts[0].pop("fp8"), "its sums give no figures (KeyError"),
        (lambda texts: texts[-1].pop("bfloat16"), "cases[0] is "),
        (lambda texts: texts[0]["counts"].append(1), "not the texts and blocks of the benchmark"),
        (lambda texts: texts.pop(0), "not the texts and blocks of the benchmark"),
        (lambda texts: texts[-1].update(id="short"), "not the texts and blocks of the benchmark"),
    ],
)
def test_other_sums_with_the_right_seal_are_refused(root, change, said):
    put(root, "decode_quality.json", with_raw(change))
    with pytest.raises(SystemExit, match=re.escape(said)):
        summary_of(root)


def test_a_receipt_of_means_alone_is_refused(root):
    content = quality()
    del content["raw"]
    put(root, "decode_quality.json", content)
    with pytest.raises(SystemExit, match="no sums that its figures follow from"):
        summary_of(root)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_timeline_without_a_kernel_of_the_step_is_refused(root, name):
    put(root, "step_timeline.json", without(name))
    count = 2 if name == "absorb" else 0  # its other form
    with pytest.raises(SystemExit, match=f"{name} is launched {count} times, a step has "):
        summary_of(root)


def test_a_timeline_is_of_the_longest_sequences_that_speed_was_measured_with(root):
    for value in (None, 1088):
        put(root, "step_timeline.json", edited(timeline, "max_model_len", value=value))
        with pytest.raises(SystemExit, match=f"max_model_len is {value}, that of speed"):
            summary_of(root)
    (root / summarise.FOLDER / "speed.json").unlink()
    assert "small_ops_ms.c1" in summary_of(root)
