"""Engine with pictures: they match their tokens, are told apart, and are encoded when needed."""

import pytest
import torch
from PIL import Image

from emberbox.chat.media import prepare_video
from emberbox.engine.pictures import PromptPictures
from emberbox.engine.request import Prompt
from emberbox.errors import RequestError
from tests.engine.engine_world import IMAGE_TOKEN
from tests.engine.small_engine import WORDS, drain, engine_of, ids, params, run, tokens_of
from tests.helpers.nano import nano_llm


def picture(colour: tuple[int, int, int], size=(84, 112)) -> Image.Image:
    image = Image.new("RGB", size, (235, 235, 235))
    image.paste(colour, (20, 20, 64, 84))
    return image


def picture_prompt(colour, words="") -> Prompt:
    content = [
        {"type": "image", "image": picture(colour)},
        {"type": "text", "text": words + "What colour is the square?"},
    ]
    return nano_llm().prepare_chat([{"role": "user", "content": content}], enable_thinking=False)


def prefixes(text: str) -> list[str]:
    words = text.split(" ")
    return [" ".join([*words[:n], ""]) for n in range(len(words))]


RED, BLUE = (220, 30, 30), (30, 60, 220)


def test_pictures_and_image_tokens_have_to_match():
    prompt = picture_prompt(RED)
    made, token = prompt.images[0].num_tokens, nano_llm().config.image_token_id
    engine = engine_of()
    for token_ids, images, numbers in [
        (prompt.token_ids, (), f"{made} image tokens, its images make 0"),
        ((*prompt.token_ids, token), prompt.images, f"{made + 1} image tokens, .* make {made}"),
        (prompt.token_ids, prompt.images * 2, f"{made} image tokens, .* make {2 * made}"),
        ((5, 6), prompt.images, f"0 image tokens, its images make {made}"),
    ]:
        with pytest.raises(RequestError, match=numbers):
            engine.submit(0, Prompt(token_ids, images), params(1))
    assert not engine.has_work


def test_two_pictures_behind_the_same_tokens_share_nothing_and_one_shares_with_itself():
    red, blue = picture_prompt(RED, WORDS * 3), picture_prompt(BLUE, WORDS * 3)
    assert red.token_ids == blue.token_ids
    alone = [run(engine_of(), prompt.token_ids, 8, prompt.images) for prompt in (red, blue)]
    assert alone[0] != alone[1]
    engine = engine_of(num_snapshots=12, num_pages=12)
    got = []
    for i, prompt in enumerate((red, blue, red)):
        engine.submit(i, prompt, params(8))
        got.append(drain(engine)[i])
    assert [tokens_of(events) for events in got] == [alone[0], alone[1], alone[0]]
    end_of_picture = max(i for i, each in enumerate(red.token_ids) if each == IMAGE_TOKEN)
    assert got[1][0].num_cached <= end_of_picture - red.images[0].num_tokens + 1
    assert got[2][0].num_cached > end_of_picture


def picture_pages() -> list[Prompt]:
    """Prompts with a picture that almost fill a page: a reply needs another one."""
    words = next(w for w in prefixes(WORDS * 3) if len(picture_prompt(RED, w).token_ids) > 61)
    prompts = [picture_prompt(colour, words) for colour in (RED, BLUE)]
    assert len(prompts[0].token_ids) <= 64
    return prompts


def test_a_preempted_picture_is_encoded_again(monkeypatch):
    cut = picture_pages()
    expected = [run(engine_of(num_snapshots=0), p.token_ids, 8, p.images) for p in cut]
    assert expected[0] != expected[1]
    engine = engine_of(num_pages=3, num_snapshots=0, max_model_len=128)
    seen = []
    encode = engine.runner.encode
    monkeypatch.setattr(
        engine.runner, "encode", lambda pixels, grid: seen.append(pixels) or encode(pixels, grid)
    )
    for i, prompt in enumerate(cut):
        engine.submit(i, prompt, params(8))
    events = drain(engine)
    assert [tokens_of(events[i]) for i in range(2)] == expected
    assert engine.stats().num_preemptions == 1
    reds = [bool((pixels == cut[0].images[0].pixel_values).all()) for pixels in seen]
    assert reds == [True, False, False]
    assert engine.stats().prompt_tokens == 2 * len(cut[0].token_ids)  # each once


