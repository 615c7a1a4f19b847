"""The verb `tune`, as people and programs call it."""

import json
import os
import signal

import pytest

from emberbox.cli import tune as verb
from emberbox.cli.main import main
from emberbox.store.checksums import verify_checksums
from tests.helpers.nano import NANO

BASE2 = NANO.with_name("ember-nano-base2")
SMALL = ["--rows", "8", "--cols", "33", "--steps", "2", "--step-rows", "2", "--lr", "0.001"]
FLAGS = [*SMALL, "--device", "cpu", "--log-level", "error"]


def argv(target, *more):
    return ["tune", str(NANO), str(BASE2), str(target), *FLAGS, *more]


def test_json_says_what_was_gained(tmp_path, capsys):
    target = tmp_path / "parent" / "out"
    assert main(argv(target, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(target)
    assert found["num_bytes"] == 8_065_844
    assert found["tuned"] == {"scales": 766, "norms": 27}
    assert 0 < found["held_out_kl"]["written"] < found["held_out_kl"]["first"]
    assert found["held_out_kl"]["written_step"] in (1, 2)
    assert verify_checksums(target) > 0


def test_people_are_told_too_and_a_second_run_is_refused(tmp_path, capsys):
    target = tmp_path / "out"
    assert main(argv(target)) == 0
    said = capsys.readouterr().out
    assert said.startswith("held-out KL 0.")
    assert f"{target} is complete: emberbox serve {target}" in said
    before = (target / "README.md").read_bytes()
    assert b" --rows 8 --cols 33 --seed 1 --steps 2 --step-rows 2 --lr 0.001" in before
    assert main(argv(target)) == 1
    assert "is there already" in capsys.readouterr().err
    assert (target / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--steps", "0"], 2, "steps: 0, expected 1 or more"),
        (["--steps", "1000000000000"], 2, "steps: 1000000000000, expected at most 1,000,000"),
        (["--seed", "99999999999999999999999"], 2, "seed: 99999999999999999999999, expected at"),
        (["--lr", "2"], 2, "lr: 2.0"),
        (["--text", "/no/such.txt"], 2, "/no/such.txt: not there"),
        (["--device", "gpu"], 1, "'gpu' is not a device"),
        (["--step-rows", "100000000"], 1, "a step of 3,300,000,000 tokens"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    tmp_path, capsys, flags, code, said
):
    assert main(argv(tmp_path / "out", *flags)) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_writes_leaves_nothing(tmp_path, capsys, monkeypatch, number):
    moved, seen = verb._Bar.moved, []

    def end(bar, progress):
        moved(bar, progress)
        if progress.stage == "writing" and not seen:
            seen.extend(path.name for path in tmp_path.iterdir())
            os.kill(os.getpid(), number)

    monkeypatch.setattr(verb._Bar, "moved", end)
    former = signal.getsignal(number)
    assert main(argv(tmp_path / "out")) == 1
    assert capsys.readouterr().err == "interrupted; nothing is written\n"
    assert len(seen) == 1
    assert seen[0].startswith(".out-")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == former


def test_bad_usage(capsys):
    assert main(["tune", "a", "b"]) == 2
    assert "usage: emberbox tune" in capsys.readouterr().err
