import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from emberbox.chat.decode_image import read_data_uri, to_rgb
from emberbox.errors import RequestError

PARAM = "messages[3].content[1].image_url.url"


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width, height, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def refusal(source, **options):
    with pytest.raises(RequestError) as caught:
        to_rgb(source, param=PARAM, **options)
    assert caught.value.param == PARAM
    assert str(caught.value).startswith(PARAM)
    return str(caught.value)


def huge_png(width, height):
    """A header that promises `width` x `height`; the pixels behind it are missing."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_lossless_files_come_back_exactly(kind):
    image = noise(13, 7)
    got = to_rgb(
        encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})), param=PARAM
    )
    assert got.mode == "RGB"
    assert np.array_equal(np.asarray(got), np.asarray(image))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGBA", (5, 3), (200, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (5, 3), (200, 0, 100, 128)), (227, 127, 177)),
        (Image.new("LA", (5, 3), (0, 0)), (255, 255, 255)),
        (Image.new("L", (5, 3), 77), (77, 77, 77)),
        (Image.new("1", (5, 3), 1), (255, 255, 255)),
        (Image.fromarray(np.full((3, 5), 30000, np.uint16)), (117, 117, 117)),
    ],
)
def test_modes_keep_their_colour(image, expected):
    for source in (image, encoded(image)):
        got = np.asarray(to_rgb(source, param=PARAM)).reshape(-1, 3)
        assert np.abs(got.astype(int) - expected).max() <= 1


def test_palette_with_transparency_is_laid_on_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((0, 0), 1)
    got = np.asarray(to_rgb(encoded(image, transparency=0), param=PARAM))
    assert tuple(got[0, 0]) == (200, 100, 50)
    assert tuple(got[3, 3]) == (255, 255, 255)


def test_cmyk_jpeg_has_its_colours():
    image = Image.new("RGB", (32, 32), (250, 60, 20)).convert("CMYK")
    got = np.asarray(to_rgb(encoded(image, "JPEG", quality=95), param=PARAM))
    assert np.abs(got.reshape(-1, 3).mean(0) - (250, 60, 20)).max() < 6


def test_the_cameras_orientation_is_applied():
    image = Image.new("RGB", (20, 10))
    image.paste((255, 0, 0), (0, 0, 10, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the scene is at the right
    got = to_rgb(encoded(image, exif=exif), param=PARAM)
    assert got.size == (10, 20)
    assert got.getpixel((5, 2)) == (255, 0, 0)
    assert got.getpixel((5, 17)) == (0, 0, 0)


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert to_rgb(data, param=PARAM).getpixel((3, 2)) == (255, 0, 0)
    opened = Image.open(io.BytesIO(data))
    opened.seek(2)
    assert to_rgb(opened, param=PARAM).getpixel((3, 2)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(30_000, 30_000), (12_000, 8_000), (8193, 8192), (2**31 - 1, 1)])
def test_bombs_are_refused_by_their_header(size):
    assert "pixels" in refusal(huge_png(*size))


def test_the_limit_holds_for_files_and_images_alike():
    image = noise(10, 11)
    for source in (image, encoded(image)):
        assert to_rgb(source, param=PARAM, max_pixels=110).size == (10, 11)
        assert "10 x 11 pixels; expected 1 to 109" in refusal(source, max_pixels=109)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_cut_files_are_refused_and_not_grey(kind):
    data = encoded(noise(64, 48), kind)
    message = refusal(data[: len(data) * 6 // 10])
    assert "damaged or incomplete" in message or "not an image" in message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"P6 1 1 255\n\0\0\0",
        b"GIF89a",
        encoded(noise(4, 4), "TIFF"),
    ],
)
def test_what_is_no_picture_of_the_known_kinds_is_refused(data):
    message = refusal(data)
    assert "expected PNG, JPEG, WebP, GIF or BMP" in message or "is empty" in message


def test_a_bit_flipped_anywhere_is_a_picture_or_a_refusal():
    data = encoded(noise(9, 9), "PNG")
    for at in range(0, len(data), 5):
        broken = bytearray(data)
        broken[at] ^= 0x41
        try:
            assert to_rgb(bytes(broken), param=PARAM).mode == "RGB"
        except RequestError as error:
            assert error.param == PARAM


def test_sources_of_other_types_are_refused():
    assert "got int" in refusal(7)


URI = base64.b64encode(bytes(range(240, 256)) * 2 + b"!").decode()


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{URI}",
        f"DATA:IMAGE/PNG;BASE64,{URI}",
        f"data:image/jpeg;charset=utf-8;base64,{URI}",
        f"data:image/png;base64,{URI.rstrip('=')}",
        f"data:image/png;base64,{URI.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,\r\n{URI[:20]}\n {URI[20:]}\n",
    ],
)
def test_spellings_of_data_uris(uri):
    assert "/" in URI
    assert read_data_uri(uri, param=PARAM) == bytes(range(240, 256)) * 2 + b"!"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("https://example.org/a.png", "https: addresses are not fetched"),
        ("HTTP://127.0.0.1/a.png", "http: addresses are not fetched"),
        ("file:///etc/passwd", "file: addresses are not fetched"),
        ("a.png", "not a data: URI"),
        ("", "not a data: URI"),
        ("data:image/png;base64", "not a data: URI"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "image/svg+xml; expected PNG"),
        ("data:text/html;base64,PGI+", "text/html; expected PNG"),
        ("data:,abc", "text/plain; expected PNG"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64;x=y,YWJj", "not base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,====", "is empty"),
        ("data:image/png;base64,YW*j", "broken base64"),
        ("data:image/png;base64,YWJjY", "broken base64"),
        ("data:image/png;base64,YWJé", "broken base64"),
    ],
)
def test_other_addresses_are_refused(uri, message):
    with pytest.raises(
        RequestError, match="^" + PARAM.replace("[", r"\[").replace(".", r"\.")
    ) as e:
        read_data_uri(uri, param=PARAM)
    assert message in str(e.value)
    assert e.value.param == PARAM


def test_the_bytes_decide_not_the_declared_kind():
    data = base64.b64encode(encoded(noise(3, 5))).decode()
    assert to_rgb(f"data:image/jpeg;base64,{data}", param=PARAM).size == (3, 5)
