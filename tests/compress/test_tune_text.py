"""Rows to learn from, rows to be judged by, and their order."""

import hashlib
import os
import zipfile
from io import BytesIO
from itertools import islice

import numpy as np
import pytest

from emberbox.compress import tune_text
from emberbox.compress.tune_text import RowChoice, draws, load_text, warm_up_and_cosine
from emberbox.errors import SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.store.checkpoint import open_checkpoint
from tests.helpers.nano import NANO

CONFIG = Glm5NextConfig.from_dict(open_checkpoint(NANO).config)


def write(path, ids, key="token_ids"):
    np.savez_compressed(path, **{key: ids})
    return path


def load(source, rows, cols, seed=1, step_rows=4):
    return load_text(NANO, CONFIG, source, RowChoice(rows, cols, seed), step_rows)


def test_no_row_is_both_learnt_from_and_held_out():
    text = load(None, 50, 7)
    assert text.text.token_ids.shape == (50, 7)
    assert text.text.source == "the shipped text"
    assert text.held == (7, 15, 23, 31, 39, 47)  # 50 // 8 of them, evenly
    assert set(text.held) | set(text.learnt) == set(range(50))
    assert not set(text.held) & set(text.learnt)


@pytest.mark.parametrize(
    ("rows", "step_rows", "held"), [(2, 1, 1), (15, 4, 1), (100, 2, 8), (2000, 32, 64)]
)
def test_how_many_are_held_out(tmp_path, rows, step_rows, held):
    ids = np.arange(2 * rows).reshape(rows, 2) % 4000
    text = load(write(tmp_path / "a.npz", ids), rows, 2, step_rows=step_rows)
    assert len(text.held) == held
    assert len(text.learnt) == rows - held


def test_rows_of_ids_are_cut_and_chosen_by_the_seed(tmp_path):
    ids = np.arange(5 * 7, dtype=np.uint16).reshape(5, 7)
    path = write(tmp_path / "rows.npz", ids)
    text = load(path, 99, 3)
    cut = [list(row[at : at + 3]) for row in ids.tolist() for at in (0, 3)]
    assert text.text.token_ids.tolist() == cut
    assert text.text.source == "rows.npz"
    assert text.text.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
    some = [load(path, 4, 3, seed).text.token_ids.tolist() for seed in (1, 1, 2)]
    assert some[0] == some[1] != some[2]
    assert len(some[0]) == 4
    assert all(row in cut for row in some[0])


@pytest.mark.parametrize(
    ("ids", "key", "said"),
    [
        (np.zeros((3, 4), np.int32), "ids", "expected an .npz file with token_ids"),
        (np.zeros((3, 4)), "token_ids", "float64"),
        (np.zeros(9, np.int32), "token_ids", "expected whole numbers"),
        (np.zeros((3, 4), np.int32), "token_ids", "one row needs 5 tokens"),
        (np.full((3, 5), 4096), "token_ids", "token 4096; the vocabulary has 4096"),
        (np.full((3, 5), -1), "token_ids", "token -1"),
        (np.full((3, 5), CONFIG.image_token_id), "token_ids", "stands for a picture"),
        (np.zeros((1, 5), np.int32), "token_ids", "1 row of 5 tokens"),
    ],
)
def test_rows_that_cannot_be_taken(tmp_path, ids, key, said):
    with pytest.raises(SettingsError, match=said):
        load(write(tmp_path / "bad.npz", ids, key), 9, 5)


