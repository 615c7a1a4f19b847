"""The record: what is written comes back, and nothing else is taken for a record."""

import lzma
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from emberbox.errors import MeasureError
from emberbox.measure.metrics import Positions
from emberbox.measure.record import (
    MAX_COMMITTED_BYTES,
    as_stored,
    read_record,
    record_digest,
    write_record,
)
from tests.helpers.receipts import small_panel, small_windows

COLUMNS = ("kl", "reverse_kl", "reference_nll", "candidate_nll", "top1", "top5", "finite")


def positions(num, seed=0, finite=None):
    """Random figures of `num` positions."""
    drawn = np.random.default_rng(seed)
    finite = np.ones(num, bool) if finite is None else np.array(finite)
    values = np.where(finite, drawn.random((4, num)) * 3, np.nan)
    top1 = (drawn.random(num) < 0.6) & finite
    top5 = (drawn.integers(0, 6, num) * finite).astype(np.uint8)
    return Positions(*values, top1=top1, top5=top5, finite=finite)


WINDOWS = [
    ("w00", positions(7)),
    ("ö/1", positions(1, 1)),
    ("w02", positions(130, 2, [True] * 128 + [False, True])),
]
COUNTS = {"w00": 7, "ö/1": 1, "w02": 130}


def raw_of(path):
    return lzma.decompress(path.read_bytes())


def repack(path, raw):
    path.write_bytes(lzma.compress(raw))


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "a.record.xz"
    write_record(found, WINDOWS)
    return found


def test_what_was_written_comes_back_rounded_to_float32(path):
    found = read_record(path, COUNTS)
    assert list(found) == list(COUNTS)
    for name, written in WINDOWS:
        for column in COLUMNS:
            values, expected = getattr(found[name], column), getattr(written, column)
            if expected.dtype == np.float64:
                expected = np.where(written.finite, expected, 0).astype(np.float32)
                assert values.dtype == np.float64
            else:
                assert values.dtype == expected.dtype
            assert np.array_equal(values, expected), (name, column)


def test_the_layout_is_the_documented_one(path):
    header, _, body = raw_of(path).partition(b"\n")
    assert header.decode() == (
        '{"schema":"emberbox.record.v1","windows":[["w00",7],["ö/1",1],["w02",130]]}'
    )
    num = 138
    assert len(body) == 17 * num
    kl = bytes(body[plane * num] for plane in range(4))
    assert struct.unpack("<f", kl)[0] == np.float32(WINDOWS[0][1].kl[0])
    nll = bytes(body[3 * 4 * num + plane * num + num - 1] for plane in range(4))
    assert struct.unpack("<f", nll)[0] == np.float32(WINDOWS[2][1].candidate_nll[-1])
    first = WINDOWS[0][1]
    assert body[16 * num] == first.top1[0] + 2 + 4 * int(first.top5[0])
    assert body[-2] == 0  # the position that is not finite


def test_as_stored_is_what_a_reader_gets(path):
    stored, found = as_stored(WINDOWS), read_record(path, COUNTS)
    for name in COUNTS:
        for column in COLUMNS:
            assert np.array_equal(getattr(stored[name], column), getattr(found[name], column))
    assert record_digest(list(found.items())) == record_digest(WINDOWS)


def test_any_change_changes_the_digest():
    digests = {record_digest(WINDOWS), record_digest([WINDOWS[1], WINDOWS[0], WINDOWS[2]])}
    for column in COLUMNS[:4]:
        changed = positions(7)
        getattr(changed, column)[3] += 1e-3
        digests.add(record_digest([("w00", changed), *WINDOWS[1:]]))
    for column in ("top1", "top5"):
        changed = positions(7)
        getattr(changed, column)[3] ^= 1
        digests.add(record_digest([("w00", changed), *WINDOWS[1:]]))
    assert len(digests) == 8


def test_the_file_says_what_was_written(path):
    again = path.with_name("again.record.xz")
    digest = write_record(again, WINDOWS)
    assert (digest.num_bytes, again.read_bytes()) == (path.stat().st_size, path.read_bytes())


def test_a_panel_of_25_windows_of_1024_tokens_is_small_enough_for_the_repository(tmp_path):
    # Figures of a real model pack better than these random ones.
    windows = [(f"w{index:02d}", positions(1023, index)) for index in range(25)]
    digest = write_record(tmp_path / "a.record.xz", windows)
    assert 300_000 < digest.num_bytes < MAX_COMMITTED_BYTES


