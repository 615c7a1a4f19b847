"""The verb `compress`, as people and programs call it."""

import json

import pytest

from emberbox.cli.main import main
from emberbox.store.checksums import verify_checksums
from tests.helpers.nano import NANO


def test_plan_says_what_it_takes_and_writes_nothing(tmp_path, capsys):
    target = tmp_path / "out"
    assert main(["compress", str(NANO), str(target), "--recipe", "base2", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "exl3 mul1 at 2 bits" in said
    assert "memory for the calibration text" in said
    assert not target.exists()


def test_json_names_the_folder_and_its_size(tmp_path, capsys):
    target = tmp_path / "out"
    argv = ["compress", str(NANO), str(target), "--recipe", "fp8-block", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(target)
    assert found["calibration"] is None
    assert found["num_bytes"] == 16_410_824
    assert verify_checksums(target) > 0
    # Once more on a folder that is whole: it says so, and nothing is lost.
    assert main([*argv, "--resume"]) == 0
    assert verify_checksums(target) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--recipe", "base9"], "base9"),
        (["--recipe", "base2", "--rows", "0"], "rows: 0, expected 1 or more"),
        (["--recipe", "base2", "--cols", "1"], "cols: 1, expected 2 or more"),
        (["--recipe", "base2", "--seed", "-1"], "seed: -1, expected 0 or more"),
        (["--recipe", "base2", "--text", "/no/such.txt"], "/no/such.txt: not there"),
    ],
)
def test_bad_usage_is_said_before_anything_is_written(tmp_path, capsys, flags, said):
    target = tmp_path / "out"
    assert main(["compress", str(NANO), str(target), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not target.exists()


def test_more_memory_than_there_is_is_refused(tmp_path, capsys):
    target = tmp_path / "out"
    flags = ["--recipe", "base2", "--group-bytes", str(1 << 60)]
    assert main(["compress", str(NANO), str(target), *flags]) == 1
    assert "memory are free" in capsys.readouterr().err
    assert not target.exists()


def test_a_folder_inside_the_source_is_refused(capsys):
    target = NANO / "out"
    assert main(["compress", str(NANO), str(target), "--recipe", "fp8-block"]) == 2
    assert str(target) in capsys.readouterr().err
    assert not target.exists()
