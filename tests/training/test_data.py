"""The generator: reproducible, true, in the chat format, and silent about held-out wordings."""

import hashlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from emberbox.chat.media import prepare_image, prepare_video
from emberbox.chat.template import ChatTemplate
from training.data import basics, pictures, recall, tool_use
from training.data.cases import CaseMaker
from training.data.maker import SINGLES, Encoder, Maker
from training.data.seeds import Purpose, stream
from training.data.tables import small_talk, wordings
from training.data.text import TOKENIZER, filler_lines, held_out
from training.data.turns import EFFORTS, OBSERVATION, Dice, head
from training.recipe import Bucket
from training.shape import PAD_ID, TOKEN
from training.skills import SKILLS

NANO = Path(TOKENIZER).parent
TOKENS = Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def text():
    return held_out(TOKENS)


def every_wording():
    talks = {f"talk {i}": talk.wordings for i, talk in enumerate(small_talk())}
    return {**wordings(), **talks}


def dice(seed=0, **options):
    return Dice(random.Random(seed), **options)


# -- reproducible ---------------------------------------------------------------------------------


def test_a_seed_gives_the_same_batch_whatever_came_before(text):
    bucket = Bucket(length=256, share=1, rows=3)
    first, second = Maker(TOKENS, text), Maker(TOKENS, text)
    second.batch(1, bucket)
    ids, weights, pixels = first.batch(7, bucket)
    again, same_weights, _ = second.batch(7, bucket)
    assert np.array_equal(ids, again)
    assert np.array_equal(weights, same_weights)
    assert pixels is None
    assert not np.array_equal(ids, first.batch(8, bucket)[0])


def test_data_do_not_change_unnoticed(text):
    """A new digest means new training data: change it knowingly, and retrain."""
    ids, weights, _ = Maker(TOKENS, text).batch(3, Bucket(length=512, share=1, rows=16))
    digest = hashlib.sha256(ids.tobytes() + weights.tobytes()).hexdigest()[:16]
    assert digest == "aff7be5bcbab4455"


def test_purposes_never_share_a_stream():
    draws = {purpose: stream(purpose, "echo", 5).random() for purpose in Purpose}
    assert len(set(draws.values())) == len(Purpose)
    assert stream(Purpose.PANEL, "a", 1).random() == stream(Purpose.PANEL, "a", 1).random()
    assert stream(Purpose.PANEL, "a", 11).random() != stream(Purpose.PANEL, "a1", 1).random()


# -- wordings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("intent", every_wording(), ids=str)
def test_wordings_are_many_and_split(intent):
    ways = every_wording()[intent]
    least = (6, 2) if intent in ("suffix", "prefix") else (8, 3)
    assert (len(ways.seen), len(ways.held_out)) >= least
    assert len(ways.held_out) >= least[1]
    overlap = set(ways.seen) & set(ways.held_out) - {""}
    assert not overlap
    fields = {frozenset(re.findall(r"\{(\w+)\}", way.replace("X", "x"))) for way in ways.held_out}
    known = {frozenset(re.findall(r"\{(\w+)\}", way.replace("X", "x"))) for way in ways.seen}
    assert fields == known


def test_dressing_never_makes_a_held_out_wording_of_a_seen_one():
    for intent, ways in wordings().items():
        dressed = {p + way for p in wordings()["prefix"].seen for way in ways.seen}
        dressed |= {way + s for s in wordings()["suffix"].seen for way in ways.seen}
        assert not dressed & set(ways.held_out), intent


def test_training_turns_never_use_held_out_wordings():
    plain = [
        re.escape(way) for w in every_wording().values() for way in w.held_out if len(way) > 12
    ]
    patterns = {p for p in plain if r"\{" not in p}
    d, said = dice(), []
    for _ in range(400):
        said += [make(d).user for make in SINGLES]
        said += [turn.user for turn in pictures.scene(d, (112, 112)).turns]
    for pattern in patterns:
        assert not [text for text in said if re.fullmatch(pattern, text)], pattern


