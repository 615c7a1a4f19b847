"""`emberbox chat`: from a pipe, as lines of JSON, and typed at a pseudo-terminal."""

import base64
import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from emberbox.cli.chat_client import Piece, ReplyStream, connect
from emberbox.cli.chat_session import _Screen
from emberbox.cli.demo_questions import picture_data_uri
from emberbox.cli.loading import LoadScreen
from emberbox.cli.local_server import local_server
from emberbox.cli.main import main
from emberbox.errors import EnvironmentProblem
from emberbox.server.app import create_app
from emberbox.server.listen import BackgroundServer, bind
from emberbox.server.worker import EngineWorker
from emberbox.settings import EngineSettings, ServeSettings
from tests.cli.test_cli import NANO, ROOT
from tests.server.scripted import ScriptedEngine

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "80"}
COUNT = "Count from 3 to 9."
COUNTED = "3, 4, 5, 6, 7, 8, 9"


@pytest.fixture(scope="module")
def url():
    screen = LoadScreen(Console(quiet=True), has_plan=False)
    with local_server(NANO, EngineSettings(device="cpu"), screen) as address:
        yield address


def chat(monkeypatch, words: list[str], data: bytes) -> int:
    """Exit code of the verb with `data` on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return main(["chat", *words])


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_a_question_through_a_pipe_to_a_folder_gets_the_answer_alone():
    done = subprocess.run(
        [sys.executable, "-m", "emberbox", "chat", str(NANO), "--device", "cpu"],
        input=f"{COUNT}\n",
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{COUNTED}\n", "")


def test_all_lines_of_a_pipe_are_one_question(url, monkeypatch, capsys):
    before = metric(url, "emberbox_prompt_tokens_total")
    assert chat(monkeypatch, [url], b"Count\nfrom 3 to 9.\n") == 0
    assert capsys.readouterr().out == f"{COUNTED}\n"
    assert metric(url, "emberbox_prompt_tokens_total") - before == 19


def test_the_thought_is_not_part_of_the_answer(url, monkeypatch, capsys):
    assert chat(monkeypatch, [f"{url}/v1/"], b"What is 2+3?") == 0
    assert capsys.readouterr().out == "5\n"


def test_with_json_each_line_is_a_turn_of_one_conversation(url, monkeypatch, capsys):
    assert chat(monkeypatch, [url, "--json"], f"{COUNT}\n\nWhat is 2+3?\n".encode()) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["content"], first["reasoning"], first["finish"]) == (COUNTED, "", "stop")
    assert (second["content"], second["finish"]) == ("5", "stop")
    assert "2+3=5" in second["reasoning"]
    assert first["num_completion_tokens"] == 21
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + 21
    assert 0 < first["first_token_seconds"] < first["total_seconds"]
    assert first["tokens_per_second"] > 0


def test_think_off_gives_no_thought(url, monkeypatch, capsys):
    assert chat(monkeypatch, [url, "--json", "--think", "off"], b"What is 2+3?\n") == 0
    assert json.loads(capsys.readouterr().out)["reasoning"] == ""


def test_a_picture_is_sent_with_the_first_message(url, monkeypatch, capsys, tmp_path):
    path = tmp_path / "circles.png"
    path.write_bytes(base64.b64decode(picture_data_uri().partition(",")[2]))
    assert chat(monkeypatch, [url, "--image", str(path)], b"Describe the image.") == 0
    assert capsys.readouterr().out == "Three red circles on a white background.\n"


def test_a_cut_answer_is_said_to_be_cut_beside_it(url, monkeypatch, capsys):
    assert chat(monkeypatch, [url, "--max-tokens", "4"], COUNT.encode()) == 0
    printed = capsys.readouterr()
    assert COUNTED.startswith(printed.out.strip())
    assert "cut at the limit" in printed.err


@pytest.mark.parametrize(
    ("words", "data", "reason"),
    [
        ([], b" \n", "holds no question"),
        ([], b"caf\xe9", "not UTF-8"),
        (["--temperature", "-1"], b"hi", "temperature"),
        (["--image", "none.png"], b"hi", "none.png: cannot be read"),
    ],
    ids=["empty", "latin-1", "temperature", "image"],
)
def test_what_cannot_be_asked_is_exit_code_1(url, monkeypatch, capsys, words, data, reason):
    assert chat(monkeypatch, [url, *words], data) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert reason in printed.err


def test_where_no_server_answers_it_says_how_to_start_one(monkeypatch, capsys):
    with bind("127.0.0.1", 0) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert chat(monkeypatch, [address], b"hi") == 1
    shown = capsys.readouterr().err
    assert f"{address}: no server answers there" in shown
    assert "emberbox serve PATH" in shown


def test_a_server_that_dies_in_a_reply_is_exit_code_1_after_what_came():
    command = [sys.executable, "-m", "emberbox"]
    serve = [*command, "serve", str(NANO), "--port", "0", "--json", "--device", "cpu"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=ENVIRON) as server:
        address = json.loads(server.stdout.readline())["url"]
        with subprocess.Popen(
            [*command, "chat", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRON,
        ) as asking:
            asking.stdin.write(b"Count from 1 to 300.")
            asking.stdin.close()
            first = asking.stdout.read(1)
            server.kill()
            error = asking.stderr.read().decode()
    assert first == b"1"
    assert asking.returncode == 1
    assert f"error: {address}: the reply broke off" in error


@pytest.fixture
def guarded():
    """A server that wants the key "sesame"."""
    with EngineWorker(ScriptedEngine(), max_waiting=4) as worker:
        app = create_app(worker, ServeSettings(api_key="sesame"))
        with BackgroundServer(app, bind("127.0.0.1", 0)) as server:
            yield server.url


def test_the_key_comes_from_the_environment(guarded, monkeypatch, capsys):
    assert chat(monkeypatch, [guarded], b"hi") == 1
    assert "the API key is missing or wrong" in capsys.readouterr().err
    monkeypatch.setenv("EMBERBOX_API_KEY", "sesame")
    assert chat(monkeypatch, [guarded], b"hi") == 0
    assert capsys.readouterr().out.strip() != ""


def test_without_a_target_the_server_of_the_settings_is_asked(url, monkeypatch, capsys):
    monkeypatch.setenv("EMBERBOX_HOST", "0.0.0.0")
    monkeypatch.setenv("EMBERBOX_PORT", url.rpartition(":")[2])
    assert chat(monkeypatch, [], COUNT.encode()) == 0
    assert capsys.readouterr().out == f"{COUNTED}\n"


def test_a_stream_that_ends_without_a_finish_is_an_error():
    stream = ReplyStream([], time.perf_counter())
    with pytest.raises(EnvironmentProblem, match="broke off"):
        list(stream)
    assert stream.reply().finish is None


@pytest.fixture(scope="module")
def scripted_url():
    """A server that says "Hello"; its model is not loaded."""
    with EngineWorker(ScriptedEngine(), max_waiting=4) as worker:
        app = create_app(worker, ServeSettings())
        with BackgroundServer(app, bind("127.0.0.1", 0)) as server:
            yield server.url


@pytest.mark.parametrize("mode", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("kind", ["closed pipe", "full device"])
def test_our_own_output_that_fails_is_not_laid_on_the_server(scripted_url, kind, mode):
    if kind == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    elif Path("/dev/full").exists():
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        pytest.skip("no /dev/full here")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "emberbox", "chat", scripted_url, *mode],
            input=b"hi\n",
            stdout=writing,
            stderr=subprocess.PIPE,
            env=ENVIRON,
            timeout=60,
        )
    finally:
        os.close(writing)
    error = done.stderr.decode()
    assert (done.returncode, error.count("\n")) == (1, 1)
    assert error.startswith("error: standard output: ")
    assert scripted_url not in error


def test_what_the_reader_of_a_stream_raises_stays_what_it_is(scripted_url):
    with (
        connect(scripted_url, None) as client,
        pytest.raises(ZeroDivisionError),
        client.ask([{"role": "user", "content": "hi"}], {}) as stream,
    ):
        for _ in stream:
            raise ZeroDivisionError


def test_a_terminal_is_not_steered_by_what_a_model_writes():
    out = io.StringIO()
    screen = _Screen(Console(file=out, force_terminal=True, highlight=False, soft_wrap=True))
    screen.show(Piece("a\x1b]0;title\x07[red]\n\tb\x9b2J", False))
    screen.end_reply()
    assert out.getvalue() == "a�]0;title�[red]\n        b�2J\n"


# Makes the terminal it was given the one that Ctrl-C comes from, then becomes the command.
TAKE_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`emberbox chat` at a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.fd, inner = pty.openpty()
        command = [sys.executable, "-c", TAKE_TERMINAL, "-m", "emberbox", "chat", *words]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=ENVIRON, start_new_session=True
        )
        os.close(inner)
        self.shown, self._read_to = "", 0

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def until(self, text: str) -> str:
        """What came since the last call, up to and with `text`."""
        deadline = time.monotonic() + 60
        while (at := self.shown.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown[self._read_to :]!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                self.shown += os.read(self.fd, 65536).decode("utf-8", "replace")
        start, self._read_to = self._read_to, at + len(text)
        return self.shown[start : self._read_to]

    def end(self) -> int:
        """The exit code; what is left of the output is read."""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self.fd, 65536):
                self.shown += data.decode("utf-8", "replace")
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(url):
    terminal = Terminal(url)
    terminal.until("/help lists the commands")
    terminal.until("> ")
    yield terminal
    terminal.close()


def test_a_reply_is_streamed_with_its_thought_dim_and_its_speed_below(terminal):
    terminal.type("What is 2+3?\n")
    reply = terminal.until("from the cache")
    assert "\x1b[2mthinking: \x1b[0m" in reply
    assert "\x1b[0m\r\n5\r\n\x1b[2m13 tokens at " in reply
    assert "; the first after " in reply
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_commands_are_obeyed_and_errors_leave_the_chat_open(terminal, tmp_path):
    path = tmp_path / "talk.md"
    for line, answer in (
        ("/help", "Ctrl-C stops a reply."),
        ("/think off", "thinking is off"),
        (f"/image {tmp_path}/none.png", "none.png: cannot be read: No such file"),
        ("/dance", "hint: /help lists them"),
        ("Count \\\nfrom 3 to 9.", "\n3, 4, 5, 6, 7, 8, 9\r\n"),
        (f"/save {path}", "1 turns written to"),
        ("/reset", "forgotten"),
    ):
        terminal.type(f"{line}\n")
        terminal.until(answer)
        terminal.until("> ")
    terminal.type("/quit\n")
    assert terminal.end() == 0
    assert (
        path.read_text("utf-8") == f"## user\n\nCount \nfrom 3 to 9.\n\n## assistant\n\n{COUNTED}\n"
    )


def test_ctrl_c_stops_the_reply_here_and_on_the_server_and_keeps_the_chat(terminal, url):
    cancelled = metric(url, "emberbox_requests_cancelled_total")
    terminal.type("Count from 1 to 300.\n")
    terminal.until("\n1, 2, 3, ")
    terminal.type("\x03")
    terminal.until("stopped after ")
    terminal.until("> ")
    deadline = time.monotonic() + 30
    while metric(url, "emberbox_requests_cancelled_total") != cancelled + 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert metric(url, "emberbox_requests_running") == 0
    terminal.type("half a line\x03")
    terminal.until("Ctrl-D or /quit ends the chat")
    terminal.until("> ")
    terminal.type(f"{COUNT}\n")
    terminal.until(f"\n{COUNTED}\r\n")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
