"""The demonstration's measurement: a receipt, shown and verified, that counts for the verdict."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from emberbox.cli import demo, demo_compress, demo_measure, demo_run
from emberbox.cli.main import main
from emberbox.cli.measure import write_receipt
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


@pytest.mark.parametrize(("max_kl", "code"), [(10.0, 0), (1e-9, 1)], ids=["near", "too far"])
def test_demo_fails_when_the_distance_is_too_large_and_json_carries_it(
    pair, monkeypatch, capsys, max_kl, code
):
    compressed = SimpleNamespace(is_right=True, to_dict=dict)
    monkeypatch.setattr(demo, "find_shipped", lambda _: pair[0])
    monkeypatch.setattr(demo_run, "ask_all", lambda *_: ())
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