def test_four_of_ten_items_use_held_out_wordings(text):
    cases = [CaseMaker(TOKENS, text).case("chat", i) for i in range(20)]
    assert sum(case.held_out for case in cases) == 8
    seen = {way for talk in small_talk() for way in talk.wordings.seen}
    for case in cases:
        user = TOKENS.decode(list(case.prompt), skip_special_tokens=False)
        user = user.partition("<|user|>")[2].partition("<|assistant|>")[0]
        assert (user in seen) != case.held_out


# -- the chat format ------------------------------------------------------------------------------


def as_messages(turns, effort, tools):
    """The turns as OpenAI-shaped messages."""
    messages = []
    for turn in turns:
        if turn.role == OBSERVATION:
            results = re.findall("<tool_response>(.*?)</tool_response>", turn.user, re.DOTALL)
            messages += [
                {"role": "tool", "tool_call_id": f"c{i}", "content": r}
                for i, r in enumerate(results)
            ]
        else:
            messages.append({"role": "user", "content": turn.user})
        reply = {"role": "assistant", "content": turn.reply}
        if turn.think and effort != "Low":
            reply["reasoning_content"] = turn.think
        if turn.stop == OBSERVATION:
            reply |= {"content": "", "tool_calls": calls_of(turn.reply, tools)}
        messages.append(reply)
    return messages


def calls_of(reply, tools):
    types = {t["name"]: t["parameters"]["properties"] for t in tools}
    calls = []
    for i, call in enumerate(re.findall("<tool_call>(.*?)</tool_call>", reply, re.DOTALL)):
        name, *parts = call.split("<arg_key>")
        pairs = [part.removesuffix("</arg_value>").split("</arg_key><arg_value>") for part in parts]
        arguments = {
            k: v if types[name][k]["type"] == "string" else json.loads(v) for k, v in pairs
        }
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"c{i}", "type": "function", "function": function})
    return calls


@pytest.mark.parametrize("seed", range(24))
def test_the_template_renders_what_the_generator_writes(seed):
    d, template = dice(seed), ChatTemplate.open(NANO)
    effort, tools = EFFORTS[seed % 3], ()
    if seed % 2:
        made = tool_use.tool_chat(d, ["tool_call", "tool_parallel", "tool_none"])
        turns, tools = list(made.turns), made.tools
    else:
        turns = [make(d) for make in (basics.sums, basics.echo, basics.lists)]
    wrapped = [{"type": "function", "function": tool} for tool in tools] or None
    before = head(effort, None, tools)
    for i, turn in enumerate(turns):
        messages = as_messages(turns[: i + 1], effort, tools)[:-1]
        rendered = template.render(messages, wrapped, reasoning_effort=effort.lower())
        assert rendered == before + turn.prompt
        before += turn.prompt + turn.answer(effort)


def test_thinking_off_is_an_empty_think_block(text):
    maker = CaseMaker(TOKENS, text)
    case = next(c for i in range(40) if (c := maker.case("facts", i)).mode == "Off")
    user = TOKENS.decode(list(case.prompt), skip_special_tokens=False)
    message = {
        "role": "user",
        "content": user.partition("<|user|>")[2].partition("<|assistant|>")[0],
    }
    assert ChatTemplate.open(NANO).render([message], enable_thinking=False) == user
    assert list(case.prompt[-2:]) == [TOKEN["<think>"], TOKEN["</think>"]]
    assert TOKEN["</think>"] not in case.answer


# -- true answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_sums_are_right_in_thought_and_reply(seed):
    turn = basics.sums(dice(seed))
    assert turn.think.endswith(f"So {turn.reply}.")
    for left, right in re.findall(r"([\d+*-]+)=(\d+)", turn.think):
        assert eval(left) == int(right)
    numbers = [int(n) for n in re.findall(r"\d+", turn.user)]
    a, b = numbers
    assert int(turn.reply) in (a + b, a - b, a * b)


