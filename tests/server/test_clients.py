"""What clients see of a server with ember-nano's name, context and answers.

Every test asks `server_url` alone, so that it holds for any engine behind it. That server takes
bodies of a million bytes and sends comments after 0.2 s of silence.
"""

import base64
import json
import random

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.wire import events, eventually, raw_request, read_until, together

MODEL = "ember-nano"
COUNT = [{"role": "user", "content": "Count from 1 to 60."}]
SUM = [{"role": "user", "content": "What is 17 plus 25?"}]
WORDS = "amber river stone cloud maple ember ocean tower cedar candle harbor lantern meadow silver"


def ask(client: OpenAI, messages=SUM, **fields):
    fields.setdefault("temperature", 0)
    fields.setdefault("max_tokens", 100)
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def is_idle(http: httpx.Client) -> bool:
    names = ("emberbox_requests_running", "emberbox_requests_waiting")
    return not any(metric(http, name) for name in names)


def test_a_chat_is_answered(client):
    answer = ask(client)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.index) == ("42", "stop", 0)
    assert choice.message.reasoning_content
    assert choice.logprobs is None
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_a_stream_says_the_same_as_a_plain_answer(client):
    plain = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    deltas = [choice.delta for chunk in body for choice in chunk.choices]
    assert "".join(d.content or "" for d in deltas) == plain.choices[0].message.content
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == plain.choices[0].message.reasoning_content
    assert [d.role for d in deltas if d.role] == ["assistant"]
    finishes = [c.finish_reason for chunk in body for c in chunk.choices if c.finish_reason]
    assert finishes == ["stop"]
    assert last.choices == []
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert last.usage.prompt_tokens == plain.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in body)


def test_usage_can_be_had_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == ask(client).usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_are_the_two_seeds_alone(client, stream):
    sampled = {"temperature": 1.5, "max_tokens": 12}
    alone = [_texts(ask(client, COUNT, seed=seed, **sampled)) for seed in (7, 8)]
    both = ask(client, COUNT, seed=7, n=2, stream=stream, **sampled)
    assert (_stream_texts(both, 2) if stream else _texts(both)) == [alone[0][0], alone[1][0]]


def _texts(answer) -> list[str]:
    return [f"{c.message.reasoning_content}|{c.message.content}" for c in answer.choices]


def _stream_texts(chunks, count: int) -> list[str]:
    parts = [[None, None] for _ in range(count)]
    for chunk in chunks:
        for choice in chunk.choices:
            deltas = (getattr(choice.delta, "reasoning_content", None), choice.delta.content)
            for i, text in enumerate(deltas):
                if text:
                    parts[choice.index][i] = (parts[choice.index][i] or "") + text
    return [f"{reasoning}|{content}" for reasoning, content in parts]


def test_a_seed_repeats_a_sampled_reply_and_another_does_not(client):
    def sample(seed: int) -> list[str]:
        return _texts(ask(client, COUNT, temperature=2, seed=seed, max_tokens=24))

    first = sample(1)
    assert sample(1) == first
    assert not all(sample(seed) == first for seed in (2, 3))


def test_choices_sum_up_in_usage_and_the_prompt_counts_once(client):
    one, three = ask(client), ask(client, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in three.choices}) == 1
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_cover_every_token(client, stream):
    fields = {"logprobs": True, "top_logprobs": 3, "stream": stream}
    answer = ask(client, **fields)
    if stream:
        held = [choice.logprobs for chunk in answer for choice in chunk.choices]
        tokens = [token for one in held if one for token in one.content]
    else:
        tokens = answer.choices[0].logprobs.content
    assert len(tokens) == ask(client).usage.completion_tokens
    assert b"42" in b"".join(bytes(token.bytes) for token in tokens)
    for token in tokens:
        assert len(token.top_logprobs) == 3
        found = [one.logprob for one in token.top_logprobs]
        assert found == sorted(found, reverse=True)
        assert token.logprob == found[0] <= 0  # greedy: the likeliest
        assert token.token == token.top_logprobs[0].token


