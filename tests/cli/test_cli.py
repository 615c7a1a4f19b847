"""The command line: help, exit codes, errors, and the verbs (`chat`: test_chat.py)."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from emberbox import __version__
from emberbox.cli import demo_run, open_engine
from emberbox.cli import main as cli
from emberbox.cli import serve as serve_verb
from emberbox.cli.chat_client import Reply
from emberbox.cli.demo import find_shipped
from emberbox.cli.demo_questions import follow_up, long_text, questions
from emberbox.cli.main import VERBS, main
from emberbox.errors import CheckpointError, EnvironmentProblem
from emberbox.ops import build as build_module
from emberbox.ops.check import Checked
from emberbox.ops.table import OPS
from emberbox.server import listen
from emberbox.server.metrics import Metrics
from emberbox.server.worker import EngineWorker
from tests.server.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "ember-nano"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.NAME)
def test_every_verb_has_help_with_an_example_and_json(verb, capsys):
    assert main([verb.NAME, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"example:\n  emberbox {verb.NAME}" in shown
    assert "--json" in shown


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("verb", ["doctor", "measure", "receipt", "compress"])
def test_an_interrupt_is_said_and_has_the_exit_code_of_shells(monkeypatch, capsys, verb, as_json):
    argv = {
        "doctor": ["doctor"],
        "measure": ["measure", "speed", str(NANO), "--engine"],
        "receipt": ["receipt", "show", "a.json"],
        "compress": ["compress", str(NANO), "to", "--recipe", "base2"],
    }[verb]

    def interrupted(_):
        raise KeyboardInterrupt

    module = next(each for each in VERBS if verb == each.NAME)
    monkeypatch.setattr(module, "run", interrupted)
    assert main([*argv, "--json"] if as_json else argv) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert main(["--help"]) == 0
    assert "130 interrupted" in " ".join(capsys.readouterr().out.split())


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
        ["chat", "http://127.0.0.1:9", "--device", "cpu"],
        ["chat", "--max-running", "2"],
        ["chat", "http://"],
        ["chat", "http://[::1"],
        ["chat", "x", "--think", "hard"],
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
    assert set(report) == {"machine", "device", "packages", "ops", "kernels"}
    assert report["machine"]["emberbox"] == __version__
    assert report["device"]["kind"] == "cpu"
    assert report["device"]["total_memory_bytes"] > 2**20
    assert len(report["device"]["fingerprint"]) == 16
    assert report["packages"]["torch"][0].isdigit()
    # Everything that pyproject.toml lets a user install, what only developers need aside.
    project = tomllib.loads((NANO.parents[1] / "pyproject.toml").read_text())["project"]
    extras = [
        r
        for n, found in project["optional-dependencies"].items()
        if n not in ("dev", "docs")
        for r in found
    ]
    needed = {re.match(r"[\w-]+", line)[0] for line in (*project["dependencies"], *extras)}
    assert needed - {"emberbox"} <= set(report["packages"])
    assert report["ops"]["rms_norm"]
    norm = report["kernels"]["rms_norm (cpu, float32)"]
    assert 0 < norm["error"] <= norm["tolerance"] == OPS["rms_norm"].tolerance[torch.float32]
    assert all(facts["is_right"] for facts in report["kernels"].values())


def test_doctor_prints_tables_for_people(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("machine", "device", "packages", "ops", "rms_norm"))
    assert "kernels against their references" in shown
    assert "WRONG" not in shown


def test_doctor_fails_where_a_kernel_is_wrong(monkeypatch, capsys):
    off = Checked("linear", "fast", {"T": 3}, torch.float32, 2e-3, 1e-3, "at (0, 1): got 1.0")
    lost = replace(off, op="swiglu", error=math.inf)
    monkeypatch.setattr("emberbox.ops.check.check_kernels", lambda *_: iter([off, lost]))
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "2.0e-03" in shown
    assert "not finite" in shown
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["kernels"]
    assert found["linear (fast, float32)"] == {
        "error": 2e-3,
        "tolerance": 1e-3,
        "is_right": False,
        "mismatch": "at (0, 1): got 1.0",
        "case": {"T": 3},
    }
    assert found["swiglu (fast, float32)"]["error"] is None


def test_doctor_says_why_kernels_cannot_be_checked(monkeypatch, capsys):
    def missing(*_):
        raise EnvironmentProblem("no compiler here")

    monkeypatch.setattr("emberbox.ops.check.check_kernels", missing)
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["kernels"]
    assert "no compiler here" in found["all"]["mismatch"]


def test_doctor_builds_every_kernel_for_machines_other_than_this_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(build_module, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(build_module, "_runtime_headers", lambda: (tmp_path, "13.0.1"))
    monkeypatch.setattr(build_module, "compile_cubin", lambda source, arch: arch.encode())
    monkeypatch.setenv("EMBERBOX_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--build", "sm_90,sm_121", "--jobs", "1", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert {Path(kernel["path"]) for kernel in kernels} == set((tmp_path / "cache").iterdir())
    assert [kernel["arch"] for kernel in kernels] == ["sm_90"] * 309 + ["sm_121"] * 309
    names = Counter(kernel["kernel"] for kernel in kernels)
    trellis = {"rotated_linear": 120, "rotated_swiglu": 84, "trellis_search": 22}
    assert names.items() >= {"linear_exl3": 120, "moe_decode": 168, "moe_prefill": 42}.items()
    assert names.items() >= trellis.items()
    assert (len(names), names["kda_decode"], names["mla_attend"]) == (18, 4, 8)
    assert main(["doctor", "--build", "sm_90", "--jobs", "1"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 309
    assert main(["doctor", "--build", "sm_90", "--jobs", "0"]) == 2
    assert "is not a number of at least 1" in capsys.readouterr().err
    assert main(["doctor", "--build", "sm_90,sm_90", "--jobs", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 309
    assert main(["doctor", "--build", "sm_90,"]) == 2
    said = capsys.readouterr().err
    assert "--build: an empty name in 'sm_90,'" in said
    assert "expected one such as sm_90 or sm_121" in said
    assert main(["doctor", "--build", "sm_９０"]) == 2
    monkeypatch.setenv("EMBERBOX_CACHE", "~no-such-user/x")
    assert main(["doctor", "--build", "sm_90"]) == 2
    assert "EMBERBOX_CACHE: '~no-such-user/x'" in capsys.readouterr().err
    assert main(["doctor", "--jobs", "2"]) == 2
    assert "--jobs: without --build" in capsys.readouterr().err


def test_doctor_says_what_to_install_where_nothing_compiles(monkeypatch, capsys, tmp_path):
    build_module.nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setenv("EMBERBOX_CACHE", str(tmp_path))
    assert main(["doctor", "--build", "sm_90"]) == 1
    assert "pip install 'emberbox[cuda]'" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "question", [*questions(), follow_up()], ids=lambda question: question.name
)
def test_only_the_right_answer_is_judged_right(question):
    assert question.is_right(question.expected)
    assert not question.is_right("")
    assert not question.is_right("{}")
    assert not question.is_right(question.expected[:-2])


@pytest.mark.parametrize(("second", "code"), [(True, 0), (False, 1)], ids=["right", "wrong"])
def test_demo_judges_and_tells_people_where_to_go_next(monkeypatch, capsys, second, code):
    def answer(*, is_right: bool) -> demo_run.Answer:
        reply = Reply(
            content="a [bold]",
            reasoning="",
            finish="stop",
            num_prompt_tokens=5,
            num_cached_tokens=3,
            num_completion_tokens=11,
            first_token_seconds=0.5,
            total_seconds=1.5,
        )
        return demo_run.Answer(name="q", question="?", expected="b", is_right=is_right, reply=reply)

    def ask_all(_folder, _settings, _screen, show):
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
    speed = (
        "11 tokens at 10.0 tokens/s; the first after 0.50 s, 3 of 5 prompt tokens from the cache"
    )
    assert speed in shown
    assert f"emberbox serve {NANO}" in shown
    assert f"emberbox chat {NANO}" in shown


def test_demo_answers_its_questions_right_and_the_second_turn_from_the_cache(capsys):
    assert main(["demo", str(NANO), "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_right"] is True
    listing, code, picture = questions()
    names = [question.name for question in (listing, code, follow_up(), picture)]
    assert [one["name"] for one in report["questions"]] == names
    for one in report["questions"]:
        assert one["answer"] == one["expected"]
        assert one["tokens_per_second"] > 0
    first, second = report["questions"][1:3]
    assert (first["num_prompt_tokens"] > 900, first["num_cached_tokens"]) == (True, 0)
    assert second["num_cached_tokens"] > first["num_prompt_tokens"]
    assert second["num_prompt_tokens"] - second["num_cached_tokens"] < 64


@pytest.mark.parametrize("verb", ["demo", "chat"])
def test_without_the_client_it_says_what_to_install(monkeypatch, capsys, verb):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main([verb, str(NANO)]) == 1
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


def test_serve_shows_people_the_memory_plan_and_then_where_it_listens():
    command = [sys.executable, "-m", "emberbox", "serve", str(NANO), "--port", "0"]
    with subprocess.Popen(
        [*command, "--device", "cpu", "--max-running", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        ready = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert ready.startswith("serving ember-nano at http://127.0.0.1:")
    assert (process.returncode, out) == (0, "")
    sizes = {line.split("│")[1].strip(): line for line in err.splitlines() if line.count("│") > 2}
    assert {"weights", "cache pages", "state slots", "snapshots", "total"} <= set(sizes)
    assert "3 of " in sizes["state slots"]
    assert "available" in sizes["total"]


def test_what_does_not_fit_is_refused_with_the_plan_and_the_flag_to_lower(capsys):
    argv = ["serve", str(NANO), "--port", "0", "--device", "cpu", "--cache-tokens", str(10**12)]
    assert main(argv) == 1
    shown = capsys.readouterr().err
    assert "error: this does not fit into " in shown
    sizes = dict(re.findall(r"^(cache pages|total) +([\d,]+) ", shown, re.MULTILINE))
    assert sizes["cache pages"] == "1,280,000,000,000,000"  # 1,280 bytes a token
    assert sizes["total"].startswith("1,280,00")
    assert "hint: lower --cache-tokens to " in shown


def test_a_refusal_for_machines_is_one_line_of_json(capsys):
    argv = ["serve", str(NANO), "--port", "0", "--device", "cpu", "--cache-tokens", str(10**12)]
    assert main([*argv, "--json"]) == 1
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["kind"] == "MemoryRefused"
    assert "cache pages" in error["message"]
    assert printed.err == ""


def test_the_help_of_serve_and_the_page_on_operating_name_every_route(capsys):
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    source = (ROOT / "src" / "emberbox" / "server" / "app.py").read_text(encoding="utf-8")
    routes = re.findall(r'\("(/[^"]+)", routes\.', source)
    assert len(routes) == 5
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert [route for route in routes if route not in shown or f"{route}`" not in page] == []
    assert "/v1/models/NAME" in shown


def test_the_page_on_operating_names_every_metric():
    with EngineWorker(ScriptedEngine(), max_waiting=1) as worker:
        families = list(Metrics(worker).registry.collect())
    kept = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert len(kept) > 15
    assert set(re.findall(r"`(emberbox_\w+)`", page)) == kept


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


@pytest.mark.parametrize("_turn", range(4))
def test_a_request_right_after_the_ready_line_is_answered(monkeypatch, _turn):
    received, threads = [], []

    def finish(connection):
        with connection:
            while data := connection.recv(65536):
                received.append(data)
        os.kill(os.getpid(), signal.SIGINT)

    def show(line, **_):
        # Here nothing runs the server yet: the system alone holds on to who connects.
        port = int(re.search(r":(\d+)/v1", line)[1])
        connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        threads.append(threading.Thread(target=finish, args=(connection,)))
        threads[0].start()

    monkeypatch.setattr(open_engine, "open_llm", lambda *_: Llm())
    monkeypatch.setattr(serve_verb, "print", show, raising=False)
    assert main(["serve", "x", "--port", "0"]) == 0
    threads[0].join(20)
    assert b"".join(received).startswith(b"HTTP/1.1 200")


def test_a_model_with_a_vision_tower_takes_pictures_and_clips():
    blind, seeing = (SimpleNamespace(config=SimpleNamespace(vision=v)) for v in (None, object()))
    assert open_engine.input_modalities(blind) == ("text",)
    assert open_engine.input_modalities(seeing) == ("text", "image", "video")


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
