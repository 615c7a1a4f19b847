import dataclasses
import json
import math

import numpy as np
import pytest
from PIL import Image
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

from emberbox.chat.media import (
    Patches,
    canvas_size,
    choose_frames,
    expand_media,
    prepare_image,
    prepare_video,
)
from emberbox.chat.media_settings import MediaSettings
from emberbox.errors import CheckpointError, RequestError

SETTINGS = MediaSettings()


def picture(width, height, seed=0):
    """Smooth and rough parts, so that a wrong filter, order or border shows."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    ramp = np.stack([x * 255 // width, y * 255 // height, (x + 2 * y) % 256], -1)
    values = (ramp + rng.integers(0, 40, ramp.shape)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(values)


SMALL = [
    (28, 28), (1, 1), (1, 400), (401, 3), (100, 80), (112, 112), (168, 112), (113, 111), (27, 57),
    (640, 427), (333, 777), (29, 2000), (125, 100), (224, 56),
]  # fmt: skip
LARGE = [(1920, 1080), (6000, 4000), (2800, 2241)]


@pytest.mark.parametrize(("width", "height"), SMALL + LARGE, ids="{}".format)
def test_pixels_and_grid_equal_the_reference(width, height):
    image = picture(width, height)
    expected = Glm5NextImageProcessorPil()(images=[image], return_tensors="np")
    got = prepare_image(image)
    assert [list(got.grid)] == expected["image_grid_thw"].tolist()
    assert got.pixel_values.dtype == np.float32
    assert got.pixel_values.shape == (math.prod(got.grid), 1176)
    assert np.abs(got.pixel_values - expected["pixel_values"]).max() <= 1e-6
    assert got.num_tokens * 4 == len(expected["pixel_values"])
    assert not got.is_video


@pytest.mark.parametrize(
    ("width", "height", "num_tokens"),
    [(1920, 1080, 2691), (100, 80, 20), (28, 28, 16), (6000, 4000, 7957)],
)
def test_measured_token_counts(width, height, num_tokens):
    rows, columns = canvas_size(height, width, 2, SETTINGS.max_image_tokens, SETTINGS)
    assert rows * columns == num_tokens * 784


def test_canvases_of_many_sizes_equal_the_reference():
    processor = Glm5NextImageProcessorPil()
    large = np.random.default_rng(3).integers(1, [9000, 5000], (400, 2)).tolist()
    small = [[width, height] for width in range(1, 120, 2) for height in range(1, 120)]
    for width, height in [*large, *small, [200_000, 1]]:
        rows, columns = canvas_size(height, width, 2, SETTINGS.max_image_tokens, SETTINGS)
        assert rows * columns // 196 == processor.get_number_of_image_patches(height, width)


def test_padding_is_black_at_the_right_and_bottom():
    got = prepare_image(Image.new("RGB", (113, 113), (255, 255, 255)))
    assert got.grid == (1, 10, 10)
    table = SETTINGS.normalised_values()
    first, last = (
        got.pixel_values[0].reshape(3, 2, 14, 14),
        got.pixel_values[-1].reshape(3, 2, 14, 14),
    )
    for channel in range(3):
        assert np.all(first[channel] == table[channel, 255])
        assert np.all(last[channel] == table[channel, 0])


def test_patches_are_in_block_order():
    values = np.zeros((112, 112, 3), np.uint8)
    for row in range(8):
        for column in range(8):
            values[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14] = row * 10 + column
    red = prepare_image(Image.fromarray(values)).pixel_values[:, 0]
    codes = [int(np.argmin(np.abs(SETTINGS.normalised_values()[0] - v))) for v in red]
    assert codes[:10] == [0, 1, 10, 11, 2, 3, 12, 13, 4, 5]
    assert codes[16:20] == [20, 21, 30, 31]


def test_both_frames_of_a_picture_are_the_same():
    rows = prepare_image(picture(120, 130)).pixel_values.reshape(-1, 3, 2, 196)
    assert np.array_equal(rows[:, :, 0], rows[:, :, 1])


def test_frame_choice_equals_the_reference_table():
    # Made by the sampling of transformers 5.24 with a duration of num_frames / fps; the cases of
    # less than half a second, where that one gives no frame, take the first.
    table = {
        (2, 2): (0, 1),
        (20, 24): (0, 0),
        (48, 24): (0, 12, 24, 36),
        (49, 24): (0, 12, 24, 36),
        (100, 30): (0, 15, 30, 45, 60, 75),
        (31, 12.5): (0, 7, 13, 19),
        (5, 1): (0, 1, 2, 3, 4, 4),
        (9, 3): (0, 2, 3, 5, 6, 8),
        (75, 29.97): (0, 11, 22, 33, 45, 45),
        (1, 24): (0, 0),
        (7, 24): (0, 0),
    }
    for (num_frames, fps), expected in table.items():
        assert choose_frames(num_frames, fps, SETTINGS) == expected, (num_frames, fps)


def test_frame_choice_is_capped_even_and_sorted():
    for num_frames, fps in ((54_000, 30.0), (4097, 2.0), (2049, 2.0), (333, 7.3)):
        chosen = choose_frames(num_frames, fps, SETTINGS)
        assert len(chosen) % 2 == 0
        assert len(chosen) <= 2048
        assert list(chosen) == sorted(chosen)
        assert chosen[-1] < num_frames
        assert len(set(chosen)) >= len(chosen) - 1
    assert len(choose_frames(54_000, 30.0, SETTINGS)) == 2048


def test_a_clip_has_slices_of_two_frames_and_their_times():
    frames = [picture(100, 80, seed) for seed in range(5)]
    clip = prepare_video(frames, 1)
    # One frame per second is less than two: all five are taken, the last one twice.
    assert clip.grid == (3, 6, 8)
    assert clip.slice_seconds == (0.0, 2.0, 4.0)
    assert clip.is_video
    assert clip.num_tokens == 3 * 12
    rows = clip.pixel_values.reshape(3, 48, 3, 2, 196)
    for slice_index, frame_pair in enumerate([(0, 1), (2, 3), (4, 4)]):
        for tap, frame in enumerate(frame_pair):
            # The same canvas as for the clip, so that a picture of it can be compared.
            laid = np.zeros((84, 112, 3), np.uint8)
            laid[:80, :100] = np.asarray(frames[frame])
            settings = dataclasses.replace(SETTINGS, min_image_tokens=1)
            alone = prepare_image(Image.fromarray(laid), settings)
            expected = alone.pixel_values.reshape(48, 3, 2, 196)[:, :, 0]
            assert np.array_equal(rows[slice_index][:, :, tap], expected)


def test_the_budget_of_a_clip_is_over_all_its_slices():
    settings = dataclasses.replace(SETTINGS, max_video_tokens=64, max_image_tokens=64)
    frames = [picture(300, 200)] * 8
    clip = prepare_video(frames, 2, settings)
    still = prepare_image(frames[0], settings)
    assert clip.grid[0] == 4
    assert clip.num_tokens <= 64 < 2 * clip.num_tokens
    assert still.num_tokens <= 64 < 2 * still.num_tokens
    # The minimum, too: eight small frames are large enough together.
    assert prepare_video([picture(56, 56)] * 8, 2).grid == (4, 4, 4)


def test_an_unknown_rate_is_24():
    assert prepare_video([picture(56, 56)] * 48).slice_seconds == (0.0, 1.0)


@pytest.mark.parametrize(
    ("frames", "fps", "param"),
    [
        ([], 2, "video"),
        ([picture(9, 9)], 0, "video"),
        ([picture(9, 9)], -1.0, "video"),
        ([picture(9, 9)], math.nan, "video"),
        ([picture(9, 9)], 10**400, "video"),
        ([picture(9, 9)], 5e-324, "video"),
        ([picture(9, 9), picture(9, 8)], 2, "video[1]"),
        ([picture(9, 9), b"junk"], 2, "video[1]"),
    ],
    ids=lambda value: str(value)[:9] if isinstance(value, int | float) else "",
)
def test_bad_clips_are_refused(frames, fps, param):
    with pytest.raises(RequestError) as caught:
        prepare_video(frames, fps)
    assert caught.value.param == param


@pytest.mark.parametrize("fps", [0.01, 1000])
def test_the_slowest_and_the_fastest_rate_are_taken(fps):
    assert prepare_video([picture(9, 9)] * 3, fps).slice_seconds[0] == 0


def fake(grid, seconds=()):
    return Patches(np.zeros((0, 1176), np.float32), grid, 2, seconds)


def test_placeholders_grow_to_what_their_patches_need(tokenizer):
    text = (
        "<|user|><|begin_of_image|><|image|><|end_of_image|>a"
        "<|begin_of_video|><|video|><|end_of_video|>b<|image|>"
    )
    patches = [fake((1, 4, 6)), fake((2, 2, 4), (0.0, 12.04)), fake((1, 2, 2))]
    got = expand_media(tokenizer.encode_template(text), patches, tokenizer)
    expected = (
        f"<|user|><|begin_of_image|>{'<|image|>' * 6}<|end_of_image|>a<|begin_of_video|>"
        "<|begin_of_image|><|image|><|image|><|end_of_image|>0.0 seconds"
        "<|begin_of_image|><|image|><|image|><|end_of_image|>12.0 seconds"
        "<|end_of_video|>b<|image|>"
    )
    assert got == tokenizer.encode_template(expected)
    assert tokenizer.special_id("<|video|>") not in got


@pytest.mark.parametrize(
    "patches",
    [[], [fake((1, 2, 2))], [fake((1, 2, 2), (0.0,)), fake((1, 2, 2))], [fake((1, 2, 2))] * 3],
    ids=["none", "too few", "other order", "too many"],
)
def test_placeholders_and_patches_must_agree(tokenizer, patches):
    ids = tokenizer.encode_template("<|image|>x<|video|>")
    with pytest.raises(RequestError, match="1 image and 1 video placeholders"):
        expand_media(ids, patches, tokenizer)


def test_settings_come_from_the_checkpoint(tmp_path, nano_folder):
    assert MediaSettings.open(nano_folder) == MediaSettings()
    assert MediaSettings.open(tmp_path) == MediaSettings()
    document = {"image_mean": [0, 0.5, 1], "min_image_tokens": 4, "patch_size": 8}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
    settings = MediaSettings.open(tmp_path)
    assert settings == MediaSettings(image_mean=(0.0, 0.5, 1.0), min_image_tokens=4, patch_size=8)
    assert prepare_image(picture(32, 32), settings).pixel_values.shape == (16, 3 * 2 * 64)


def test_all_that_is_wrong_with_settings_is_named_at_once():
    document = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_normalize": False,
        "resample": 2,
        "patch_size": 0,
        "image_std": [0.2, 0.2, 0],
        "rescale_factor": "1/255",
        "crop_size": 224,
    }
    with pytest.raises(CheckpointError) as caught:
        MediaSettings.from_dict(document, "here")
    for word in (*document, "Qwen2VLImageProcessor", "unknown key 'crop_size'"):
        assert word in str(caught.value)


def test_broken_settings_are_refused(tmp_path):
    for text, message in (("{", "not readable as JSON"), ("[]", "expected a JSON object")):
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            MediaSettings.open(tmp_path)


@pytest.mark.parametrize("depth", [900, 100_000])
def test_deeply_nested_settings_are_refused_by_file(tmp_path, depth):
    path = tmp_path / "preprocessor_config.json"
    path.write_text('{"patch_size": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: "):
        MediaSettings.open(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 1025),
        ("merge_size", 2**62),
        ("temporal_patch_size", 1025),
        ("patch_size", True),
        ("image_mean", [10**400, 0, 0]),
        ("rescale_factor", 10**400),
    ],
)
def test_settings_beyond_their_bounds_are_refused(key, value):
    with pytest.raises(CheckpointError, match=key):
        MediaSettings.from_dict({key: value}, "here")


def test_settings_at_their_bounds_are_taken():
    names = ("patch_size", "merge_size", "temporal_patch_size")
    settings = MediaSettings.from_dict(dict.fromkeys(names, 1024), "here")
    assert settings.block_pixels == 1024 * 1024