@pytest.mark.parametrize(
    "counts",
    [
        {"w00": 7, "ö/1": 1, "w03": 130},
        {"ö/1": 1, "w00": 7, "w02": 130},
        {"w00": 6, "ö/1": 2, "w02": 130},
    ],
    ids=["other name", "other order", "other counts"],
)
def test_a_record_of_other_windows_is_refused(path, counts):
    with pytest.raises(MeasureError, match=r"a\.record\.xz: is the record of other windows"):
        read_record(path, counts)


def test_a_record_of_more_or_fewer_positions_is_refused(path):
    with pytest.raises(MeasureError, match="holds more than the"):
        read_record(path, {**COUNTS, "w02": 129})
    with pytest.raises(MeasureError, match="expected"):
        read_record(path, {**COUNTS, "w02": 131})


def test_a_truncated_file_is_refused(path):
    packed = path.read_bytes()
    for size in (0, 1, 12, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:size])
        with pytest.raises(MeasureError, match=r"a\.record\.xz: ends too early"):
            read_record(path, COUNTS)


def test_bytes_after_the_end_are_refused(path):
    packed = path.read_bytes()
    for extra in (b"x", packed, b"\0" * 4):
        path.write_bytes(packed + extra)
        with pytest.raises(MeasureError, match=r"after its end|larger than"):
            read_record(path, COUNTS)


def test_a_flipped_bit_is_found_by_xz_itself(path):
    packed = bytearray(path.read_bytes())
    packed[len(packed) // 2] ^= 4
    path.write_bytes(packed)
    with pytest.raises(MeasureError, match="not xz"):
        read_record(path, COUNTS)


def test_a_bomb_is_not_inflated(path):
    bomb = lzma.compress(raw_of(path) + bytes(60 << 20), preset=1)
    path.write_bytes(bomb)
    with pytest.raises(MeasureError, match="larger than the 3471 bytes"):
        read_record(path, COUNTS)  # 30 KB for a record of 2 KB: not even opened
    counts = {f"w{index}": 1000 for index in range(20)}  # whose record may be as large
    tracemalloc.start()
    with pytest.raises(MeasureError, match="holds more than the 34"):
        read_record(path, counts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_dictionary_of_gigabytes_is_refused(path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 4096}]
    packed = bytearray(lzma.compress(raw_of(path), filters=filters))
    # Block header at byte 12: size, flags, filter id 0x21, one byte of properties, the size; its
    # CRC32 ends it. 39 stands for 3 GiB.
    assert packed[14:16] == b"\x21\x01"
    packed[16] = 39
    header_size = 4 * (packed[12] + 1)
    end = 12 + header_size - 4
    packed[end : end + 4] = struct.pack("<I", zlib.crc32(bytes(packed[12:end])))
    path.write_bytes(packed)
    with pytest.raises(MeasureError, match="not xz: Memory usage limit"):
        read_record(path, COUNTS)


@pytest.mark.parametrize(
    ("column", "plane_bytes", "said"),
    [
        (0, struct.pack("<f", float("nan")), "kl: holds what is no number"),
        (1, struct.pack("<f", float("inf")), "reverse_kl: holds what is no number"),
        (0, struct.pack("<f", -0.5), "kl: holds a value below zero"),
        (3, struct.pack("<f", -1.0), "candidate_nll: holds a value below zero"),
    ],
)
def test_figures_that_cannot_be_are_refused(path, column, plane_bytes, said):
    raw = bytearray(raw_of(path))
    start = raw.index(b"\n") + 1 + 4 * column * 138
    for plane, byte in enumerate(plane_bytes):
        raw[start + 138 * plane] = byte
    repack(path, raw)
    with pytest.raises(MeasureError, match=said):
        read_record(path, COUNTS)


@pytest.mark.parametrize(
    ("place", "flags", "said"),
    [
        (-1, 2 | 6 << 2, "more than five of five"),
        (-1, 2 | 1 << 5, "more than five of five"),
        (-2, 1, "flags: set where there was no figure"),
        (-1, 0, "a figure where there was none"),
    ],
)
def test_flags_that_cannot_be_are_refused(path, place, flags, said):
    raw = bytearray(raw_of(path))
    raw[place] = flags
    repack(path, raw)
    with pytest.raises(MeasureError, match=said):
        read_record(path, COUNTS)


def test_a_record_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MeasureError, match=r"none\.record\.xz: cannot be read: no such file"):
        read_record(tmp_path / "none.record.xz", COUNTS)


def test_figures_of_real_logits_survive(tmp_path):
    panel = small_panel()
    windows = small_windows(panel, 0.0)  # a candidate equal to its reference
    write_record(tmp_path / "a.record.xz", windows)
    counts = {window.id: window.num_positions for window in panel.windows}
    found = read_record(tmp_path / "a.record.xz", counts)
    assert all(not each.kl.any() and each.top1.all() for each in found.values())
