"""Answers, streams, limits, failures and cancelling, on a live server with a scripted engine."""

import json
import logging
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from emberbox.engine.request import FinishReason
from emberbox.errors import EnvironmentProblem, OpError
from tests.server.scripted import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[dict]:
    """The JSON of every event; the last line must be [DONE]."""
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def eventually(is_true, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def test_a_plain_answer_has_every_part(start):
    live = start(ScriptedEngine(["I think", ".</think>", "Hel", "lo"]))
    answer = live.post(model="scripted").json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "scripted"
    assert answer["created"] == pytest.approx(time.time(), abs=60)
    assert answer["choices"] == [
        {
            "message": {
                "content": "Hello",
                "reasoning_content": "I think.",
                "role": "assistant",
            },
            "finish_reason": "stop",
            "index": 0,
            "logprobs": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_a_last_event_without_a_token_is_not_counted(start):
    engine = ScriptedEngine(["</think>", "a", "b"])
    engine.ends_without_token = True
    answer = start(engine).post().json()
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_stream_has_role_text_finish_usage_and_done_in_order(start):
    live = start(ScriptedEngine(["I think", ".</think>", "Hel", "lo"]))
    response = live.post(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *body, usage = chunks
    assert [chunk["choices"][0]["delta"] for chunk in body] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "I think"},
        {"reasoning_content": "."},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in body] == [None] * 5 + ["stop"]
    assert all("usage" not in chunk for chunk in body)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 6


def test_usage_is_not_sent_unless_asked_for(start):
    chunks = events(start(ScriptedEngine()).post(stream=True))
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


def test_a_reply_cut_while_thinking_has_no_content(start):
    engine = ScriptedEngine(["hm", "hm"])
    engine.finish = FinishReason.LENGTH
    (choice,) = start(engine).post().json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "hmhm"


def test_a_reply_that_never_closes_its_reasoning_is_content(start):
    live = start(ScriptedEngine(["Pa", "ris."]))
    message = live.post().json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Paris.", None)
    chunks = events(live.post(stream=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Paris."


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, None, True),
        ({"reasoning_effort": "minimal"}, "low", True),
        ({"reasoning_effort": "medium"}, "high", True),
        ({"reasoning_effort": "xhigh"}, "max", True),
        ({"reasoning_effort": "none"}, None, False),
        ({"thinking": {"type": "disabled"}}, None, False),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "high", False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, False),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low", True),
    ],
    ids=str,
)
def test_reasoning_switches_reach_the_engine(start, fields, effort, thinks):
    engine = ScriptedEngine(["</think>x"])
    assert start(engine).post(**fields).status_code == 200
    assert engine.chats[0][1:] == (effort, thinks)


def test_clear_thinking_reaches_the_engine_only_when_asked_for(start):
    engine = ScriptedEngine()
    live = start(engine)
    live.post(chat_template_kwargs={"clear_thinking": True})
    live.post(thinking={"type": "enabled", "clear_thinking": False})
    live.post()
    assert engine.clear_thinking == [True, False, None]


def test_sampling_fields_reach_the_engine(start):
    engine = ScriptedEngine()
    start(engine).post(temperature=0.5, top_p=0, top_k=-1, seed=7, stop="END", max_tokens=3)
    params = engine.seen[0][1]
    assert (params.temperature, params.top_k, params.seed) == (0.5, 0, 7)
    assert 0 < params.top_p < 1e-6
    assert (params.stop, params.max_tokens) == (("END",), 3)


def test_the_newer_of_two_limits_counts_and_a_high_one_is_cut_down(start):
    engine = ScriptedEngine(length=20)
    live = start(engine)
    live.post(max_tokens=3, max_completion_tokens=5)
    high = live.post(max_tokens=32_000)
    none = live.post()
    assert [params.max_tokens for _, params in engine.seen] == [5, 18, 18]
    assert high.headers["x-emberbox-max-tokens"] == "18"
    assert "x-emberbox-max-tokens" not in none.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(start, stream):
    live = start(ScriptedEngine(length=20))
    fits = live.post(messages=[{"role": "user", "content": "x" * 19}], stream=stream)
    assert fits.status_code == 200
    response = live.post(messages=[{"role": "user", "content": "x" * 20}], stream=stream)
    error = live.error(response)
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "context holds 20" in error["message"]
    assert "has 20" in error["message"]


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


class ThreadDies(BaseException):
    """Nothing catches this one but the thread's end."""


