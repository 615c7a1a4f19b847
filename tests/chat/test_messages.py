import json

import pytest

from emberbox.chat.messages import check_messages, check_tools
from emberbox.errors import RequestError

USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def assistant(**fields):
    return {"role": "assistant", "content": None, **fields}


def content(*parts):
    return [USER, {"role": "user", "content": list(parts)}]


def call(**function):
    return [USER, assistant(tool_calls=[{"function": {"name": "f", **function}}])]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        (None, "messages"),
        ({}, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": b"x"}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        (content("x"), "messages[1].content[0]"),
        (content({"type": "text", "text": "a"}, {"type": "file"}), "messages[1].content[1].type"),
        (content({"text": "a"}), "messages[1].content[0].type"),
        (content({"type": "input_audio"}), "messages[1].content[0].type"),
        (content({"type": "video_url", "video_url": {}}), "messages[1].content[0].type"),
        (content({"type": "text"}), "messages[1].content[0].text"),
        (content({"type": "text", "text": None}), "messages[1].content[0].text"),
        (content({"type": "image_url"}), "messages[1].content[0].image_url"),
        (content({"type": "image_url", "image_url": {}}), "messages[1].content[0].image_url.url"),
        (content({"type": "image"}), "messages[1].content[0].image"),
        (content({"type": "video", "video": "x"}), "messages[1].content[0].video"),
        (content({"type": "video", "video": [], "fps": True}), "messages[1].content[0].fps"),
        *(
            (content({"type": "video", "video": [], "fps": fps}), "messages[1].content[0].fps")
            for fps in (10**400, -(10**400), 5e-324, 0, -1, 0.0099, 1000.1, float("nan"), 1e400)
        ),
        ([USER | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([assistant(reasoning_content=3)], "messages[0].reasoning_content"),
        ([assistant(function_call={})], "messages[0].function_call"),
        ([assistant(tool_calls={})], "messages[0].tool_calls"),
        ([assistant(tool_calls=[7])], "messages[0].tool_calls[0]"),
        ([assistant(tool_calls=[CALL, {"type": "custom"}])], "messages[0].tool_calls[1].type"),
        ([assistant(tool_calls=[{"id": "c"}])], "messages[0].tool_calls[0].function"),
        ([assistant(tool_calls=[CALL | {"id": 3}])], "messages[0].tool_calls[0].id"),
        (call(name=""), "messages[1].tool_calls[0].function.name"),
        (call(arguments='{"a": '), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments='{"a": NaN}'), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments="[" * 100_000), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments={1: 2}), "messages[1].tool_calls[0].function.arguments"),
        ([{"role": "tool", "content": "7"}], "messages[0].role"),
        ([assistant(content="a"), {"role": "tool", "content": "7"}], "messages[1].role"),
        ([assistant(tool_calls=[CALL]), USER, {"role": "tool"}], "messages[2].role"),
        (
            [assistant(tool_calls=[CALL]), {"role": "tool", "tool_call_id": "d", "content": "7"}],
            "messages[1].tool_call_id",
        ),
    ],
)
def test_refusals_name_the_field(messages, param):
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


def test_texts_of_every_kind_are_joined():
    parts = [{"type": kind, "text": kind[:1]} for kind in ("text", "input_text", "output_text")]
    conversation = check_messages(
        [{"role": "user", "content": [*parts, {"type": "text", "text": ""}]}]
    )
    assert conversation.messages == ({"role": "user", "content": "tio"},)
    assert check_messages([{"role": "user", "content": []}]).messages[0]["content"] == ""
    assert check_messages([{"role": "user", "content": ""}]).messages[0]["content"] == ""


def test_developer_is_system_wherever_it_stands():
    roles = ["user", "user", "developer", "system", "user"]
    conversation = check_messages([{"role": role, "content": role} for role in roles])
    assert [m["role"] for m in conversation.messages] == [
        "user",
        "user",
        "system",
        "system",
        "user",
    ]
    assert conversation.messages[2]["content"] == "developer"


def test_unknown_keys_and_nulls_are_ignored():
    message = assistant(name=None, refusal=None, tool_calls=None, reasoning=None, audio=None)
    assert check_messages([message]).messages == ({"role": "assistant", "content": ""},)


def test_arguments_become_an_object():
    for given, expected in (('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("", {}), (None, {})):
        function = check_messages(call(arguments=given)).messages[1]["tool_calls"][0]["function"]
        assert function == {"name": "f", "arguments": expected}


def test_results_without_ids_keep_their_order_and_missing_ones_are_allowed():
    calls = [{"function": {"name": name}} for name in "abc"]
    tool = [{"role": "tool", "content": text} for text in "21"]
    conversation = check_messages([USER, assistant(tool_calls=calls), *tool, USER])
    assert [m["content"] for m in conversation.messages] == ["x", "", "2", "1", "x"]


def test_media_follow_the_order_of_the_rendered_results():
    calls = [CALL | {"id": "a"}, CALL | {"id": "b"}]
    results = [
        {
            "role": "tool",
            "tool_call_id": name,
            "content": [{"type": "image_url", "image_url": f"data:{name}"}],
        }
        for name in "ba"
    ]
    conversation = check_messages([USER, assistant(tool_calls=calls), *results])
    assert [m.source for m in conversation.media] == ["data:a", "data:b"]
    assert [m.param for m in conversation.media] == [
        "messages[3].content[0].image_url",
        "messages[2].content[0].image_url",
    ]


def test_half_surrogates_are_replaced_everywhere():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a\ud83d"}]},
        assistant(content="\ude00", reasoning_content="\ud83d\ude00"),
    ]
    first, second = check_messages(messages).messages
    assert first["content"] == "a\ufffd"
    assert second == {"role": "assistant", "content": "\ufffd", "reasoning_content": "\U0001f600"}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([3], "tools[0]"),
        ([{"name": "f"}, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([{"function": {"name": 3}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], None),
        ([{"function": {"name": "f", "parameters": [1]}}], "tools[0].function.parameters"),
    ],
)
def test_tools_are_checked(tools, param):
    if param is None:
        assert check_tools(tools) == tools
        return
    with pytest.raises(RequestError) as caught:
        check_tools(tools)
    assert caught.value.param == param


def test_no_tools_is_none():
    assert check_tools(None) is None
    assert check_tools([]) is None


def nested(levels, inner=1):
    for _ in range(levels):
        inner = [inner]
    return inner


def cyclic():
    value = {}
    value["a"] = [value]
    return value


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": nested(64)},
        {"a": nested(600)},
        json.dumps({"a": nested(490)}),
        {"a": (nested(64),)},
        cyclic(),
        {"a": [float("inf")]},
        '{"a": {"b": 1e999}}',
        '{"a": -1e999}',
    ],
    ids=["65", "601", "text", "tuple", "cycle", "inf", "1e999", "-1e999"],
)
def test_arguments_that_no_json_line_could_show_are_refused(arguments):
    with pytest.raises(RequestError) as caught:
        check_messages(call(arguments=arguments))
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_arguments_may_nest_64_levels():
    arguments = {"a": nested(63)}
    message = check_messages(call(arguments=json.dumps(arguments))).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "value", [nested(600), cyclic(), float("nan")], ids=["deep", "cycle", "nan"]
)
def test_schemas_that_no_json_line_could_show_are_refused(value):
    good = {"name": "f", "parameters": {"properties": nested(60)}}
    assert check_tools([good]) == [good]
    with pytest.raises(RequestError) as caught:
        check_tools([good, {"name": "f", "parameters": {"properties": value}}])
    assert caught.value.param == "tools[1]"