@pytest.mark.parametrize("seed", range(10))
def test_the_last_code_counts_and_keeps_its_place(seed, text):
    d = dice(seed)
    codes = recall.hard_codes(d, 6)
    assert any(len(history) > 1 for history in codes.lines) or seed % 3
    document = Encoder(TOKENS).document(d, text.fillers, codes, 800)
    shown = TOKENS.decode(list(document))
    for history, code in zip(codes.lines, codes.table.values(), strict=True):
        places = [shown.index(line) for line in history]
        assert places == sorted(places)
        assert code in history[-1]
    assert 800 <= len(document) < 900


def test_near_names_share_a_word():
    names = list(recall.hard_codes(dice(3), 6).table)
    stems = [name.split()[0] for name in names]
    assert len(set(names)) == 6
    assert len(set(stems)) < 6


@pytest.mark.parametrize("seed", range(30))
def test_a_misfit_asks_for_no_offered_tool(seed):
    made = tool_use.tool_chat(dice(seed), ["tool_none"])
    assert len(made.tools) >= 1
    assert made.turns[0].reply == tool_use.NO_TOOL
    assert not any(tool["name"] in made.turns[0].user for tool in made.tools)


def test_most_misfits_are_made_up_and_near_to_an_offered_name():
    made_up = near = few = 0
    for seed in range(400):
        made = tool_use.tool_chat(dice(seed), ["tool_none"])
        names = [tool["name"] for tool in made.tools]
        assert len(set(names)) == len(names)
        assert 1 <= len(names) <= 4
        few += len(names) < 3
        asked = re.search(rf"\b({'|'.join(tool_use.VERBS)})_([a-z]+)\b", made.turns[0].user)
        if asked:
            made_up += 1
            near += any({asked[1], asked[2]} & set(name.split("_")) for name in names)
    assert made_up >= 220
    assert near >= 160
    assert 120 < few < 280


def test_calls_too_are_offered_names_near_to_theirs():
    near = 0
    for seed in range(300):
        made = tool_use.tool_chat(dice(seed), ["tool_call"])
        called = made.turns[0].reply.removeprefix("<tool_call>").partition("<")[0]
        names = [tool["name"] for tool in made.tools]
        assert called in names
        words = set(called.split("_"))
        near += any(words & set(name.split("_")) for name in names if name != called)
    assert near >= 45


def test_parallel_calls_are_two():
    for seed in range(20):
        made = tool_use.tool_chat(dice(seed), ["tool_parallel"])
        assert made.turns[0].reply.count("<tool_call>") == 2
        assert made.turns[1].user.count("<tool_response>") == 2


def test_echoes_hold_every_script():
    said = "".join(basics.echo(dice(seed)).reply for seed in range(60))
    for low, high in (("一", "鿿"), ("가", "힣"), ("؀", "ۿ"), ("\U0001f300", "\U0001faff")):
        assert any(low <= letter <= high for letter in said)


# -- pictures -------------------------------------------------------------------------------------


def colour_mask(pixels, name):
    distance = np.abs(pixels.astype(int) - pictures.COLOURS[name]).max(-1)
    return distance <= 8


