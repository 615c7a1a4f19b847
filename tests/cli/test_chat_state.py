"""A conversation and its commands, without a server."""

import base64
import os

import pytest
from PIL import Image

from emberbox.cli.chat import THINKING
from emberbox.cli.chat_client import Reply
from emberbox.cli.chat_state import COMMANDS, EFFORTS, Conversation
from emberbox.errors import RequestError


def reply(content: str, *, reasoning: str = "", finish: str | None = "stop") -> Reply:
    return Reply(
        content=content,
        reasoning=reasoning,
        finish=finish,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_completion_tokens=0,
        first_token_seconds=0.0,
        total_seconds=0.0,
    )


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation()
    talk.add("one", reply("1", reasoning="so 1"))
    return talk


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return path


def test_the_next_request_holds_system_text_all_turns_and_the_question(talk):
    assert talk.obey("/system Be brief.") == "the system text is set"
    assert talk.messages("two") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "reasoning_content": "so 1"},
        {"role": "user", "content": "two"},
    ]
    assert talk.obey("/system") == "there is no system text now"
    assert len(talk.messages("two")) == 3


def test_reset_forgets_the_turns_and_keeps_the_settings(talk):
    talk.obey("/system Be brief.")
    talk.obey("/think off")
    talk.obey("/reset")
    assert talk.messages("two")[1:] == [{"role": "user", "content": "two"}]
    assert (talk.system, talk.thinking) == ("Be brief.", "off")


@pytest.mark.parametrize(
    ("how", "field"),
    [("on", {}), ("off", "none"), ("low", "low"), ("high", "high"), ("max", "max")],
)
def test_think_sets_the_effort_of_the_next_request(talk, how, field):
    assert talk.obey(f"/think {how}") == f"thinking is {how}"
    assert talk.effort() == ({} if how == "on" else {"reasoning_effort": field})
    assert talk.obey("/think") == f"thinking is {how}"


def test_flag_help_and_command_know_the_same_ways_to_think():
    assert tuple(EFFORTS) == THINKING
    assert f"/think {'|'.join(EFFORTS)}" in COMMANDS


@pytest.mark.parametrize(
    ("stopped", "num_turns"), [(reply("2, 3", finish=None), 4), (reply("", finish=None), 2)]
)
def test_a_stopped_reply_is_kept_once_its_text_has_begun(talk, stopped, num_turns):
    talk.add("two", stopped)
    assert len(talk.turns) == num_turns


def test_a_picture_goes_with_the_next_message_alone(talk, picture):
    assert talk.obey(f"/image {picture}") == f"{picture} (40 x 30) goes with the next message"
    image, text = talk.messages("what?")[-1]["content"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == picture.read_bytes()
    assert text == {"type": "text", "text": "what?"}
    talk.add("what?", reply("Red."))
    assert talk.turns[-2]["content"][1] == text
    assert talk.messages("and?")[-1] == {"role": "user", "content": "and?"}


def test_a_picture_waits_when_the_reply_was_taken_back(talk, picture):
    talk.obey(f"/image {picture}")
    talk.add("what?", reply("", finish=None))
    assert len(talk.messages("what?")[-1]["content"]) == 2


def test_only_pictures_are_sent(talk, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_text("a text that calls itself a picture")
    cut = tmp_path / "cut.png"
    Image.new("RGB", (400, 300), "red").save(cut)
    cut.write_bytes(cut.read_bytes()[:60])
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        str(secret): "not an image",
        str(cut): "cut.png",
        str(tmp_path / "pipe"): "is not a file",
        str(tmp_path): "is not a file",
        str(tmp_path / "none.png"): "cannot be read: No such file",
        "a\0b": "cannot be read",
        "": "name a file",
    }.items():
        with pytest.raises(RequestError, match=reason):
            talk.obey(f"/image {name}")
    assert talk.messages("two")[-1]["content"] == "two"


def test_a_model_without_eyes_is_known_before_the_file_is_read():
    with pytest.raises(RequestError, match="takes no pictures"):
        Conversation(inputs=("text",)).obey("/image none.png")


def test_the_conversation_is_saved_into_a_new_file_only(talk, tmp_path, picture):
    talk.obey("/system Be brief.")
    talk.obey(f"/image {picture}")
    talk.add("what?", reply("Red."))
    path = tmp_path / "talk.md"
    assert talk.obey(f"/save {path}") == f"2 turns written to {path}"
    assert path.read_text(encoding="utf-8") == (
        "## system\n\nBe brief.\n\n## user\n\none\n\n## assistant, thinking\n\nso 1\n\n"
        "## assistant\n\n1\n\n## user\n\n(a picture)\n\nwhat?\n\n## assistant\n\nRed.\n"
    )
    for name in (path, tmp_path, tmp_path / "none" / "talk.md", ""):
        with pytest.raises(RequestError):
            talk.obey(f"/save {name}")
    assert path.read_text(encoding="utf-8").endswith("Red.\n")


def test_an_unknown_command_says_how_to_send_such_a_line(talk):
    with pytest.raises(RequestError, match="/bin/sh is not a command") as caught:
        talk.obey("/bin/sh -c")
    assert "a blank before the slash" in caught.value.hint


def test_help_names_every_command(talk):
    assert all(name in talk.obey("/help") for name in COMMANDS)