def test_a_file_that_is_missing_or_of_another_kind(tmp_path):
    with pytest.raises(SettingsError, match="not readable"):
        load(tmp_path / "none.npz", 9, 5)
    (tmp_path / "text.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(SettingsError, match="with token_ids"):
        load(tmp_path / "text.npz", 9, 5)


def npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """The bytes of an .npy file with this header, true or not."""
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header.encode() + data


def describe(shape, descr="<i4") -> str:
    return repr({"descr": descr, "fortran_order": False, "shape": shape}) + "\n"


def zipped(data, name="token_ids.npy", method=zipfile.ZIP_DEFLATED) -> bytes:
    whole = BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        archive.writestr(name, data)
    return whole.getvalue()


def damaged(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


IDS = npy(describe((3, 5)), bytes(60))
BODY = 30 + len("token_ids.npy")  # where a member's data begin
BAD_FILES = {
    "empty": (b"", "not a zip file"),
    "deflate": (damaged(zipped(IDS), BODY, b"\xff" * 8), "invalid block type"),
    "check sum": (damaged(zipped(IDS, method=0), BODY + 90, b"\1"), "Bad CRC-32"),
    "no closing brace": (zipped(npy("{'descr': ('<i4', \n")), "EOF in multi-line"),
    "no header": (zipped(npy("{} +\n")), "header"),
    "no npy": (zipped(b"3 4 5"), "magic"),
    "not called npy": (zipped(IDS, "token_ids"), "no item named"),
    "version": (zipped(npy(describe((3, 5)), bytes(60), b"\2\0")), "npy version"),
    "lzma": (zipped(IDS, method=zipfile.ZIP_LZMA), "compression 14, expected deflate"),
    "cut": (zipped(IDS[:-1]), "other bytes than the 60"),
    "longer": (zipped(IDS + b"0"), "other bytes than the 60"),
    "negative": (zipped(npy(describe((-3, -5)), bytes(60))), "expected whole numbers"),
    "objects": (zipped(npy(describe((3, 5), "|O"), bytes(60))), "expected whole numbers"),
    "10^12 rows": (zipped(npy(describe((10**12, 16)))), "64000000000000 bytes; at most 268435456"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_or_hostile_file_is_named(tmp_path, name):
    data, said = BAD_FILES[name]
    (tmp_path / "bad.npz").write_bytes(data)
    with pytest.raises(SettingsError, match=said) as caught:
        load(tmp_path / "bad.npz", 9, 5)
    assert str(tmp_path / "bad.npz") in caught.value.message
    assert "token_ids" in caught.value.message


def test_what_the_damaged_files_are_made_of_is_taken(tmp_path):
    for data in (zipped(IDS), zipped(IDS, method=zipfile.ZIP_STORED)):
        (tmp_path / "good.npz").write_bytes(data)
        assert load(tmp_path / "good.npz", 9, 5).text.token_ids.tolist() == [[0] * 5] * 3
    columns = np.asfortranarray(np.arange(15, dtype=">u2").reshape(3, 5))
    found = load(write(tmp_path / "columns.npz", columns), 9, 5).text.token_ids
    assert found.tolist() == columns.tolist()


def test_what_expands_beyond_the_bound_is_not_expanded(tmp_path, monkeypatch):
    path = write(tmp_path / "bomb.npz", np.zeros((999, 999), np.int32))
    monkeypatch.setattr(tune_text, "MAX_IDS_BYTES", 999 * 999 * 4 - 1)
    assert path.stat().st_size < 9999
    with pytest.raises(SettingsError, match="3992004 bytes; at most 3992003"):
        load(path, 9, 5)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(SettingsError, match=r"pipe\.npz: is no file"):
        load(tmp_path / "pipe.npz", 9, 5)


def test_every_row_is_learnt_from_before_any_comes_again():
    rows = (3, 5, 8, 9, 11)
    steps = list(draws(rows, 5, 3, seed=4))
    flat = [row for step in steps for row in step]
    assert [len(step) for step in steps] == [3] * 5
    for start in (0, 5, 10):
        assert sorted(flat[start : start + 5]) == list(rows)
    assert steps == list(islice(draws(rows, 10**12, 3, seed=4), 5))  # no step before its turn
    assert steps != list(draws(rows, 5, 3, seed=5))
    assert steps[:2] == [[3, 9, 5], [11, 8, 11]]


def test_the_rate_climbs_and_falls():
    rates = [warm_up_and_cosine(step, 250, 20) for step in range(250)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == rates[19] > 0.98
    assert rates[125] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-4
    assert warm_up_and_cosine(0, 1, 20) == 1.0