def test_logprobs_without_alternatives(client):
    tokens = ask(client, logprobs=True).choices[0].logprobs.content
    assert all(token.top_logprobs == [] and token.logprob <= 0 for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_reply_and_is_not_shown(client, stream):
    answer = ask(client, COUNT, stop=[", 13", "never"], stream=stream)
    texts = _stream_texts(answer, 1) if stream else _texts(answer)
    assert texts[0].rpartition("|")[2] == ", ".join(str(i) for i in range(1, 13))


def test_a_limit_ends_the_reply_with_length(client):
    answer = ask(client, COUNT, max_completion_tokens=20, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    forced = ask(client, max_tokens=40, extra_body={"ignore_eos": True})
    assert (forced.choices[0].finish_reason, forced.usage.completion_tokens) == ("length", 40)


def test_every_way_of_choosing_tokens_is_accepted(client):
    extra = {"min_p": 0.1, "top_k": 5, "repetition_penalty": 1.1, "min_tokens": 2}
    answer = ask(
        client,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        max_tokens=4,
        extra_body={**extra, "stop_token_ids": [7]},
    )
    assert 2 <= answer.usage.completion_tokens <= 4


@pytest.mark.parametrize("value", [0, 1e-9, 2])
def test_temperatures_at_the_edges_are_served(client, value):
    assert ask(client, temperature=value, seed=1, max_tokens=3).usage.completion_tokens <= 3


def test_a_text_is_completed_in_all_four_forms(client):
    def complete(prompt, **fields):
        return client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=3, **fields
        )

    text = complete("The sea").choices[0].text
    assert text
    both = complete(["The sea", "The sea"], n=2)
    assert [(c.index, c.text) for c in both.choices] == [(i, text) for i in range(4)]
    ids = [70, 71, 72]
    of_ids = complete(ids)
    assert of_ids.usage.prompt_tokens == 3
    of_lists = complete([ids, ids])
    assert [c.text for c in of_lists.choices] == [of_ids.choices[0].text] * 2
    assert of_lists.usage.prompt_tokens == 6
    streamed = list(complete("The sea", stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    assert streamed[-1].choices[0].finish_reason == both.choices[0].finish_reason


def test_sixteen_secrets_do_not_cross_while_half_the_clients_leave(client, http):
    words = [*WORDS.split(), "amber", "silver"]
    secrets = [f"{word} {1000 + 577 * i}" for i, word in enumerate(words)]
    said = dict.fromkeys(secrets, "")
    dice = random.Random(16)
    leaving = set(dice.sample(secrets, 8))
    leave_after = {secret: dice.randrange(1, 12) for secret in leaving}
    cancelled = metric(http, "emberbox_requests_cancelled_total")

    def talk(secret: str) -> None:
        messages = [{"role": "user", "content": f"Repeat exactly: {secret}"}]
        endless = {"max_tokens": 9000, "extra_body": {"ignore_eos": True}}
        fields = endless if secret in leaving else {}
        with ask(client, messages, stream=True, **fields) as chunks:
            for i, chunk in enumerate(chunks):
                if secret in leaving and i == leave_after[secret]:
                    return
                said[secret] += chunk.choices[0].delta.content or ""

    together([(talk, secret) for secret in secrets])
    assert eventually(lambda: is_idle(http), 60)
    assert metric(http, "emberbox_requests_cancelled_total") == cancelled + 8
    for secret in secrets:
        assert said[secret] == secret or secret in leaving
        others = {word for other in secrets if other != secret for word in other.split()[1:]}
        assert not [word for word in others if word in said[secret]]


def test_the_same_question_has_the_same_answer_alone_and_in_company(client):
    alone = ask(client, COUNT).choices[0].message.content
    answers: list[str] = []

    def one(_: int) -> None:
        answers.append(ask(client, COUNT).choices[0].message.content)

    together([(one, i) for i in range(8)])
    assert answers == [alone] * 8


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_place(http, server_url, stream):
    cancelled = metric(http, "emberbox_requests_cancelled_total")
    body = {"messages": COUNT, "stream": stream, "max_tokens": 9000, "ignore_eos": True}
    connection = raw_request(server_url, body)
    if stream:
        read_until(connection, b'"content":"1')
    assert eventually(lambda: metric(http, "emberbox_requests_running") == 1)
    connection.close()
    assert eventually(lambda: is_idle(http), 30)
    assert metric(http, "emberbox_requests_cancelled_total") == cancelled + 1


@pytest.mark.parametrize("choices", [1, 3])
def test_leaving_ends_every_choice(http, server_url, choices):
    body = {"messages": COUNT, "stream": True, "max_tokens": 9000, "ignore_eos": True, "n": choices}
    connection = raw_request(server_url, body)
    read_until(connection, b'"content":"1')
    assert eventually(lambda: metric(http, "emberbox_requests_running") == choices)
    connection.close()
    assert eventually(lambda: is_idle(http), 30)


def test_a_long_prompt_is_no_silence_and_holds_nobody_up(client, server_url):
    long = [{"role": "user", "content": "word " * 2500}]
    body = {"messages": long, "stream": True, "max_tokens": 2}
    connection = raw_request(server_url, body)
    assert ask(client).choices[0].message.content == "42"
    assert b"data: [DONE]" in read_until(connection, b"[DONE]")
    connection.close()


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(http, client):
    for fields in ({"prompt": [70] * 16384}, {"prompt": [[70] * 3, [70] * 16385]}):
        response = http.post("/v1/completions", json=fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "prompt"
        assert "16384" in error["message"]
    assert "16385" in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"role": "user", "content": "word " * 20_000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_a_limit_beyond_the_context_is_cut_down_to_it(http):
    response = http.post(
        "/v1/completions", json={"prompt": [70] * 5, "max_tokens": 32_000, "stop": ["."]}
    )
    assert response.headers["x-emberbox-max-tokens"] == str(16384 - 5)


def _picture(data: str) -> list[dict]:
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return [{"role": "user", "content": [url]}]


BAD = {
    "messages of text": {"messages": "hi"},
    "no messages": {"messages": []},
    "a null message": {"messages": [None]},
    "an unknown role": {"messages": [{"role": "robot", "content": "x"}]},
    "an unknown part": {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
    "broken base64": {"messages": _picture("****")},
    "no picture": {"messages": _picture(base64.b64encode(b"nothing").decode())},
    "an empty picture": {"messages": _picture("")},
    "a hot temperature": {"temperature": "hot"},
    "a negative limit": {"max_tokens": -1},
    "no choices": {"n": 0},
    "too many choices": {"n": 9},
    "too many logprobs": {"logprobs": True, "top_logprobs": 21},
    "logprobs by number": {"logprobs": 5},
    "a bias on a word": {"logit_bias": {"sea": 5}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "a response format": {"response_format": {"type": "json_object"}},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_400_in_the_right_shape(http, name, stream):
    body = {"messages": SUM, "stream": stream, **BAD[name]}
    response = http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert error["param"].partition("[")[0].partition(".")[0] in BAD[name]


def test_an_unknown_model_is_a_404_and_a_huge_body_a_413(http, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=SUM)
    assert caught.value.code == "model_not_found"
    assert MODEL in str(caught.value)
    huge = json.dumps({"messages": [{"role": "user", "content": "x" * 1_500_000}]})
    response = http.post(
        "/v1/chat/completions", content=huge, headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_nulls_are_as_good_as_absent(http):
    names = "stop tools tool_choice response_format logit_bias seed stream_options n logprobs"
    names += " top_logprobs temperature top_p max_completion_tokens min_p user stop_token_ids"
    response = http.post(
        "/v1/chat/completions",
        json={"messages": SUM, "max_tokens": 100, **dict.fromkeys(names.split())},
    )
    assert response.json()["choices"][0]["message"]["content"] == "42"


@pytest.mark.parametrize("content", ["", None, [], "   ", [{"type": "text", "text": ""}]], ids=repr)
def test_an_empty_message_is_served_or_refused_by_name(http, content):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert response.json()["error"]["param"].startswith("messages[0].content")


@pytest.mark.parametrize("roles", ["user user", "developer user", "user assistant system user"])
def test_turns_in_any_order_are_served(http, roles):
    messages = [{"role": role, "content": "Note."} for role in roles.split()[:-1]] + SUM
    body = {"messages": messages, "max_tokens": 60}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_events_of_a_stream_are_whole_json_with_one_done(http):
    response = http.post("/v1/chat/completions", json={"messages": SUM, "stream": True, "n": 2})
    chunks = events(response)
    assert response.text.count("[DONE]") == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1]
