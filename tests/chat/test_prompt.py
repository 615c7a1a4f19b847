import base64
import io

import pytest
from PIL import Image

from emberbox.chat.prompt import ChatFormat
from emberbox.errors import RequestError


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
