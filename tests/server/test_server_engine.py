"""Failures, cancelling and the queue, on a live server with a scripted engine."""

import json
import logging
import threading
import time

import openai
import pytest

from emberbox.errors import EnvironmentProblem, OpError
from tests.server.scripted import ScriptedEngine
from tests.server.wire import HI, eventually, raw_request, read_all, read_until, together


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (OpError("bad shape"), 500, "op_error"),
        (EnvironmentProblem("no memory"), 503, "environment_problem"),
        (ValueError("secret detail"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_engine_failure_ends_that_request_alone(start, caplog, failure, status, code):
    caplog.set_level(logging.CRITICAL)
    engine = ScriptedEngine()
    engine.fail_at, engine.failure = 0, failure
    live = start(engine)
    response = live.post()
    assert (response.status_code, live.error(response)["code"]) == (status, code)
    assert "secret" not in response.text
    engine.fail_at = None
    assert live.post().status_code == 200


def test_a_failure_in_mid_stream_is_an_error_event_and_no_done(start):
    engine = ScriptedEngine()
    engine.fail_at, engine.failure = 2, OpError("bad shape")
    live = start(engine)
    response = live.post(stream=True)
    last = [line for line in response.text.split("\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "op_error"
    assert "[DONE]" not in response.text
    with pytest.raises(openai.APIError, match="bad shape"):
        for _ in live.client.chat.completions.create(model="scripted", messages=HI, stream=True):
            pass


def test_one_failure_leaves_its_neighbours_alone(start):
    engine = ScriptedEngine(["</think>"] + ["x"] * 20, length=200)
    engine.fail_at, engine.failure = 5, OpError("not a number")
    engine.fails_when = lambda prompt: len(prompt.token_ids) == 3
    live = start(engine)
    codes: dict[int, int] = {}

    def ask(length: int) -> None:
        messages = [{"role": "user", "content": "x" * length}]
        codes[length] = live.post(messages=messages).status_code

    together([(ask, length) for length in range(1, 6)])
    assert codes == {1: 200, 2: 200, 3: 500, 4: 200, 5: 200}
    assert live.http.get("/health").status_code == 200


@pytest.mark.parametrize("failure", [OpError("broken"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_raises_ends_the_engine_and_health_says_so(start, caplog, failure):
    caplog.set_level(logging.CRITICAL + 1)
    engine = ScriptedEngine(["</think>", "x", "y", "z"])
    live = start(engine)
    assert live.http.get("/health").json()["status"] == "ok"
    assert live.metric("emberbox_engine_up") == 1
    engine.step_failure = failure
    response = live.post()
    assert (response.status_code, live.error(response)["code"]) == (503, "engine_stopped")
    health = live.http.get("/health")
    assert (health.status_code, live.error(health)["code"]) == (503, "engine_stopped")
    assert live.post().status_code == 503
    assert live.metric("emberbox_engine_up") == 0


def test_an_engine_that_dies_in_mid_stream_ends_every_stream_with_an_error(start, caplog):
    caplog.set_level(logging.CRITICAL + 1)
    engine = ScriptedEngine(["</think>"] + ["x"] * 9)
    engine.is_gated = True
    live = start(engine)
    connections = [raw_request(live.url, {"messages": HI, "stream": True}) for _ in range(3)]
    assert eventually(lambda: live.worker.num_open == 3)
    engine.gate.release(3)
    assert eventually(lambda: engine.num_steps == 3)
    engine.step_failure = RuntimeError("the device is gone")
    engine.gate.release(1)
    for connection in connections:
        received = read_all(connection)
        assert received.count(b"engine_stopped") == 1
        assert b"device is gone" not in received
        assert b"[DONE]" not in received
    assert live.worker.num_open == 0


def test_requests_run_side_by_side_and_a_full_queue_refuses(start):
    engine = ScriptedEngine(["</think>x"], num_slots=1)
    engine.is_gated = True
    live = start(engine, max_waiting=3)
    answers: dict[str, int] = {}

    def ask(name: str) -> None:
        answers[name] = live.post(messages=[{"role": "user", "content": name}]).status_code

    threads = []
    for i in range(1, 4):
        threads.append(threading.Thread(target=ask, args=("x" * i,)))
        threads[-1].start()
        assert eventually(lambda i=i: live.worker.num_open == i)
    refused = live.post()
    assert (refused.status_code, live.error(refused)["code"]) == (503, "server_overloaded")
    assert refused.headers["retry-after"] == "5"
    assert len(engine.chats) == 3  # the refused one was not even read
    for _ in threads:
        engine.gate.release()
    for thread in threads:
        thread.join(10)
    assert answers == {"x": 200, "xx": 200, "xxx": 200}
    assert [len(prompt.token_ids) for prompt, _ in engine.seen] == [1, 2, 3]


def test_comment_lines_keep_a_silent_stream_alive_from_the_start(start):
    engine = ScriptedEngine(["</think>", "x"])
    engine.is_gated = True
    live = start(engine, keepalive_seconds=0.05)
    with live.http.stream(
        "POST", "/v1/chat/completions", json={"messages": HI, "stream": True}
    ) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        engine.gate.release(2)
        rest = [line for line in lines if line.startswith("data")]
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_server_within_a_step(start, stream):
    engine = ScriptedEngine(["</think>"] + ["x"] * 1000, length=5000)
    engine.is_gated = True
    live = start(engine)
    connection = raw_request(live.url, {"messages": HI, "stream": stream})
    engine.gate.release(3)
    if stream:
        read_until(connection, b'"content":"x"')
    assert eventually(lambda: engine.num_steps == 3)
    connection.close()
    time.sleep(0.2)
    engine.gate.release(1)  # the step that was under way
    assert eventually(lambda: live.worker.num_open == 0)
    assert engine.num_steps <= 4
    assert len(engine.aborted) == 1
    assert live.worker.num_cancelled == 1
    engine.is_gated = False
    assert live.post(max_tokens=5).status_code == 200


def test_a_waiting_request_whose_client_left_never_runs(start):
    engine = ScriptedEngine(["</think>", "x"], num_slots=1)
    engine.is_gated = True
    live = start(engine)
    first = raw_request(live.url, {"messages": HI})
    assert eventually(lambda: live.worker.num_open == 1)
    second = raw_request(live.url, {"messages": [{"role": "user", "content": "gone"}]})
    assert eventually(lambda: live.worker.num_open == 2)
    second.close()
    time.sleep(0.2)
    engine.gate.release(2)
    assert b"200 OK" in first.recv(65536)
    first.close()
    assert eventually(lambda: live.worker.num_open == 0)
    assert len(engine.aborted) == 1
    assert engine.num_prompt == 2  # the tokens of the first alone


def test_closing_the_worker_ends_open_streams_with_an_error_event(start):
    engine = ScriptedEngine(["</think>"] + ["x"] * 100, length=500)
    engine.is_gated = True
    live = start(engine)
    engine.gate.release(2)
    connection = raw_request(live.url, {"messages": HI, "stream": True})
    received = read_until(connection, b'"content":"x"')
    closing = threading.Thread(target=live.worker.close)
    closing.start()
    engine.gate.release(1)
    closing.join(10)
    received += read_all(connection)
    assert b'"code":"engine_stopped"' in received
    assert b"[DONE]" not in received
