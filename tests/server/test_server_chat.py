"""Answers, streams and limits, on a live server with a scripted engine."""

import logging
import socket
import time
import tracemalloc
from urllib.parse import urlsplit

import openai
import pytest

from emberbox.engine.request import FinishReason, TokenEvent
from emberbox.server.reply import Reply, TextReply
from tests.server.scripted import ScriptedEngine
from tests.server.wire import events


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


@pytest.mark.parametrize("named", ["stop", "stop_token_ids"])
def test_a_stop_of_the_requests_inside_the_thought_publishes_no_thought(start, named):
    engine = ScriptedEngine(["sec", "ret", "END"])
    engine.has_own_end = named == "stop"
    live = start(engine)
    fields = {"stop": "END"} if named == "stop" else {"stop_token_ids": [2]}
    (choice,) = live.post(**fields).json()["choices"]
    thought = "secret" if named == "stop" else "secretEND"
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == thought
    deltas = [c["choices"][0]["delta"] for c in events(live.post(stream=True, **fields))]
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought


@pytest.mark.parametrize("route", ["chat", "text"])
def test_a_plain_answer_builds_no_chunks(start, monkeypatch, route):
    live = start(ScriptedEngine(["a", "</think>", "b", "c"]))

    def refuse(*_, **__):
        raise AssertionError("a chunk was built")

    monkeypatch.setattr("emberbox.server.answer.ChunkChoice", refuse)
    monkeypatch.setattr("emberbox.server.reply.Delta", refuse)
    monkeypatch.setattr("emberbox.server.answer.TextAnswer._chunks", refuse)
    if route == "chat":
        answer = live.post(logprobs=True).json()["choices"][0]
        assert (answer["message"]["content"], len(answer["logprobs"]["content"])) == ("bc", 4)
    else:
        answer = live.complete(logprobs=1).json()["choices"][0]
        assert (answer["text"], len(answer["logprobs"]["tokens"])) == ("a</think>bc", 4)


@pytest.mark.parametrize("make", [lambda: Reply(thinking=True), TextReply], ids=["chat", "text"])
def test_a_token_copies_nothing_of_a_long_reply(make):
    reply = make()
    reply.push(TokenEvent(1, "t" * 2_000_000))
    reply.push(TokenEvent(2, "</think>" + "c" * 2_000_000))
    tracemalloc.start()
    reply.push(TokenEvent(3, "x"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert len(reply.content) >= 2_000_001