def test_a_picture_that_was_cached_is_encoded_when_its_snapshot_is_gone():
    prompt = picture_pages()[0]
    engine = engine_of(num_pages=3, num_snapshots=8, max_model_len=128)
    engine.submit(0, prompt, params(8))
    expected = tokens_of(drain(engine)[0])
    engine.submit(1, Prompt(ids(62)), params(8))
    engine.submit(2, prompt, params(8))
    events = {1: [], 2: []}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        if engine.stats().num_preemptions:
            engine.scheduler.snapshots.clear()
    assert engine.stats().num_preemptions == 1
    assert {event.num_cached for event in events[2]} == {62 - prompt.num_suffix_tokens}
    assert tokens_of(events[2]) == expected


def two_pictures() -> Prompt:
    first, second = picture_prompt(RED), picture_prompt(BLUE)
    return Prompt(first.token_ids + second.token_ids, first.images + second.images)


@torch.inference_mode()
def test_a_chunk_encodes_the_pictures_it_meets_and_holds_no_others():
    prompt, encode = two_pictures(), nano_llm().engine.runner.encode
    places = [i for i, each in enumerate(prompt.token_ids) if each == IMAGE_TOKEN]
    num, end = prompt.images[0].num_tokens, len(prompt.token_ids)
    seen = []

    def watched(pixels, grid):
        seen.append(grid)
        return encode(pixels, grid)

    pictures = PromptPictures(prompt.token_ids, prompt.images, IMAGE_TOKEN)
    every = pictures.rows(watched, 0, end)
    assert sorted(every) == places
    assert pictures.num_made == len(places)
    assert sorted(pictures.rows(watched, places[num - 1], end)) == places[num - 1 :]
    assert len(seen) == 2  # both were there
    assert pictures.rows(watched, places[-1] + 1, end) == {}
    assert pictures.num_made == 0
    again = pictures.rows(watched, places[1], places[3])
    assert sorted(again) == places[1:3]
    assert all(torch.equal(again[at], every[at]) for at in again)
    assert (len(seen), pictures.num_made) == (3, num)


@torch.inference_mode()
def test_a_clip_is_encoded_slice_by_slice_as_it_would_be_whole():
    frames = [picture(RED, (112, 112)), picture(BLUE, (112, 112))] * 3
    clip = prepare_video(frames, 2.0, nano_llm().format.media)
    assert clip.grid[0] > 1
    pixels = torch.from_numpy(clip.pixel_values)
    whole = nano_llm().network.vision(pixels, [clip.grid])
    grids = []

    def encode(pixels, grid):
        grids.append(grid)
        return nano_llm().engine.runner.encode(pixels, grid)

    pictures = PromptPictures([IMAGE_TOKEN] * clip.num_tokens, [clip], IMAGE_TOKEN)
    rows = pictures.rows(encode, 0, clip.num_tokens)
    assert grids == [(1, *clip.grid[1:])] * clip.grid[0]
    assert (torch.stack([rows[i] for i in range(clip.num_tokens)]) - whole).abs().max() < 1e-5


def test_a_picture_that_cannot_be_encoded_ends_its_own_request_alone(monkeypatch):
    engine = engine_of()
    expected = run(engine_of(), ids(40), 6)

    def fail(pixels, grid):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "encode", fail)
    engine.submit(0, Prompt(ids(40)), params(6))
    prompt = picture_prompt(RED)
    engine.submit(1, prompt, params(6))
    events = drain(engine)
    assert tokens_of(events[0]) == expected
    (failed,) = events[1]
    assert str(failed.error) == "out of memory"
    engine.scheduler.snapshots.clear()
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize("prefill_tokens", [1, 7, 100])
def test_each_image_token_gets_its_own_embedding_however_the_prompt_is_cut(
    monkeypatch, prefill_tokens
):
    prompt = picture_prompt(RED)
    engine = engine_of(prefill_tokens=prefill_tokens)
    pictures = PromptPictures(prompt.token_ids, prompt.images, IMAGE_TOKEN)
    expected = pictures.rows(engine.runner.encode, 0, len(prompt.token_ids))
    given, forward = {}, engine.runner.network.forward

    def watched(batch, cache):
        (span,) = batch.spans
        if batch.features is not None:
            rows = (batch.feature_rows + span.position).tolist()
            given.update(zip(rows, batch.features, strict=True))
        return forward(batch, cache)

    monkeypatch.setattr(engine.runner.network, "forward", watched)
    engine.submit(0, prompt, params(2))
    drain(engine)
    assert sorted(given) == sorted(expected)
    assert all(torch.equal(given[at], expected[at]) for at in expected)
