"""The demonstration's measurement: a receipt, shown and verified, that counts for the verdict."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from emberbox.cli import demo, demo_compress, demo_measure, demo_run
from emberbox.cli.chat_client import Reply
from emberbox.cli.loading import LoadScreen
from emberbox.cli.main import main
from emberbox.cli.measure import write_receipt
from emberbox.settings import EngineSettings
from tests.helpers.nano import NANO
from tests.measure.tiny_pair import write_pair, write_panel

TINY_POSITIONS = 1 + 66 + 129


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two tiny models side by side under the names that the demonstration looks for."""
    reference, candidate = write_pair(tmp_path)
    monkeypatch.setattr(demo_measure, "PANEL", str(write_panel(tmp_path)))
    monkeypatch.setattr(demo_measure, "MAX_KL", 10.0)
    return reference, candidate.rename(tmp_path / demo.TWO_BITS)


def measured(pair):
    return demo_measure.measure_live(*pair, "cpu", Console(quiet=True))


def test_its_receipt_is_that_of_the_command_it_names(pair, tmp_path, monkeypatch, capsys):
    found = measured(pair)
    assert (found.is_right, found.problems) == (True, ())
    assert found.receipt["results"]["positions"] == TINY_POSITIONS
    assert found.receipt["runs"]["count"] == 2
    assert found.receipt["lane"] == "weights"
    command = shlex.split(found.receipt["command"])
    assert command[-2:] == ["--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    assert main([*command[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found.receipt


def test_it_takes_one_thread(pair):
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert measured(pair).receipt["device"]["num_threads"] == 1
    finally:
        torch.set_num_threads(num_threads)


def test_a_distance_beyond_the_bound_is_a_problem(pair, monkeypatch):
    kl = measured(pair).receipt["results"]["kl"]["value"]
    assert 0 < kl < 10
    monkeypatch.setattr(demo_measure, "MAX_KL", kl)
    assert measured(pair).is_right
    monkeypatch.setattr(demo_measure, "MAX_KL", kl * 0.99)
    found = measured(pair)
    assert not found.is_right
    assert found.problems == (f"mean KL is {kl:.4g} nats, expected at most {kl * 0.99}",)


def test_a_record_that_does_not_verify_is_a_problem(pair, monkeypatch):
    def write_and_damage(*args):
        receipt = write_receipt(*args)
        receipt.record_path.write_bytes(receipt.record_path.read_bytes()[:-1])
        return receipt

    monkeypatch.setattr(demo_measure, "write_receipt", write_and_damage)
    found = measured(pair)
    assert not found.is_right
    assert len(found.problems) == 1
    assert "demo.record.xz: ends too early" in found.problems[0]


def answers(num_right, of=4):
    """As asked of a served model: the first ones right."""
    reply = Reply(
        content="x",
        reasoning="",
        finish="stop",
        num_prompt_tokens=9,
        num_cached_tokens=0,
        num_completion_tokens=3,
        first_token_seconds=0.1,
        total_seconds=0.2,
    )
    return tuple(
        demo_run.Answer(
            name=f"q{n}", question="?", expected="x", is_right=n < num_right, reply=reply
        )
        for n in range(of)
    )


@pytest.mark.parametrize(
    ("first", "two_bits", "code"), [(4, 4, 0), (4, 3, 0), (4, 2, 1), (4, 0, 1), (3, 4, 1)]
)
def test_of_the_two_bit_answers_at_most_one_may_be_wrong(
    monkeypatch, capsys, first, two_bits, code
):
    good = SimpleNamespace(is_right=True, to_dict=dict)

    def ask_all(folder, *_):
        return answers(two_bits if folder.name == demo.TWO_BITS else first)

    monkeypatch.setattr(demo_run, "ask_all", ask_all)
    monkeypatch.setattr(demo_compress, "compress_live", lambda *_: good)
    monkeypatch.setattr(demo_measure, "measure_live", lambda *_: good)
    assert main(["demo", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["is_right"] is (code == 0)
    assert report["two_bits_right"] == {"count": two_bits, "at_least": 3}
    assert main(["demo"]) == code
    shown = capsys.readouterr().out
    verdict = "enough" if two_bits > 2 else "too few"
    assert f"at about two bits a weight: {two_bits} of 4 right, 3 are asked for: {verdict}" in shown


@pytest.mark.slow
def test_the_shipped_two_bits_answer_as_many_as_are_asked_for():
    settings = EngineSettings(device="cpu")
    screen = LoadScreen(Console(quiet=True), has_plan=False)
    found = demo_run.ask_all(NANO.with_name(demo.TWO_BITS), settings, screen, lambda _: None)
    assert len(found) == 4
    assert sum(answer.is_right for answer in found) >= demo.TWO_BITS_RIGHT


@pytest.mark.parametrize(("max_kl", "code"), [(10.0, 0), (1e-9, 1)], ids=["near", "too far"])
def test_demo_fails_when_the_distance_is_too_large_and_json_carries_it(
    pair, monkeypatch, capsys, max_kl, code
):
    compressed = SimpleNamespace(is_right=True, to_dict=dict)
    monkeypatch.setattr(demo, "find_shipped", lambda _: pair[0])
    monkeypatch.setattr(demo_run, "ask_all", lambda *_: answers(4))
    monkeypatch.setattr(demo_compress, "compress_live", lambda *_: compressed)
    monkeypatch.setattr(demo_measure, "MAX_KL", max_kl)
    assert main(["demo", "--json", "--device", "cpu"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["is_right"] is (code == 0)
    assert report["measured"]["is_right"] is (code == 0)
    assert len(report["measured"]["problems"]) == code
    assert report["measured"]["receipt"]["schema"] == "emberbox.fidelity.v1"
    assert report["measured"]["receipt"]["results"]["positions"] == TINY_POSITIONS
    assert main(["demo", "--device", "cpu"]) == code
    shown = capsys.readouterr().out
    assert "mean KL, nats" in shown
    assert ("the receipt is good" in shown) is (code == 0)
    assert ("mean KL is" in shown) is (code == 1)


@pytest.mark.slow
def test_the_shipped_two_bits_are_as_far_as_the_bound_was_made_for():
    found = demo_measure.measure_live(
        NANO, NANO.with_name(demo.TWO_BITS), "cpu", Console(quiet=True)
    )
    assert found.problems == ()
    assert found.receipt["panel"]["name"] == "nano-short"
    kl = found.receipt["results"]["kl"]["value"]
    assert demo_measure.MAX_KL / 4 < kl < demo_measure.MAX_KL / 2
