"""Bytes, data URIs and PIL images to one upright RGB picture, refusing what is broken or hostile.

The size is read from the file's header and checked before a pixel is decoded. Nothing is fetched:
an address is refused. The camera's orientation is applied, transparent parts are laid on white, of
an animation the first frame is taken. Knows no patches and no tokens.
"""

import base64
import binascii
import io
import re

import numpy as np
from PIL import Image, ImageOps

from emberbox.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMAT_NAMES = "PNG, JPEG, WebP, GIF or BMP"

# 192 MiB as RGB: above the cameras in common use, and no danger to a small box.
MAX_PIXELS = 8192 * 8192
MAX_FILE_BYTES = 64 << 20

_DATA_URI = re.compile(
    r"data:(?P<media>[\w.+-]+/[\w.+-]+)?(?P<options>(?:;[^;,]*)*),", re.IGNORECASE
)
_HINT_URI = "send the picture itself: data:image/png;base64,…"


def to_rgb(source: object, *, param: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in mode RGB. `source`: file bytes, a data URI (str) or a PIL image.

    Raises RequestError with `param` for anything that is no sound picture of at most `max_pixels`.
    """
    return _guarded(_opened(source, param, max_pixels), param)


def size_of(source: object, *, param: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height as the header tells them, before the camera's orientation is applied.

    No pixel is decoded. Takes and refuses what `to_rgb` does, but for damage behind the header.
    """
    return _opened(source, param, max_pixels).size


def read_data_uri(uri: str, *, param: str) -> bytes:
    """The bytes of a base64 `data:image/…` URI.

    The kind it names is not believed (the bytes decide), but must be an image's, and not SVG.
    Accepted: any case of the head, further options, line breaks, missing padding, the URL-safe
    alphabet. Raises RequestError for everything else, and for an address of any other scheme.
    """
    head = _DATA_URI.match(uri)
    if head is None:
        raise RequestError(f"{param}: {_not_data(uri)}", param=param, hint=_HINT_URI)
    media = (head["media"] or "text/plain").lower()
    if not media.startswith("image/") or media.startswith("image/svg"):
        raise RequestError(
            f"{param}: the data URI is {media}; expected {FORMAT_NAMES}", param=param
        )
    if head["options"].lower().rpartition(";")[2].strip() != "base64":
        raise RequestError(f"{param}: the data URI is not base64", param=param, hint=_HINT_URI)
    payload = re.sub(r"[ \t\r\n]", "", uri[head.end() :]).rstrip("=")
    payload = payload.replace("-", "+").replace("_", "/")
    if not payload:
        raise RequestError(f"{param}: the data URI is empty", param=param)
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}: broken base64 ({error})", param=param) from error


def _not_data(uri: str) -> str:
    scheme = re.match(r"\s*([a-zA-Z][\w+.-]*):", uri)
    if scheme and scheme[1].lower() != "data":
        return f"{scheme[1].lower()}: addresses are not fetched by this server"
    return "not a data: URI of the form data:image/png;base64,…"


def _opened(source: object, param: str, max_pixels: int) -> Image.Image:
    """The picture with its size checked and nothing decoded yet."""
    if isinstance(source, str):
        source = read_data_uri(source, param=param)
    if isinstance(source, bytes | bytearray | memoryview):
        source = _open(bytes(source), param, max_pixels)
    if not isinstance(source, Image.Image):
        raise RequestError(
            f"{param}: expected image bytes, a data: URI or a PIL image, "
            f"got {type(source).__name__}",
            param=param,
        )
    _check_size(source.size, param, max_pixels)
    return source


def _open(data: bytes, param: str, max_pixels: int) -> Image.Image:
    if not data:
        raise RequestError(f"{param}: the image is empty", param=param)
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(
            f"{param}: the image file has {len(data)} bytes, at most {MAX_FILE_BYTES} are taken",
            param=param,
        )
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(
            f"{param}: the image has more than {max_pixels} pixels", param=param
        ) from error
    except Exception as error:  # the parsers of broken files raise whatever they stumble over
        raise RequestError(
            f"{param}: not an image this server can read; expected {FORMAT_NAMES}", param=param
        ) from error


def _check_size(size: tuple[int, int], param: str, max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1 or width * height > max_pixels:
        raise RequestError(
            f"{param}: the image is {width} x {height} pixels; expected 1 to {max_pixels} in all",
            param=param,
            hint="make it smaller; the model sees at most 6.3 million pixels",
        )


def _guarded(image: Image.Image, param: str) -> Image.Image:
    try:
        return _flatten(image)
    except Exception as error:  # as above: a damaged file can raise anything while it is decoded
        raise RequestError(
            f"{param}: the image is damaged or incomplete ({error})", param=param
        ) from error


def _flatten(image: Image.Image) -> Image.Image:
    if getattr(image, "is_animated", False):
        image.seek(0)
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        return _from_16_bit(upright)
    if "A" in upright.getbands() or upright.info.get("transparency") is not None:
        layer = upright.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return upright.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, scaled to 8: a plain conversion would clip all but the darkest to white."""
    values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
    grey = ((values + 128) // 257).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
