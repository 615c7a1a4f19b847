"""Choices, log-probabilities, usage and text completions, exactly, with a scripted engine."""

import codecs

import pytest

from emberbox.engine.request import FinishReason
from emberbox.errors import OpError
from emberbox.server.prepare import MAX_REPLIES
from emberbox.server.reply import finish_reason
from tests.server.scripted import ScriptedEngine
from tests.server.wire import events, eventually, raw_request, read_all


def test_choices_of_a_stream_are_interleaved_and_carry_their_index(start):
    live = start(ScriptedEngine(["</think>", "a", "b"]))
    chunks = events(live.post(stream=True, n=3, stream_options={"include_usage": True}))
    *body, usage = chunks
    assert all(len(chunk["choices"]) == 1 for chunk in body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    seen = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for (c,) in _choices(body)]
    assert seen[:3] == [(0, "", None), (1, "", None), (2, "", None)]
    for index in range(3):
        assert [rest for i, *rest in seen if i == index] == [
            ["", None],
            ["a", None],
            ["b", None],
            [None, "stop"],
        ]
    assert [i for i, text, _ in seen if text == "a"] == [0, 1, 2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    assert usage["usage"]["prompt_tokens"] == 2


def _choices(chunks: list[dict]) -> list[list[dict]]:
    return [chunk["choices"] for chunk in chunks]


def test_seeds_count_up_from_choice_to_choice_and_wrap(start):
    engine = ScriptedEngine()
    live = start(engine)
    live.post(n=3, seed=5)
    live.post(n=2, seed=2**63 - 1)
    live.post(n=2)
    seeds = [params.seed for _, params in engine.seen]
    assert seeds == [5, 6, 7, 2**63 - 1, -(2**63), None, None]


def test_every_sampling_field_reaches_the_engine(start):
    engine = ScriptedEngine()
    response = start(engine).post(
        min_p=0.25,
        min_tokens=2,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "17": 2.5},
        stop_token_ids=[3, 4],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
    )
    assert response.status_code == 200
    assert "x-emberbox-ignored" not in response.headers
    params = engine.seen[0][1]
    assert (params.min_p, params.min_tokens, params.presence_penalty) == (0.25, 2, 1.5)
    assert (params.frequency_penalty, params.repetition_penalty) == (-0.5, 1.25)
    assert params.logit_bias == ((5, -100.0), (17, 2.5))
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((3, 4), True, 4)


def test_no_logprobs_are_asked_of_the_engine_unless_they_are_wanted(start):
    engine = ScriptedEngine()
    live = start(engine)
    live.post()
    live.post(logprobs=False, top_logprobs=0)
    live.post(logprobs=True)
    assert [params.logprobs for _, params in engine.seen] == [None, None, 0]


def test_a_token_outside_the_vocabulary_is_refused_before_the_engine_has_it(start):
    engine = ScriptedEngine()
    engine.vocab_size = 200
    live = start(engine)
    for fields in ({"logit_bias": {"200": 1}}, {"stop_token_ids": [200]}):
        assert live.post(**fields).status_code == 400
    assert live.complete([199, 200]).status_code == 400
    assert engine.seen == []


def test_cached_tokens_are_those_of_the_first_choice(start):
    engine = ScriptedEngine()
    engine.cached_tokens = 1
    usage = start(engine).post(n=3).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_chat_logprobs_have_the_shape_of_the_wire(start):
    live = start(ScriptedEngine(["a", "b"]))
    answer = live.post(
        logprobs=True, top_logprobs=2, chat_template_kwargs={"enable_thinking": False}
    )
    entries = answer.json()["choices"][0]["logprobs"]
    assert set(entries) == {"content", "refusal"}
    assert [entry["token"] for entry in entries["content"]] == ["\x00", "\x01"]
    assert entries["content"][1] == {
        "token": "\x01",
        "bytes": [1],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "\x01", "bytes": [1], "logprob": -0.5},
            # JSON has no infinity.
            {"token": "\x02", "bytes": [2], "logprob": -9999.0},
        ],
    }


def test_a_text_completion_has_every_part(start):
    live = start(ScriptedEngine(["a<think>", "b"]))
    answer = live.complete("hello", max_tokens=9).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"text": "a<think>b", "index": 0, "finish_reason": "stop", "logprobs": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_streamed_text_completion_is_text_finish_usage_and_done(start):
    live = start(ScriptedEngine(["a", "", "b"]))
    chunks = events(live.complete("x", stream=True, stream_options={"include_usage": True}))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    *body, usage = chunks
    seen = [(c["text"], c["finish_reason"]) for (c,) in _choices(body)]
    assert seen == [("a", None), ("b", "stop")]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


def test_text_logprobs_are_columns_in_the_older_shape(start):
    live = start(ScriptedEngine(["a", "b"]))
    whole = live.complete("x", logprobs=2).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["\x00", "\x01"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"\x00": -0.5, "\x01": -9999.0}, {"\x01": -0.5, "\x02": -9999.0}],
        "text_offset": [0, 1],
    }
    chunks = events(live.complete("x", logprobs=0, stream=True))
    columns = [c["logprobs"] for (c,) in _choices(chunks)]
    assert [column["text_offset"] for column in columns] == [[0], [1]]
    assert columns[1]["top_logprobs"] == [{"\x01": -0.5}]


