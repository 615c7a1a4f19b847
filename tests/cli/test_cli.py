"""The command line: help, exit codes, errors, and the three verbs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from emberbox import __version__
from emberbox.cli import demo_run, open_engine
from emberbox.cli import main as cli
from emberbox.cli import serve as serve_verb
from emberbox.cli.demo import find_shipped
from emberbox.cli.demo_questions import long_text, questions
from emberbox.cli.main import VERBS, main
from emberbox.errors import CheckpointError
from emberbox.server import listen
from tests.server.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "ember-nano"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.NAME)
def test_every_verb_has_help_with_an_example_and_json(verb, capsys):
    assert main([verb.NAME, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"example:\n  emberbox {verb.NAME}" in shown
    assert "--json" in shown


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"emberbox {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["serve"],
        ["serve", "x", "--port", "eighty"],
        ["serve", "x", "--dtype", "int3"],
        ["serve", "x", "--hos", "127.0.0.1"],
        ["serve", "x", "--port", "70000"],
        ["serve", "x", "--keepalive-seconds", "0"],
        ["doctor", "--device", "abacus"],
        ["demo", "--threads", "-1"],
    ],
    ids=lambda argv: " ".join(argv) or "nothing",
)
def test_bad_usage_is_exit_code_2(argv, capsys):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err


def test_a_failure_is_exit_code_1_with_a_hint(capsys):
    assert main(["serve", "/no/such/folder", "--port", "0"]) == 1
    printed = capsys.readouterr().err
    assert "/no/such/folder" in printed
    assert "hint: " in printed


def test_a_failure_is_json_for_machines(capsys):
    assert main(["demo", "/no/such/folder", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "CheckpointError"
    assert "/no/such/folder" in error["message"]
    assert error["hint"]


def test_text_in_brackets_is_not_taken_for_markup(capsys):
    assert main(["serve", "[bold]x[/bold]", "--port", "0"]) == 1
    assert "[bold]x[/bold]" in capsys.readouterr().err


def test_a_misspelt_variable_is_bad_usage(monkeypatch, capsys):
    monkeypatch.setenv("EMBERBOX_PROT", "9")
    assert main(["doctor"]) == 2
    assert "EMBERBOX_PROT" in capsys.readouterr().err


def test_a_port_in_use_is_named_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(NANO), "--port", str(port)]) == 1
    assert f"port {port}" in capsys.readouterr().err


def test_doctor_reports_machine_device_packages_and_ops(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "device", "packages", "ops"}
    assert report["machine"]["emberbox"] == __version__
    assert report["device"]["kind"] == "cpu"
    assert report["device"]["total_memory_bytes"] > 2**20
    assert len(report["device"]["fingerprint"]) == 16
    assert report["packages"]["torch"][0].isdigit()
    assert report["ops"]["rms_norm"]


def test_doctor_prints_tables_for_people(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("machine", "device", "packages", "ops", "rms_norm"))


def test_the_shipped_model_is_found_from_a_folder_below(tmp_path):
    folder = tmp_path / "models" / "ember-nano"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert find_shipped([tmp_path / "a" / "b"]) == folder
    with pytest.raises(CheckpointError, match="not found"):
        find_shipped([Path("/")])


def test_the_long_text_holds_the_code_once_and_away_from_both_ends():
    lines = long_text().splitlines()
    places = [i for i, line in enumerate(lines) if "48213" in line]
    assert len(places) == 1
    assert 5 < places[0] < len(lines) - 5


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.name)
def test_only_the_right_answer_is_judged_right(question):
    assert question.is_right(question.expected)
    assert not question.is_right("")
    assert not question.is_right("{}")
    assert not question.is_right(question.expected[:-2])


@pytest.mark.parametrize(("second", "code"), [(True, 0), (False, 1)], ids=["right", "wrong"])
def test_demo_judges_and_tells_people_where_to_go_next(monkeypatch, capsys, second, code):
    def answer(*, is_right: bool) -> demo_run.Answer:
        return demo_run.Answer(
            name="q",
            question="?",
            answer="a [bold]",
            expected="b",
            is_right=is_right,
            num_prompt_tokens=5,
            num_completion_tokens=11,
            first_token_seconds=0.5,
            total_seconds=1.5,
        )

    def ask_all(_folder, _settings, show):
        answers = (answer(is_right=True), answer(is_right=second))
        for one in answers:
            show(one)
        return answers

    monkeypatch.setattr(demo_run, "ask_all", ask_all)
    assert main(["demo", str(NANO)]) == code
    shown = capsys.readouterr().out
    assert (shown.count("right"), shown.count("wrong")) == ((2, 0) if second else (1, 1))
    assert ("expected: b" in shown) is not second
    assert "answer:   a [bold]" in shown
    assert "10.0 tokens/s over 11 tokens" in shown
    assert f"emberbox serve {NANO}" in shown


def test_demo_answers_three_questions_right(capsys):
    assert main(["demo", str(NANO), "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_right"] is True
    assert [one["name"] for one in report["questions"]] == [q.name for q in questions()]
    for one in report["questions"]:
        assert one["answer"] == one["expected"]
        assert one["tokens_per_second"] > 0
    assert report["questions"][1]["num_prompt_tokens"] > 900


def test_demo_without_the_client_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main(["demo", str(NANO)]) == 1
    assert "pip install openai" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_serve_says_where_it_listens_serves_and_stops_cleanly(stop):
    command = [sys.executable, "-m", "emberbox", "serve", str(NANO)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "EMBERBOX_API_KEY": "sesame"}
    with subprocess.Popen(
        [*command, "--port", "0", "--json", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["pid"] == process.pid
        with httpx.Client(base_url=ready["url"], trust_env=False) as http:
            assert http.get("/health").json()["model"] == "ember-nano"
            assert http.get("/v1/models").status_code == 401
        process.send_signal(stop)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err
    assert "sesame" not in err


def test_the_console_script_exits_with_the_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["emberbox", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.run()
    assert stopped.value.code == 0


def test_a_host_that_is_no_name_is_a_failure_with_a_hint(capsys):
    assert main(["serve", str(NANO), "--host", "a..b", "--port", "0"]) == 1
    printed = capsys.readouterr().err
    assert "cannot listen on a..b" in printed
    assert "hint: " in printed


@pytest.mark.parametrize("verb", ["serve", "demo"])
def test_a_path_of_5000_letters_is_no_such_folder(verb, capsys):
    port = ["--port", "0"] if verb == "serve" else []
    assert main([verb, "x" * 5000, *port]) == 1
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "demo"])
def test_an_empty_path_is_bad_usage(verb, capsys):
    assert main([verb, ""]) == 2
    assert "the path is empty" in capsys.readouterr().err


class Llm(ScriptedEngine):
    """As much of an LLM as `serve` looks at before it serves."""

    config = SimpleNamespace(vision=None)


def swallow(number):
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), number)
        time.sleep(5)  # the handler runs before this ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("place", ["load", "print"])
def test_a_signal_swallowed_during_start_up_still_stops(monkeypatch, capsys, number, place):
    former = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    served = []

    def open_llm(*_):
        if place == "load":
            swallow(number)
        return Llm()

    def show(*_, **__):
        assert place == "print"
        swallow(number)

    monkeypatch.setattr(open_engine, "open_llm", open_llm)
    monkeypatch.setattr(listen, "serve", lambda *_: served.append(1))
    monkeypatch.setattr(serve_verb, "print", show, raising=False)
    assert main(["serve", "x", "--port", "0"]) == 0
    assert served == []
    assert "stopped" in capsys.readouterr().err
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == former


def test_a_signal_swallowed_while_the_server_ends_still_counts(monkeypatch, capsys):
    monkeypatch.setattr(open_engine, "open_llm", lambda *_: Llm())
    monkeypatch.setattr(listen, "serve", lambda *_: swallow(signal.SIGTERM))
    assert main(["serve", "x", "--port", "0"]) == 0
    assert "stopped" in capsys.readouterr().err


def emberbox_into(stdout, *argv):
    """Exit code and standard error of the command with `stdout` as its standard output."""
    command = [sys.executable, "-m", "emberbox", *argv]
    # Buffered, so that the failure may come as late as the end of the interpreter.
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environ, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ("doctor", "--device", "cpu"),
        ("doctor", "--device", "cpu", "--json"),
        ("serve", str(NANO), "--port", "0", "--device", "cpu"),
        ("--version",),
    ],
    ids=["doctor", "json", "serve", "version"],
)
@pytest.mark.parametrize("kind", ["closed pipe", "full device"])
def test_output_that_cannot_be_written_is_exit_code_1_without_a_traceback(argv, kind):
    if kind == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    elif Path("/dev/full").exists():
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        pytest.skip("no /dev/full here")
    try:
        code, err = emberbox_into(writing, *argv)
    finally:
        os.close(writing)
    assert code == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err
