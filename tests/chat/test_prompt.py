import base64
import io
import tracemalloc
import weakref
from dataclasses import replace

import pytest
from PIL import Image

from emberbox.chat.decode_image import to_rgb
from emberbox.chat.media import measure_media, prepare_media
from emberbox.chat.messages import check_messages
from emberbox.chat.prompt import ChatFormat
from emberbox.errors import ContextLengthError, RequestError


@pytest.fixture(scope="module")
def chat_format(nano_folder):
    return ChatFormat.open(nano_folder)


def data_uri(width, height):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_a_picture_and_a_clip_become_the_training_format(chat_format):
    content = [
        {"type": "image_url", "image_url": {"url": data_uri(112, 112), "detail": "low"}},
        {"type": "text", "text": "What is <|image|>?"},
        {"type": "video", "video": [Image.new("RGB", (168, 112))] * 2, "fps": 2},
    ]
    ids, patches = chat_format.encode([{"role": "user", "content": content}])
    tokenizer = chat_format.tokenizer
    expected = [
        *tokenizer.encode_template(
            "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|><|begin_of_image|>"
            f"{'<|image|>' * 16}<|end_of_image|>"
        ),
        *tokenizer.encode("What is <|image|>?"),
        *tokenizer.encode_template(
            f"<|begin_of_video|><|begin_of_image|>{'<|image|>' * 24}<|end_of_image|>0.0 seconds"
            "<|end_of_video|><|assistant|><think>"
        ),
    ]
    assert ids == expected
    assert [p.grid for p in patches] == [(1, 8, 8), (1, 8, 12)]
    assert sum(p.num_tokens for p in patches) == ids.count(tokenizer.special_id("<|image|>"))


def test_text_alone_has_no_patches(chat_format):
    messages = [{"role": "user", "content": "Hi"}]
    ids, patches = chat_format.encode(messages, enable_thinking=False)
    assert patches == []
    assert ids == chat_format.tokenizer.encode_template(
        "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Hi<|assistant|><think></think>"
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [("https://example.org/x.png", "not fetched"), ("data:image/png;base64,AAAA", "not an image")],
)
def test_a_bad_picture_is_named_by_its_place(chat_format, address, message):
    content = [{"type": "text", "text": "a"}, {"type": "input_image", "image_url": address}]
    with pytest.raises(RequestError, match=message) as caught:
        chat_format.encode([{"role": "user", "content": "x"}, {"role": "user", "content": content}])
    assert caught.value.param == "messages[1].content[1].image_url"


def lying(width, height):
    """A picture that its header calls `width` x `height` and its orientation turns by a quarter."""
    image, exif, buffer = Image.new("RGB", (width, height)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def of(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_what_is_too_long_is_refused_with_both_numbers_before_a_pixel_is_decoded(
    chat_format, monkeypatch
):
    part = {"type": "image_url", "image_url": {"url": data_uri(2400, 2400)}}
    clip = {"type": "video", "video": [data_uri(2400, 2400)] * 4, "fps": 2}
    monkeypatch.setattr(Image.Image, "load", None)  # whoever decodes fails
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    # 86 x 86 blocks are 7396 tokens; of a clip two slices of them and their times.
    for messages, num_tokens in ((of(*[part] * 6), 6 * 7396), (of(clip), 2 * (7396 + 2))):
        tracemalloc.start()
        with pytest.raises(
            ContextLengthError, match="context holds 9000 tokens and the prompt"
        ) as e:
            chat_format.encode(messages, max_tokens=9000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        said = int(e.value.message.split()[-1])
        assert num_tokens < said < num_tokens + 40
        assert e.value.param == "messages"
        assert peak < 4 << 20


def test_the_limit_is_inclusive_and_text_counts(chat_format):
    messages = of({"type": "image", "image": Image.new("RGB", (300, 200))}, TEXT)
    ids, _ = chat_format.encode(messages)
    assert chat_format.encode(messages, max_tokens=len(ids))[0] == ids
    for too_long in (messages, [{"role": "user", "content": "word " * 200}]):
        length = len(chat_format.encode(too_long)[0])
        with pytest.raises(ContextLengthError, match=f"holds {length - 1} .* has {length}\n"):
            chat_format.encode(too_long, max_tokens=length - 1)


TEXT = {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize(
    ("width", "height"), [(5000, 2801), (2801, 5000), (4000, 1999), (113, 300)], ids="{}".format
)
def test_a_picture_on_its_side_is_never_counted_for_more_than_it_takes(chat_format, width, height):
    (ref,) = check_messages(of({"type": "image", "image": lying(width, height)})).media
    patches = prepare_media(ref)
    assert (patches.grid[1] > patches.grid[2]) == (width > height)  # it was turned
    measured = measure_media(ref)
    assert patches.num_tokens - 100 <= measured.num_tokens <= patches.num_tokens


@pytest.mark.parametrize("num_frames", [1, 2, 5, 9])
def test_a_clip_is_measured_as_it_is_prepared(chat_format, num_frames):
    frames = [Image.new("RGB", (168, 168))] * num_frames
    (ref,) = check_messages(of({"type": "video", "video": frames, "fps": 2})).media
    assert measure_media(ref) == prepare_media(ref).layout


def test_the_frames_of_a_clip_are_decoded_one_after_another(chat_format):
    frames = [data_uri(1400, 1400)] * 16
    settings = replace(chat_format.media, max_video_tokens=512)
    (ref,) = check_messages(of({"type": "video", "video": frames, "fps": 2})).media
    alive = []

    class Watched:
        """Counts the decoded pictures that are alive at a time."""

    def watched(source, **options):
        image = to_rgb(source, **options)
        image.watch = Watched()
        alive.append(weakref.ref(image.watch))
        most.append(sum(one() is not None for one in alive))
        return image

    most = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberbox.chat.media.to_rgb", watched)
        prepare_media(ref, settings)
    assert len(most) == 16
    assert max(most) <= 3  # the first, the one before, and the new one