@pytest.mark.parametrize("size", [(112, 112), (168, 112)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_clips_move_and_change_as_they_say(seed, size):
    scene = pictures.scene(dice(seed), size, "video_colours")
    by_user = {turn.user.rpartition("<|end_of_video|>")[2]: turn for turn in scene.turns}
    way = next(t.reply for t in scene.turns if t.skill == "video_direction")
    first = next(t.reply for user, t in by_user.items() if re.search("first|start|begin", user))
    last = next(t.reply for user, t in by_user.items() if re.search("last|end", user))
    spots = [
        np.argwhere(colour_mask(p, c)).mean(0)
        for p, c in zip(scene.pixels, (first, last), strict=True)
    ]
    dy, dx = spots[1] - spots[0]
    ways = {"right": dx, "left": -dx, "down": dy, "up": -dy}
    assert max(ways, key=ways.get) == way


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_true(seed):
    d = dice(seed)
    canvas = pictures.Canvas(d, (112, 112), "white", "red")
    (image,), turns = pictures._two_shapes(canvas)
    where, side, colour = turns
    a, word, b = re.fullmatch(r"The (\w+) is (.+) the (\w+)\.", where.reply).groups()
    asked = next(s for s in (a, b) if s in colour.user)
    pixels = np.asarray(image)
    here = np.argwhere(colour_mask(pixels, colour.reply)).mean(0)
    every = np.argwhere(~colour_mask(pixels, "white") & (pixels.min(-1) < 225)).mean(0)
    dy, dx = here - every
    true = (
        ("left of" if dx < 0 else "right of")
        if abs(dx) > abs(dy)
        else ("above" if dy < 0 else "below")
    )
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert true == (word if asked == a else opposite[word])
    ends = {
        "on the left": "left of",
        "on the right": "right of",
        "at the top": "above",
        "at the bottom": "below",
    }
    end = next(e for e in ends if e in side.user)
    assert side.reply == f"The {asked if ends[end] == true else (b if asked == a else a)}."


@pytest.mark.parametrize("size", [(112, 112), (168, 112)], ids=str)
def test_the_engine_makes_as_many_tokens_of_a_picture(size):
    for skill in ("vision_code", "video_direction"):
        scene = pictures.scene(dice(1), size, skill)
        frames = [Image.fromarray(frame) for frame in scene.pixels]
        is_clip = "<|begin_of_video|>" in scene.turns[0].user
        patches = prepare_video(frames, 2.0) if is_clip else prepare_image(frames[0])
        assert patches.num_tokens == scene.turns[0].user.count("<|image|>")
        assert patches.slice_seconds == ((0.0,) if is_clip else ())
        assert np.array_equal(scene.pixels[0], scene.pixels[1]) != is_clip


# -- rows and cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, 256, 1024, 2048])
def test_rows_are_weighted_and_closed(length, text):
    ids, weights, _ = Maker(TOKENS, text).batch(5, Bucket(length=length, share=1, rows=12))
    assert ids.shape == weights.shape == (12, length)
    assert ids.min() >= 0
    assert ids.max() < 4096
    padding = weights < 0
    assert (ids[padding] == PAD_ID).all()
    assert ((weights >= 1) & (ids == TOKEN["</think>"])).sum() > 0
    for row, weight in zip(ids, weights, strict=True):
        end = (weight >= 0).sum()
        assert (weight[:end] >= 0).all()
        assert end == length or row[end - 1] in (TOKEN["<|user|>"], TOKEN["<|observation|>"])


def test_picture_rows_hold_their_picture(text):
    bucket = Bucket(length=128, share=1, rows=6, image=(168, 112))
    ids, _, pixels = Maker(TOKENS, text).batch(5, bucket)
    assert pixels.shape == (6, 2, 112, 168, 3)
    assert ((ids == TOKEN["<|image|>"]).sum(1) == 24).all()


def test_filler_lines_read_alone():
    lines = filler_lines(
        ["short\n  A line of thirty letters or more.\n# not a word at the start ....\n"]
    )
    assert lines == ["A line of thirty letters or more.\n"]


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_cases_depend_on_their_number_alone(skill, text):
    length = min(skill.length, 1000)
    one, two = (CaseMaker(TOKENS, text) for _ in range(2))
    two.case(skill.case, 3, length)
    first, again = one.case(skill.case, 5, length), two.case(skill.case, 5, length)
    assert np.array_equal(first.prompt, again.prompt)
    assert np.array_equal(first.answer, again.answer)
    other = CaseMaker(TOKENS, text, Purpose.CALIBRATION).case(skill.case, 5, length)
    assert first.pixels is None or not np.array_equal(first.pixels, other.pixels)
    assert first.answer[-1] in (TOKEN["<|user|>"], TOKEN["<|observation|>"])
    if length > 1:
        assert length <= len(first.prompt) < length + 150