def test_health_fails_once_the_engine_thread_has_died(start, caplog):
    caplog.set_level(logging.CRITICAL + 1)
    engine = ScriptedEngine()
    live = start(engine)
    assert live.http.get("/health").json()["status"] == "ok"
    engine.fail_at, engine.failure = 1, ThreadDies()
    response = live.post()
    assert (response.status_code, live.error(response)["code"]) == (503, "engine_stopped")
    assert eventually(lambda: live.http.get("/health").status_code == 503)
    assert live.post().status_code == 503


def test_requests_wait_in_order_and_a_full_queue_refuses(start):
    engine = ScriptedEngine(["</think>x"])
    engine.is_gated = True
    live = start(engine, max_waiting=2)
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


def raw_request(live, body: dict) -> socket.socket:
    url = urlsplit(live.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_server_within_a_step(start, stream):
    engine = ScriptedEngine(["</think>"] + ["x"] * 1000, length=5000)
    engine.is_gated = True
    live = start(engine)
    connection = raw_request(live, {"messages": HI, "stream": stream})
    engine.gate.release(3)
    if stream:
        received = b""
        while b'"content":"x"' not in received:
            received += connection.recv(65536)
    assert eventually(lambda: engine.num_steps == 3)
    connection.close()
    time.sleep(0.2)
    engine.gate.release(1)  # the step that was under way
    assert eventually(lambda: live.worker.num_open == 0)
    assert engine.num_steps <= 4
    assert live.worker.num_cancelled == 1
    engine.is_gated = False
    assert live.post(max_tokens=5).status_code == 200


def test_a_waiting_request_whose_client_left_never_runs(start):
    engine = ScriptedEngine(["</think>x"])
    engine.is_gated = True
    live = start(engine)
    first = raw_request(live, {"messages": HI})
    assert eventually(lambda: live.worker.num_open == 1)
    second = raw_request(live, {"messages": [{"role": "user", "content": "gone"}]})
    assert eventually(lambda: live.worker.num_open == 2)
    second.close()
    time.sleep(0.2)
    engine.gate.release(1)
    assert b"200 OK" in first.recv(65536)
    first.close()
    assert eventually(lambda: live.worker.num_open == 0)
    assert [len(prompt.token_ids) for prompt, _ in engine.seen] == [2]


def test_closing_the_worker_ends_open_streams_with_an_error_event(start):
    engine = ScriptedEngine(["</think>"] + ["x"] * 100, length=500)
    engine.is_gated = True
    live = start(engine)
    engine.gate.release(2)
    connection = raw_request(live, {"messages": HI, "stream": True})
    received = b""
    while b'"content":"x"' not in received:
        received += connection.recv(65536)
    closing = threading.Thread(target=live.worker.close)
    closing.start()
    engine.gate.release(1)
    closing.join(10)
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(65536)
    connection.close()
    assert b'"code":"engine_stopped"' in received
    assert b"[DONE]" not in received


@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n\xff\r\n",
    ],
    ids=repr,
)
def test_a_broken_request_line_does_not_disturb_the_server(start, head):
    live = start(ScriptedEngine())
    url = urlsplit(live.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        connection.sendall(head + b"\r\n")
        assert b"200 OK" not in connection.recv(65536)
    assert live.http.get("/health").status_code == 200


def test_a_key_is_demanded_everywhere_but_on_health(start, caplog):
    caplog.set_level(logging.DEBUG)
    live = start(ScriptedEngine(), api_key="sesame-17")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame-17"}):
        response = live.http.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert live.error(response)["code"] == "invalid_api_key"
    assert live.http.get("/health").status_code == 200
    assert live.client.models.list().data[0].id == "scripted"
    with pytest.raises(openai.AuthenticationError):
        live.client.with_options(api_key="wrong").models.list()
    assert "sesame" not in caplog.text


def test_a_name_can_be_given_to_the_model(start):
    live = start(ScriptedEngine(), model_name="house/model")
    assert live.post(model="house/model").json()["model"] == "house/model"
    assert live.http.get("/v1/models/house/model").status_code == 200
    assert live.post(model="scripted").status_code == 404


def test_prompts_are_not_logged(start, caplog):
    caplog.set_level(logging.DEBUG)
    live = start(ScriptedEngine())
    live.post(messages=[{"role": "user", "content": "private words"}], user="someone")
    assert "private" not in caplog.text
    assert "user" in caplog.text
