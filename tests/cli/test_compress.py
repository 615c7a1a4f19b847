"""The verb `compress`, as people and programs call it."""

import json
import re
from types import SimpleNamespace

import pytest

from emberbox.cli.main import main
from emberbox.compress import disk
from emberbox.compress.journal import JOURNAL_NAME
from emberbox.store.checksums import verify_checksums
from tests.helpers.nano import NANO


def test_plan_says_what_it_takes_and_writes_nothing(tmp_path, capsys):
    target = tmp_path / "out"
    assert main(["compress", str(NANO), str(target), "--recipe", "base2", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "exl3 mul1 at 2 bits" in said
    assert "memory for the calibration text" in said
    assert re.search(
        rf"disk: [\d.]+ .B needed, [\d.]+ .B free in {re.escape(str(tmp_path))}$", said, re.M
    )
    assert not target.exists()


@pytest.fixture
def as_json(capsys):
    def said(*argv):
        assert main(["compress", str(NANO), *map(str, argv), "--plan", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return said


def test_plan_counts_the_disk_that_the_work_will_ask_for(tmp_path, monkeypatch, as_json, capsys):
    argv = [tmp_path / "out", "--recipe", "fp8-block"]
    found = as_json(*argv)["disk"]
    assert found["place"] == str(tmp_path)
    assert found["free_bytes"] > found["needed_bytes"] > 16_410_824 + disk.OTHER_BYTES
    usage = SimpleNamespace(free=found["needed_bytes"])
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    assert as_json(*argv)["disk"]["free_bytes"] == found["needed_bytes"]
    usage.free -= 1
    for plan in (["--plan"], []):  # both refuse it, before anything is written
        assert main(["compress", str(NANO), *map(str, argv), *plan]) == 1
        assert f"{tmp_path}: 0.12 GB needed" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("mine.txt", "holds other files: mine.txt"), (JOURNAL_NAME, "holds the beginning of")],
)
def test_plan_refuses_a_folder_that_is_taken_as_the_work_would(tmp_path, capsys, name, said):
    (tmp_path / name).write_text("")
    argv = ["compress", str(NANO), str(tmp_path), "--recipe", "fp8-block"]
    errors = []
    for plan in (["--plan"], []):
        assert main([*argv, *plan]) == 1
        errors.append(capsys.readouterr().err)
    assert said in errors[0]
    assert errors[0] == errors[1]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_plan_takes_a_folder_that_is_to_be_resumed(tmp_path, as_json):
    (tmp_path / JOURNAL_NAME).write_text("")
    assert as_json(tmp_path, "--recipe", "fp8-block", "--resume")["folder"] is None


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
