"""Captured states: computed once, found again by what they are of, never trusted when damaged."""

import logging
import os

import pytest
import torch

from emberbox.errors import EnvironmentProblem, MeasureError
from emberbox.measure import capture as captures
from emberbox.measure.capture import capture, code_sha256

SHAPES = {"w0": (1, 3), "__metadata__": (5, 3), "w 2": (2, 3)}
FACTS = {"lane": "weights", "map_sha256": "ab"}


def states(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]


class Computer:
    """Gives the states, and counts how often it was asked."""

    def __init__(self, dtype=torch.float32):
        self.calls, self.dtype = 0, dtype

    def __call__(self):
        self.calls += 1
        yield from states(self.dtype)


def take(folder, compute, facts=FACTS, shapes=SHAPES):
    return capture(folder, facts, shapes, compute.dtype, compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_to_the_bit_and_are_computed_once(tmp_path, dtype):
    compute = Computer(dtype)
    first = take(tmp_path / "new" / "folder", compute)
    second = take(tmp_path / "new" / "folder", compute)
    assert (first.is_reused, second.is_reused, compute.calls) == (False, True, 1)
    assert first.sha256 == second.sha256
    for name, expected in zip(SHAPES, states(dtype), strict=True):
        for found in (first, second):
            assert found.hidden(name).dtype == dtype
            assert torch.equal(found.hidden(name), expected)
    left = sorted(path.name for path in first.path.parent.iterdir())
    assert left == [f"{first.key}.json", f"{first.key}.safetensors"]


def test_other_facts_are_another_capture(tmp_path, monkeypatch):
    compute = Computer()
    keys = {take(tmp_path, compute).key}
    keys.add(take(tmp_path, compute, {**FACTS, "map_sha256": "ac"}).key)
    keys.add(take(tmp_path, compute, {**FACTS, "lane": "served"}).key)
    monkeypatch.setattr(captures, "code_sha256", lambda: "another version")
    keys.add(take(tmp_path, compute).key)
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(take(tmp_path, compute).key)
    assert (len(keys), compute.calls) == (5, 5)


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def forge(path):
    """Fewer states, under their own right hash: only the names tell."""
    other = dict(list(SHAPES.items())[:2])
    made = capture(path.parent / "other", FACTS, other, torch.float32, lambda: states()[:2])
    path.write_bytes(made.path.read_bytes())
    path.with_suffix(".json").write_bytes(made.path.with_suffix(".json").read_bytes())


def rename(path):
    """States of other facts."""
    made = capture(path.parent / "other", {}, SHAPES, torch.float32, lambda: states(seed=1))
    path.write_bytes(made.path.read_bytes())
    path.with_suffix(".json").write_bytes(made.path.with_suffix(".json").read_bytes())


def note(text):
    return lambda path: path.with_suffix(".json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_byte, "not what its note says"),
        (cut, "332 bytes long"),
        (forge, "holds other tensors"),
        (rename, "not what its note says"),
        (lambda path: path.with_suffix(".json").unlink(), "no such file"),
        (lambda path: path.with_suffix(".json").write_text("{"), "not JSON"),
        (lambda path: path.with_suffix(".json").write_text("{}"), "not what its note says"),
        (note('{"torch": 1e400}'), "cannot be written again"),
        (note('{"torch": "\\ud800"}'), "cannot be written again"),
    ],
)
def test_a_damaged_capture_is_computed_anew_and_said(tmp_path, caplog, damage, said):
    compute = Computer()
    first = take(tmp_path, compute)
    damage(first.path)
    with caplog.at_level(logging.WARNING):
        second = take(tmp_path, compute)
    assert "damaged, computed anew" in caplog.text
    assert said in caplog.text
    assert (second.is_reused, compute.calls) == (False, 2)
    assert second.sha256 == first.sha256
    assert torch.equal(second.hidden("w0"), states()[0])
    assert take(tmp_path, compute).is_reused


def test_a_pipe_under_the_name_of_a_capture_is_not_read(tmp_path):
    compute = Computer()
    path = take(tmp_path, compute).path
    path.unlink()
    os.mkfifo(path)
    assert not take(tmp_path, compute).is_reused
    assert take(tmp_path, compute).is_reused


def test_what_fails_half_way_leaves_no_capture(tmp_path):
    def broken():
        yield states()[0]
        raise KeyError("the network")

    with pytest.raises(KeyError):
        capture(tmp_path, FACTS, SHAPES, torch.float32, broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [torch.zeros(4, 3), torch.zeros(5, 3).double()])
def test_states_of_another_form_are_refused(tmp_path, bad):
    given = [states()[0], bad, states()[2]]
    with pytest.raises(MeasureError, match=r"window '__metadata__' gave .*expected torch\.float32"):
        capture(tmp_path, FACTS, SHAPES, torch.float32, lambda: given)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        take(tmp_path / "file" / "below", Computer())


def test_the_code_has_one_hash_of_everything_that_computes(monkeypatch):
    before = code_sha256()
    assert len(before) == 64
    monkeypatch.setattr(captures, "CODE", captures.CODE[1:])
    code_sha256.cache_clear()
    try:
        assert code_sha256() != before
    finally:
        code_sha256.cache_clear()