def test_part_of_a_letter_has_a_name_of_its_own_in_the_older_shape(start):
    engine = ScriptedEngine(["a"])
    engine.token_text = lambda token_id: ("\ufffd", bytes([0xE2 + token_id]))
    logprobs = start(engine).complete("x", logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2"]
    assert set(logprobs["top_logprobs"][0]) == {"bytes:\\xe2", "bytes:\\xe3"}


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ([b"a", b"\xe2", b"\x82", b"\xac", b"b"], [0, 1, 1, 1, 2]),
        ([b"\xe2\x82", b"\xacab", b"c"], [0, 0, 3]),
        ([b"a\xe2", b"b", b"c"], [0, 2, 3]),  # the letter was broken off: U+FFFD stands for it
        ([b"\xe2", b"\xc3", b"\xa9", b"z"], [0, 1, 1, 2]),
        ([b"\xf0", b"\x80", b"z"], [0, 1, 2]),
        ([b"ab", b"", b"c"], [0, 2, 2]),
        ("ö😀".encode().partition(b"\x98"), [0, 1, 1]),
    ],
    ids=str,
)
def test_offsets_are_letters_of_the_text_whatever_the_tokens_are(start, tokens, offsets):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    engine = ScriptedEngine([*map(decoder.decode, tokens[:-1]), decoder.decode(tokens[-1], True)])
    engine.token_text = lambda i: (tokens[i].decode(errors="replace"), tokens[i])
    live = start(engine)
    choice = live.complete("x", logprobs=0).json()["choices"][0]
    assert choice["logprobs"]["text_offset"] == offsets
    assert choice["text"] == b"".join(tokens).decode(errors="replace")
    chunks = events(live.complete("x", logprobs=0, stream=True))
    assert [c["logprobs"]["text_offset"] for (c,) in _choices(chunks)] == [[o] for o in offsets]


def test_a_token_that_is_not_shown_takes_no_letters(start):
    engine = ScriptedEngine(["a", "", "b"])
    engine.token_text = lambda i: (["a", "<|x|>", "b"][i], [b"a", b"<|x|>", b"b"][i])
    engine.reply_bytes = lambda i: [b"a", b"", b"b"][i]
    logprobs = start(engine).complete("x", logprobs=0).json()["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["a", "<|x|>", "b"], [0, 1, 1])


def test_the_four_forms_of_a_prompt_reach_the_engine(start):
    engine = ScriptedEngine()
    live = start(engine)
    for prompt in ("ab", ["ab", "c"], [5, 6], [[5, 6], [7]]):
        assert live.complete(prompt).status_code == 200
    sent = [prompt.token_ids for prompt, _ in engine.seen]
    assert sent == [(97, 98), (97, 98), (99,), (5, 6), (5, 6), (7,)]
    assert {params.max_tokens for _, params in engine.seen} == {16}


def test_choices_of_several_prompts_stand_in_order_of_the_prompts(start):
    engine = ScriptedEngine()
    answer = start(engine).complete(["a", "bcd"], n=2, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    sent = [(len(prompt.token_ids), params.seed) for prompt, params in engine.seen]
    assert sent == [(1, 7), (1, 8), (3, 7), (3, 8)]
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (5, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, "a"]], "prompt[0][1]"),
        (["a"] * 65, "prompt"),
        ("", "prompt"),
        ([-1], "prompt"),
        ([2**70], "prompt[0]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_prompt_is_a_400_that_names_the_place(scripted, prompt, param):
    response = scripted.complete(prompt)
    assert response.status_code == 400
    # An integer beyond 64 bits is no integer of JSON here, whichever check is first to say so.
    assert scripted.error(response)["param"] in (param, param.partition("[")[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_what_a_text_completion_does_not_do_is_refused_by_name(scripted, fields, param):
    response = scripted.complete("x", **fields)
    assert (response.status_code, scripted.error(response)["param"]) == (400, param)


def test_too_many_replies_in_one_request_are_refused(scripted):
    prompts = ["a"] * (MAX_REPLIES // 8 + 1)
    assert scripted.error(scripted.complete(prompts, n=8))["param"] == "n"


def test_a_missing_prompt_is_named(scripted):
    response = scripted.http.post("/v1/completions", json={"messages": []})
    assert (response.status_code, scripted.error(response)["param"]) == (400, "prompt")


@pytest.mark.parametrize("below", [1, 2, 8])
def test_a_prompt_just_below_the_context_fills_it_and_ends_with_length(start, below):
    live = start(ScriptedEngine(["x"] * 50))
    answer = live.complete([9] * (100 - below), max_tokens=50).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == below
    assert live.complete([9] * 100).status_code == 400


def test_a_failure_of_one_choice_ends_the_request_and_frees_the_rest(start):
    engine = ScriptedEngine(["x"] * 50, length=500)
    engine.is_gated = True
    engine.fail_at, engine.failure = 3, OpError("not a number")
    engine.fails_when = lambda prompt: len(prompt.token_ids) == 2
    live = start(engine)
    body = {"prompt": ["abc", "de", "fgh"], "stream": True, "max_tokens": 40}
    connection = raw_request(live.url, body, "/v1/completions")
    engine.gate.release(4)
    received = read_all(connection)
    assert b"[DONE]" not in received
    assert received.count(b'"op_error"') == 1
    assert eventually(lambda: live.worker._commands.qsize() == 1)
    engine.gate.release(1)
    assert eventually(lambda: live.worker.num_open == 0)
    assert sorted(engine.aborted) == [0, 2]
    assert live.http.get("/health").status_code == 200


def test_the_words_for_an_end():
    assert finish_reason(None) is None
    assert finish_reason(FinishReason.LENGTH) == "length"
    assert finish_reason(FinishReason.STOP) == "stop"
