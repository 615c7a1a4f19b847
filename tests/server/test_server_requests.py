"""What a chat request may hold and what is refused, on a live server with a scripted engine."""

import json

import httpx
import msgspec
import pytest

from emberbox.server.chat_request import EFFORTS
from emberbox.server.parse import REFUSED

HI = [{"role": "user", "content": "hi"}]

# One value per refused field that asks for something.
ASKING = {
    "add_generation_prompt": False,
    "allowed_token_ids": [5],
    "audio": {"voice": "x"},
    "bad_words": ["x"],
    "best_of": 2,
    "chat_template": "x",
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "dry_multiplier": 0.8,
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "grammar": "root ::= x",
    "guided_choice": ["a"],
    "guided_grammar": "x",
    "guided_json": {},
    "guided_regex": "x",
    "json_schema": {},
    "length_penalty": 2,
    "logits_processors": ["x"],
    "mirostat": 2,
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "prompt_embeds": "x",
    "prompt_logprobs": 1,
    "response_format": {"type": "json_object"},
    "structured_outputs": {},
    "suffix": "x",
    "thinking_budget": 5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "truncate_prompt_tokens": 5,
    "typical_p": 0.5,
    "use_beam_search": True,
    "web_search_options": {},
    "xtc_probability": 0.5,
}


def test_every_refused_field_has_a_case():
    assert set(ASKING) == set(REFUSED)


@pytest.mark.parametrize("field", sorted(ASKING))
def test_a_field_that_would_change_the_answer_is_refused_by_name(scripted, field):
    response = scripted.post(**{field: ASKING[field]})
    error = scripted.error(response)
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("best_of", 1),
        ("echo", False),
        ("add_generation_prompt", True),
        ("tools", []),
        ("tool_choice", "none"),
        ("logprobs", False),
        ("response_format", {"type": "text"}),
        ("logit_bias", {}),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("min_p", 0),
        ("parallel_tool_calls", True),
    ],
)
def test_a_field_that_asks_for_nothing_is_accepted(scripted, field, value):
    response = scripted.post(**{field: value})
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(
    ("field", "value"), [("tools", ""), ("echo", 0), ("best_of", True), ("length_penalty", "1")]
)
def test_a_value_of_another_type_is_not_taken_for_nothing(scripted, field, value):
    error = scripted.error(scripted.post(**{field: value}))
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


def test_null_means_absent(scripted):
    names = [*REFUSED, "stop", "seed", "stream", "stream_options", "temperature", "top_p", "top_k"]
    names += [
        "model",
        "max_tokens",
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "min_p",
        "min_tokens",
    ]
    names += ["stop_token_ids", "ignore_eos", "presence_penalty", "repetition_penalty"]
    names += ["max_completion_tokens", "reasoning_effort", "chat_template_kwargs", "thinking"]
    response = scripted.post(**dict.fromkeys(names))
    assert response.status_code == 200
    assert "x-emberbox-ignored" not in response.headers


def test_unknown_fields_are_accepted_and_named_in_a_header(scripted):
    messages = [{"role": "user", "content": "hi", "name": "bob", "refusal": None}]
    response = scripted.post(enable_thinkng=False, user="u", messages=messages)
    assert response.status_code == 200
    assert response.headers["x-emberbox-ignored"] == "enable_thinkng, messages[].name, user"


