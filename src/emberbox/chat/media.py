"""Pictures and clips to patches, as the vision tower was trained on them (architecture.md 5).

A picture is laid into the top left of a canvas of whole 28 x 28 blocks, one token each; the rest of
the canvas is black. It is shrunk to fit the token budget, never stretched, and enlarged only below
the minimum. Two frames make a temporal slice; a still picture is its own second frame. Knows the
numbers, not the network; `expand_media` fits a prompt's placeholders to the patches.
`measure_media` tells from headers alone how many tokens that will be, so that what is too long need
not be decoded.

Letters: T slices, h and w grid rows and columns in patches, N = T*h*w patches,
D = 3 channels * 2 frames * 14 * 14 pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from emberbox.chat.decode_image import size_of, to_rgb
from emberbox.chat.media_settings import MediaSettings
from emberbox.chat.messages import MediaRef, check_fps
from emberbox.chat.tokenizer import Tokenizer
from emberbox.errors import RequestError

# Frame rate assumed for a clip that does not tell its own.
DEFAULT_FPS = 24.0

DEFAULT_SETTINGS = MediaSettings()


@dataclass(frozen=True, slots=True)
class Layout:
    """What a picture or clip takes in a prompt; the fields are those of `Patches`."""

    grid: tuple[int, int, int]
    merge_size: int
    slice_seconds: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Placeholders in the prompt, one per merged block: T*h*w / merge_size^2."""
        return math.prod(self.grid) // self.merge_size**2

    @property
    def is_video(self) -> bool:
        """Whether it belongs to a `<|video|>` placeholder."""
        return bool(self.slice_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One picture or clip, ready for the vision tower.

    pixel_values: float32 [N, D], normalised; rows in block order (slice, block row, block column,
    then the patches of the block), a row ordered channel, frame, y, x. grid: (T, h, w).
    slice_seconds: the time of each slice of a clip, empty for a picture.
    """

    pixel_values: NDArray[np.float32]
    grid: tuple[int, int, int]
    merge_size: int
    slice_seconds: tuple[float, ...] = ()

    @property
    def layout(self) -> Layout:
        """Everything but the pixels."""
        return Layout(self.grid, self.merge_size, self.slice_seconds)

    @property
    def num_tokens(self) -> int:
        """As of the layout."""
        return self.layout.num_tokens

    @property
    def is_video(self) -> bool:
        """As of the layout."""
        return self.layout.is_video


def prepare_image(
    source: object, settings: MediaSettings = DEFAULT_SETTINGS, *, param: str = "image"
) -> Patches:
    """Patches of a picture: file bytes, a base64 data URI, or a PIL image.

    Raises RequestError (with `param`) for what is no picture, damaged, too large, or an address.
    """
    image = to_rgb(source, param=param, max_pixels=settings.max_pixels)
    canvas = canvas_size(
        image.height, image.width, settings.temporal_patch_size, settings.max_image_tokens, settings
    )
    frame = _lay_on_canvas(image, canvas, settings.temporal_patch_size, settings)
    frames = np.broadcast_to(frame, (settings.temporal_patch_size, *frame.shape))
    return _patchify(frames, settings, ())


def prepare_video(
    frames: Sequence[object],
    fps: float | None = None,
    settings: MediaSettings = DEFAULT_SETTINGS,
    *,
    param: str = "video",
) -> Patches:
    """Patches of a clip given as all its frames (each like an image) and their rate.

    Frames are chosen two per second, at most `max_frames`, decoded one after another, and share one
    canvas; `fps` None is 24. Raises RequestError for no frames, a bad rate, a bad frame, or frames
    of different sizes.
    """
    rate, chosen = _sampling(frames, fps, settings, param)
    first = to_rgb(frames[chosen[0]], param=f"{param}[{chosen[0]}]", max_pixels=settings.max_pixels)
    canvas = canvas_size(
        first.height, first.width, len(chosen), settings.max_video_tokens, settings
    )
    laid = np.empty((len(chosen), *canvas, 3), dtype=np.uint8)
    for at, index in enumerate(chosen):
        if at and index == chosen[at - 1]:  # the last frame of an odd number, taken twice
            laid[at] = laid[at - 1]
            continue
        where = f"{param}[{index}]"
        image = to_rgb(frames[index], param=where, max_pixels=settings.max_pixels) if at else first
        if image.size != first.size:
            raise RequestError(
                f"{where}: the frame is {image.width} x {image.height}, "
                f"the first one {first.width} x {first.height}",
                param=where,
            )
        laid[at] = _lay_on_canvas(image, canvas, len(chosen), settings)
    return _patchify(laid, settings, _slice_seconds(chosen, rate, settings))


def prepare_media(ref: MediaRef, settings: MediaSettings = DEFAULT_SETTINGS) -> Patches:
    """Patches of what a message holds; errors name the message's part."""
    if ref.kind == "video":
        return prepare_video(
            cast("Sequence[object]", ref.source), ref.fps, settings, param=ref.param
        )
    return prepare_image(ref.source, settings, param=ref.param)


def measure_media(ref: MediaRef, settings: MediaSettings = DEFAULT_SETTINGS) -> Layout:
    """What `prepare_media` will make of it, from the headers alone: not more tokens than that.

    A picture may lie on its side, which only its decoding tells for sure; of both ways the one with
    fewer tokens is told. Raises RequestError for what no header says a size of.
    """
    param, pair = ref.param, settings.temporal_patch_size
    if ref.kind != "video":
        size = size_of(ref.source, param=param, max_pixels=settings.max_pixels)
        return _smaller_layout(size, pair, settings.max_image_tokens, settings, ())
    frames = cast("Sequence[object]", ref.source)
    rate, chosen = _sampling(frames, ref.fps, settings, param)
    first = chosen[0]
    size = size_of(frames[first], param=f"{param}[{first}]", max_pixels=settings.max_pixels)
    seconds = _slice_seconds(chosen, rate, settings)
    return _smaller_layout(size, len(chosen), settings.max_video_tokens, settings, seconds)


def canvas_size(
    height: int, width: int, num_frames: int, max_tokens: int, settings: MediaSettings
) -> tuple[int, int]:
    """Height and width of the canvas: whole blocks, tokens between the minimum and `max_tokens`.

    Tokens are counted over all slices; a picture counts as one slice (architecture.md 5).
    """
    block, pair = settings.block_pixels, settings.temporal_patch_size
    # A half pair is rounded to the even number of pairs, as Python's round does.
    counted_frames = max(pair, round(num_frames / pair) * pair)
    smallest = settings.min_image_tokens * pair * block**2
    largest = max_tokens * pair * block**2
    rows, columns = _whole_blocks(height, block), _whole_blocks(width, block)
    if counted_frames * rows * columns < smallest:
        scale = math.sqrt(smallest / (num_frames * height * width))
        rows = _whole_blocks(math.ceil(height * scale), block)
        columns = _whole_blocks(math.ceil(width * scale), block)
    if counted_frames * rows * columns <= largest:
        return rows, columns
    return _largest_canvas(height, width, largest // counted_frames, block)


def choose_frames(num_frames: int, fps: float, settings: MediaSettings) -> tuple[int, ...]:
    """Indices of the frames used, an even count: `video_fps` per second, at most `max_frames`.

    The first frame at or after each sampling time. Where that gives too few or too many, the same
    number spread evenly. No frame twice, save the last one when the count would be odd.
    """
    seconds = num_frames / fps
    wanted = max(1, min(int(seconds * settings.video_fps), settings.max_frames))
    indices: list[int] = []
    if num_frames >= wanted:
        due, step = 0.0, 1 / settings.video_fps
        for index in range(num_frames):
            if index * (1 / fps) >= due:
                indices.append(index)
                due += step
                if due >= int(seconds):
                    break
    if len(indices) != wanted:
        last = indices[-1] if 0 < len(indices) < wanted else num_frames - 1
        indices = np.linspace(0, last, wanted, dtype=int).tolist()
    unique = list(dict.fromkeys(indices))
    return tuple(unique + unique[-1:] * (-len(unique) % settings.temporal_patch_size))


def num_expanded(layout: Layout, tokenizer: Tokenizer) -> int:
    """Tokens that `expand_media` puts in place of one placeholder."""
    return len(_slice_tokens(layout, tokenizer)) if layout.is_video else layout.num_tokens


def expand_media(
    token_ids: Sequence[int], patches: Sequence[Patches], tokenizer: Tokenizer
) -> list[int]:
    """`token_ids` with each placeholder replaced by what its patches need, in order.

    One `<|image|>` becomes `num_tokens` of them. One `<|video|>` becomes, per slice,
    begin_of_image, its `<|image|>` tokens, end_of_image and the slice's time as text
    (`12.0 seconds`); the video token itself never reaches the model. Raises RequestError when
    counts or kinds differ.
    """
    image_id, video_id = tokenizer.special_id("<|image|>"), tokenizer.special_id("<|video|>")
    wanted = [token for token in token_ids if token in (image_id, video_id)]
    given = [video_id if item.is_video else image_id for item in patches]
    if wanted != given:
        raise RequestError(
            f"the prompt has {wanted.count(image_id)} image and {wanted.count(video_id)} video "
            f"placeholders, {given.count(image_id)} images and {given.count(video_id)} videos came "
            "with it (or in another order)",
            param="messages",
        )
    expanded: list[int] = []
    items = iter(patches)
    for token in token_ids:
        if token == image_id:
            expanded += [image_id] * next(items).num_tokens
        elif token == video_id:
            expanded += _slice_tokens(next(items).layout, tokenizer)
        else:
            expanded.append(token)
    return expanded


def _sampling(
    frames: Sequence[object], fps: float | None, settings: MediaSettings, param: str
) -> tuple[float, tuple[int, ...]]:
    """A clip's rate, and the indices of the frames used."""
    if not frames:
        raise RequestError(f"{param}: the clip has no frames", param=param)
    if fps is not None:
        check_fps(fps, param)
    rate = DEFAULT_FPS if fps is None else float(fps)
    return rate, choose_frames(len(frames), rate, settings)


def _slice_seconds(
    chosen: Sequence[int], rate: float, settings: MediaSettings
) -> tuple[float, ...]:
    return tuple(index / rate for index in chosen[:: settings.temporal_patch_size])


def _smaller_layout(
    size: tuple[int, int],
    num_frames: int,
    max_tokens: int,
    settings: MediaSettings,
    slice_seconds: tuple[float, ...],
) -> Layout:
    """The layout of a picture of `size`, upright or on its side, whichever takes fewer tokens."""
    canvases = (
        canvas_size(height, width, num_frames, max_tokens, settings)
        for height, width in (size, size[::-1])
    )
    rows, columns = min(canvases, key=math.prod)
    patch = settings.patch_size
    grid = (num_frames // settings.temporal_patch_size, rows // patch, columns // patch)
    return Layout(grid, settings.merge_size, slice_seconds)


def _slice_tokens(clip: Layout, tokenizer: Tokenizer) -> list[int]:
    begin, end = (tokenizer.special_id(f"<|{edge}_of_image|>") for edge in ("begin", "end"))
    pads = [tokenizer.special_id("<|image|>")] * (clip.num_tokens // clip.grid[0])
    times = [tokenizer.encode(f"{seconds:.1f} seconds") for seconds in clip.slice_seconds]
    return [token for time in times for token in (begin, *pads, end, *time)]


def _whole_blocks(pixels: int, block: int) -> int:
    return -(-max(1, pixels) // block) * block


def _largest_canvas(height: int, width: int, max_pixels: int, block: int) -> tuple[int, int]:
    """The canvas of the tallest content, aspect kept, that stays within `max_pixels` per frame."""

    def canvas(content_height: int) -> tuple[int, int]:
        content_width = width * content_height // height
        return _whole_blocks(content_height, block), _whole_blocks(content_width, block)

    fits, too_tall = 0, height + 1
    while too_tall - fits > 1:
        middle = (fits + too_tall) // 2
        if math.prod(canvas(middle)) <= max_pixels:
            fits = middle
        else:
            too_tall = middle
    return canvas(fits) if fits else (block, block)


def _lay_on_canvas(
    image: Image.Image, canvas: tuple[int, int], num_frames: int, settings: MediaSettings
) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the picture in the top left, resized by antialiased bicubic if need be."""
    scale = min(canvas[0] / image.height, canvas[1] / image.width)
    smallest = settings.min_image_tokens * settings.temporal_patch_size * settings.block_pixels**2
    if num_frames * image.height * image.width >= smallest:
        scale = min(1.0, scale)
    # Floats, as in the reference: the exact quotient would differ by a pixel at some sizes.
    height = max(1, min(canvas[0], math.floor(image.height * scale)))
    width = max(1, min(canvas[1], math.floor(image.width * scale)))
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    laid = np.zeros((*canvas, 3), dtype=np.uint8)
    laid[:height, :width] = np.asarray(image)
    return laid


def _patchify(
    frames: NDArray[np.uint8], settings: MediaSettings, slice_seconds: tuple[float, ...]
) -> Patches:
    """frames uint8 [F, H, W, 3], F = T * 2, to normalised patches in block order."""
    F, H, W, channels = frames.shape
    patch, merge, pair = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    T, h, w = F // pair, H // patch, W // patch
    blocks = frames.reshape(T, pair, h // merge, merge, patch, w // merge, merge, patch, channels)
    # -> slice, block row, block column, row and column in the block, channel, frame, y, x
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    codes = ordered.reshape(T * h * w, channels, pair * patch * patch)
    table = settings.normalised_values()
    values = np.empty(codes.shape, dtype=np.float32)
    for channel in range(channels):
        values[:, channel] = table[channel][codes[:, channel]]
    return Patches(values.reshape(T * h * w, -1), (T, h, w), merge, slice_seconds)
