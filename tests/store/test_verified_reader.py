"""Tensors through a ring: bytes are right when they are handed out, damage is named at the end."""

import numpy as np
import pytest

from emberbox.errors import DamagedTensor
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.digests import write_digests
from emberbox.store.verified_reader import INLINE_BYTES, RING_BYTES, VerifiedReader, ring_bytes
from emberbox.store.writer import CheckpointWriter

# Hashed at once, by a thread, and both sides of the border; odd ones do not end on an alignment.
SIZES = (5, INLINE_BYTES, INLINE_BYTES + 1, 0, 300_001, 200_003, 131_072, 7, 299_999)
RING = 600_000  # holds three of the larger ones: it goes round more than once


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(3)
    with CheckpointWriter(tmp_path / "f", 500_000) as writer:
        for number, size in enumerate(SIZES * 3):
            data = generator.integers(0, 256, size, dtype=np.uint8)
            writer.add(f"t{number}", "U8", (size,), data)
    (tmp_path / "f" / "config.json").write_text("{}")
    write_digests(tmp_path / "f")
    return tmp_path / "f"


def flip(info):
    raw = bytearray(info.file.read_bytes())
    raw[info.start] ^= 1
    info.file.write_bytes(raw)


def read_all(folder, size=RING, after=lambda _: None):
    """The bytes of every tensor as they were when they were handed out."""
    checkpoint, buffer, found = open_checkpoint(folder), np.zeros(size, dtype=np.uint8), {}
    with VerifiedReader(checkpoint, buffer) as reader:
        for name, info in checkpoint.tensors.items():
            start = reader.read(info)
            assert start % 64 == 0
            found[name] = buffer[start : start + info.num_bytes].tobytes()
            after(name)
    return found


@pytest.mark.parametrize("size", [max(SIZES), RING, 4_000_000])
def test_every_tensor_is_read_as_it_lies_there(folder, size):
    expected = {
        name: info.file.read_bytes()[info.start : info.stop]
        for name, info in open_checkpoint(folder).tensors.items()
    }
    assert read_all(folder, size) == expected


def test_every_damaged_tensor_is_named_at_once(folder):
    infos = open_checkpoint(folder).tensors
    names = ["t0", "t2", "t4", "t14", "t26"]
    for name in names:
        flip(infos[name])
    with pytest.raises(DamagedTensor, match="5 tensors are damaged") as caught:
        read_all(folder)
    told = {name for name in infos if f"tensor {name!r} is damaged" in caught.value.message}
    assert told == set(names)
    assert "emberbox verify" in caught.value.hint


def test_damage_is_told_in_place_of_what_it_caused(folder):
    info = open_checkpoint(folder).tensors["t4"]
    flip(info)

    def fail(name):
        if name == "t4":
            raise ValueError("not a number")

    with pytest.raises(DamagedTensor, match="tensor 't4' is damaged"):
        read_all(folder, after=fail)
    flip(info)
    with pytest.raises(ValueError, match="not a number"):
        read_all(folder, after=fail)


def test_the_ring_holds_the_largest_and_no_more_than_there_is():
    assert ring_bytes([]) == 0
    assert ring_bytes([5, 70]) == 64 + 128
    assert ring_bytes([RING_BYTES, 3]) == RING_BYTES
    assert ring_bytes([RING_BYTES + 65, 3]) == RING_BYTES + 128