def test_a_hostile_field_name_cannot_break_the_header(scripted):
    response = scripted.post(**{"a\r\nset-cookie: x=1": 1, "\u00fc\u4f60": 1, "b" * 9000: 1})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    named = response.headers["x-emberbox-ignored"]
    assert named == "a??set-cookie??x?1, " + "b" * 64 + ", ??"
    many = scripted.post(**{f"field_{i:03}": 1 for i in range(100)})
    assert many.headers["x-emberbox-ignored"].endswith("field_015, ...")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": "low"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_effort": 7}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        (
            {"chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 0}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            "thinking",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_a_400_that_names_the_field(scripted, fields, param):
    response = scripted.post(**fields)
    error = scripted.error(response)
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_missing_field_is_named(scripted):
    response = scripted.http.post("/v1/chat/completions", json={"model": "scripted"})
    assert response.status_code == 400
    assert scripted.error(response)["param"] == "messages"


def test_an_unknown_effort_lists_the_known_ones(scripted):
    message = scripted.error(scripted.post(reasoning_effort="turbo"))["message"]
    assert all(effort in message for effort in EFFORTS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [}',
        b"nope",
        b'{"a": "\xff\xfe"}',
        b'{"a": "\\ud800"}',
        b'{"temperature": NaN}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"[1]",
        b'"hi"',
        b"5",
        b"null",
        b"true",
        b'{"messages": []} trailing',
    ],
    ids=lambda body: repr(body[:18]),
)
def test_a_body_that_is_no_json_object_is_a_clear_400(scripted, body):
    response = scripted.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert scripted.error(response)["code"] == "invalid_json"


def test_deep_nesting_inside_a_message_is_a_400(scripted):
    deep = b'{"messages":[{"role":"user","content":"x","a":' + b"[" * 9_000 + b"]" * 9_000 + b"}]}"
    response = scripted.http.post(
        "/v1/chat/completions", content=deep, headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert scripted.error(response)["code"] == "invalid_json"


def test_another_content_type_is_a_400_that_says_so(scripted):
    response = scripted.http.post("/v1/chat/completions", data={"a": "b"})
    assert response.status_code == 400
    assert "application/json" in scripted.error(response)["message"]


def test_a_content_type_with_a_charset_is_accepted(scripted):
    response = scripted.http.post(
        "/v1/chat/completions",
        content=msgspec.json.encode({"messages": HI}),
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )
    assert response.status_code == 200


def test_a_body_beyond_the_limit_is_a_413(scripted):
    messages = [{"role": "user", "content": "x" * 1_000_000}]
    response = scripted.post(messages=messages)
    assert response.status_code == 413
    assert scripted.error(response)["code"] == "body_too_large"


def test_a_body_without_a_length_is_cut_off_at_the_limit(scripted):
    def endless():
        for _ in range(300):
            yield b" " * 10_000

    try:
        response = scripted.http.post(
            "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
        )
    except (httpx.WriteError, httpx.ReadError):
        return  # the server had answered and closed while we still wrote
    assert response.status_code == 413


def test_an_unknown_model_is_a_404_that_names_the_served_one(scripted):
    response = scripted.post(model="gpt-4o")
    error = scripted.error(response)
    assert response.status_code == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "scripted" in error["message"]


def test_unknown_paths_and_methods_answer_in_the_same_shape(scripted):
    missing = scripted.http.get("/v1/nothing")
    assert (missing.status_code, scripted.error(missing)["code"]) == (404, "not_found")
    wrong = scripted.http.get("/v1/chat/completions")
    assert (wrong.status_code, scripted.error(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_models_tell_the_context_length_and_what_goes_in(scripted):
    listed = scripted.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("scripted", "model", "emberbox")
    assert card["max_model_len"] == card["context_length"] == 100
    assert card["input_modalities"] == ["text", "image", "video"]
    assert scripted.http.get("/v1/models/scripted").json() == card
    assert scripted.http.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("as_text", [True, False])
def test_deep_tool_arguments_are_a_400_that_names_them(scripted, as_text):
    text = '{"a": ' + "[" * 490 + "]" * 490 + "}"
    function = {"name": "f", "arguments": text if as_text else json.loads(text)}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = scripted.post(messages=[message])
    assert response.status_code == 400
    assert scripted.error(response)["param"] == "messages[0].tool_calls[0].function.arguments"


def test_no_path_is_redirected_to_the_host_a_client_names(scripted):
    for path in ("/health/", "/v1/models/", "/v1/chat/completions/"):
        response = scripted.http.get(path, headers={"host": "evil.example"})
        assert "location" not in response.headers
        assert response.status_code == 404


def test_the_log_has_the_number_of_ignored_fields_not_their_names(scripted, caplog):
    with caplog.at_level("INFO", "emberbox"):
        names = [f"my_secret_{number}" for number in range(7)]
        for _ in range(2):
            assert scripted.post(**dict.fromkeys(names, 1)).status_code == 200
    assert "my_secret" not in caplog.text
    assert caplog.text.count("carries 7 fields") == 1
