"""The shipped model behind a live server, asked through the real OpenAI client."""

import base64
import contextlib
import io
import json
import time

import openai
import pytest
from PIL import Image

from emberbox.cli.demo_questions import questions

LIST, CODE, PICTURE = questions()
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SUM = [{"role": "user", "content": "What is 17 plus 25?"}]


def ask(nano, messages, **fields):
    fields.setdefault("max_tokens", 100)
    return nano.client.chat.completions.create(
        model="ember-nano", messages=messages, temperature=0, **fields
    )


def ask_stream(nano, messages, **fields):
    """(reasoning, content, finish reasons, usages, roles) of a whole stream."""
    reasoning, content, finish, usage, roles = "", "", [], [], []
    for chunk in ask(nano, messages, stream=True, **fields):
        usage += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish += [choice.finish_reason] if choice.finish_reason else []
            roles += [choice.delta.role] if choice.delta.role else []
    return reasoning, content, finish, usage, roles


def test_the_model_is_listed_with_its_context_and_inputs(nano):
    (model,) = nano.client.models.list().data
    assert model.id == "ember-nano"
    assert model.max_model_len == 16384
    assert model.input_modalities == ["text", "image", "video"]
    assert nano.client.models.retrieve("ember-nano").id == "ember-nano"


@pytest.mark.parametrize("question", [LIST, CODE, PICTURE], ids=lambda q: q.name)
def test_the_questions_of_the_demonstration_are_answered_right(nano, question):
    answer = ask(nano, [{"role": "user", "content": question.content}])
    assert answer.choices[0].message.content == question.expected
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same_as_a_plain_answer(nano):
    plain = ask(nano, SUM)
    reasoning, content, finish, usage, roles = ask_stream(
        nano, SUM, stream_options={"include_usage": True}
    )
    assert content == plain.choices[0].message.content == "42"
    assert reasoning == plain.choices[0].message.reasoning_content == "7+5=12; 1+2+1=4. So 42."
    assert (finish, roles) == (["stop"], ["assistant"])
    assert usage == [plain.usage]
    assert usage[0].prompt_tokens == 20
    assert usage[0].total_tokens == usage[0].prompt_tokens + usage[0].completion_tokens
    assert usage[0].prompt_tokens_details.cached_tokens == 0
    assert 0 < usage[0].completion_tokens_details.reasoning_tokens < usage[0].completion_tokens


def test_no_usage_in_a_stream_unless_asked_for(nano):
    assert ask_stream(nano, CAPITAL)[3] == []


@pytest.mark.parametrize(
    "off",
    [
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
    ids=str,
)
def test_thinking_can_be_switched_off(nano, off):
    message = ask(nano, SUM, extra_body=off).choices[0].message
    assert message.content == "42"
    assert message.reasoning_content is None


def test_low_effort_answers_without_a_thought(nano):
    message = ask(nano, SUM, reasoning_effort="low").choices[0].message
    assert (message.content, message.reasoning_content) == ("42", None)


def test_a_limit_ends_the_reply_with_length(nano):
    messages = [{"role": "user", "content": "Count from 1 to 12."}]
    whole = ask(nano, messages)
    cut = ask(nano, messages, max_tokens=20)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == ", ".join(str(i) for i in range(1, 13))
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 20
    assert whole.choices[0].message.content.startswith(cut.choices[0].message.content)


def test_thought_cut_by_the_limit_leaves_no_content(nano):
    (choice,) = ask(nano, SUM, max_tokens=4).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert choice.message.reasoning_content.startswith("7+5")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_reply_and_is_not_shown(nano, stream):
    messages = [{"role": "user", "content": "Count from 1 to 60."}]
    if stream:
        _, content, finish, _, _ = ask_stream(nano, messages, stop=[", 13"])
    else:
        (choice,) = ask(nano, messages, stop=", 13").choices
        content, finish = choice.message.content, [choice.finish_reason]
    assert content == ", ".join(str(i) for i in range(1, 13))
    assert finish == ["stop"]


def test_a_seed_repeats_a_sampled_reply(nano):
    messages = [{"role": "user", "content": "Tell me about the sea and a boat."}]

    def sample(seed: int) -> str:
        answer = nano.client.chat.completions.create(
            model="ember-nano", messages=messages, temperature=2, seed=seed, max_tokens=24
        )
        message = answer.choices[0].message
        return f"{message.reasoning_content}{message.content}"

    first = sample(1)
    assert sample(1) == first
    assert {sample(2), sample(3)} != {first}


def test_the_words_of_a_marker_in_a_message_are_text(nano):
    messages = [{"role": "user", "content": "Repeat exactly: <|user|> </think> amber"}]
    used = ask(nano, messages).usage.prompt_tokens
    plain = ask(nano, [{"role": "user", "content": "Repeat exactly: amber"}]).usage.prompt_tokens
    assert used - plain > 6


def test_conversations_remember(nano):
    messages = [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert ask(nano, messages).choices[0].message.content == "Your name is Anna."


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(nano):
    messages = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(nano, messages)
    assert caught.value.code == "context_length_exceeded"
    assert "16384" in str(caught.value)
    assert nano.http.get("/health").status_code == 200


def stream(nano, content: str):
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 200}
    return nano.http.stream("POST", "/v1/chat/completions", json=body)


def seconds_until_idle(nano) -> float:
    started = time.monotonic()
    while nano.worker.num_open and time.monotonic() < started + 30:
        time.sleep(0.01)
    return time.monotonic() - started


def test_comment_lines_go_out_while_the_prompt_is_read(nano):
    # Not the wording of another test: nothing of it may be remembered.
    with stream(nano, f"Read all of this first. {CODE.content}") as response:
        lines = [line for line in response.iter_lines() if line]
    first_data = next(i for i, line in enumerate(lines) if line.startswith("data"))
    assert lines[:first_data] == [": keep-alive"] * first_data
    assert first_data >= 2


@pytest.mark.parametrize("when", ["reply", "prompt"])
def test_a_client_that_leaves_stops_the_model_at_once(nano, when):
    cancelled = nano.worker.num_cancelled
    content = "Count from 1 to 60." if when == "reply" else CODE.content * 8
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(stream(nano, content)).iter_lines()
        seen = [next(lines) for _ in range(9)]
    assert any(line.startswith("data") for line in seen) == (when == "reply")
    # A whole reply takes several seconds, the whole prompt more; one step or chunk does not.
    assert seconds_until_idle(nano) < 5
    assert nano.worker.num_cancelled == cancelled + 1


def data_uri(data: bytes, kind: str = "image/png") -> list[dict]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return [
        {"type": "text", "text": "Describe the image."},
        {"type": "image_url", "image_url": {"url": url}},
    ]


def png(size: tuple[int, int]) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size, (30, 160, 50)).save(held, format="PNG")
    return held.getvalue()


def clip(fps: object) -> list[dict[str, object]]:
    """Four frames of 112 x 112."""
    frames = [data_uri(png((112, 112)))[1]["image_url"]["url"]] * 4
    return [
        {"type": "video", "video": frames, "fps": fps},
        {"type": "text", "text": "What happens in the clip?"},
    ]


def test_a_short_clip_is_taken_as_the_list_of_models_says(nano):
    asked = {"role": "user", "content": "What happens in the clip?"}
    text = nano.post(messages=[asked], max_tokens=1).json()["usage"]["prompt_tokens"]
    answer = nano.post(messages=[{"role": "user", "content": clip(2)}], max_tokens=8)
    assert answer.status_code == 200
    # Its edges; two slices of 16 blocks, each with its edges and the letters of its time.
    times = [f"{seconds}.0 seconds" for seconds in (0, 1)]
    tokenizer = nano.worker.engine.format.tokenizer
    in_clip = 2 + 2 * (16 + 2) + sum(len(tokenizer.encode(time)) for time in times)
    assert answer.json()["usage"]["prompt_tokens"] == text + in_clip


@pytest.mark.parametrize("fps", ["1" + "0" * 400, "5e-324", "0.009", "1001"])
def test_a_rate_nobody_films_at_is_a_400_that_names_it(nano, fps):
    body = json.dumps({"messages": [{"role": "user", "content": clip(17)}]})
    response = nano.http.post(
        "/v1/chat/completions",
        content=body.replace('"fps": 17', f'"fps": {fps}'),
        headers={"content-type": "application/json"},
    )
    error = nano.error(response)
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0].fps")
    assert "0.01 to 1000 frames per second" in error["message"]


def test_pictures_beyond_the_context_are_a_400_with_both_numbers(nano):
    parts = [data_uri(png((2400, 2400)))[1]] * 6
    response = nano.post(messages=[{"role": "user", "content": parts}])
    error = nano.error(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "holds 16384 tokens and the prompt has 44" in error["message"]  # 6 * 7396 = 44376


@pytest.mark.parametrize(
    "parts",
    [
        data_uri(b"no picture at all"),
        data_uri(png((112, 112))[:60]),
        data_uri(b""),
        data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,****"}}],
        [{"type": "image_url", "image_url": {}}],
    ],
    ids=["bytes", "cut", "empty", "svg", "http", "file", "alphabet", "no-url"],
)
def test_a_bad_picture_is_a_400_that_names_the_message(nano, parts):
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]
    response = nano.post(messages=messages)
    assert response.status_code == 400
    assert nano.error(response)["param"].startswith("messages[1].content[")


def test_every_event_of_a_stream_is_one_json_line(nano):
    response = nano.post(messages=CAPITAL, stream=True, temperature=0)
    blocks = response.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    for block in blocks[:-1]:
        if not block.startswith(":"):
            assert json.loads(block.removeprefix("data: "))["object"] == "chat.completion.chunk"
