"""Digests of tensors: written of what is read back, and refused when they do not fit the folder."""

import hashlib
import json

import pytest

from emberbox.errors import CheckpointError, DamagedTensor
from emberbox.store.checkpoint import INDEX_NAME, open_checkpoint
from emberbox.store.checksums import SUMS_NAME
from emberbox.store.digests import DIGESTS_NAME, write_digests
from emberbox.store.verification import verify_folder
from tests.attacks.builder import build
from tests.helpers.whole_folder import plain_folder, whole_folder, write_sums

NAMES = ("a", "b", "c")


@pytest.fixture
def folder(tmp_path):
    """Two shards, their digests and SHA256SUMS."""
    return whole_folder(tmp_path)


def read(folder, name, **options):
    checkpoint = open_checkpoint(folder, **options)
    buffer = bytearray(checkpoint.tensors[name].num_bytes)
    checkpoint.read_into(checkpoint.tensors[name], buffer)
    return bytes(buffer)


def change(path, edit):
    document = json.loads(path.read_text("utf-8"))
    edit(document)
    path.write_text(json.dumps(document), "utf-8")


def test_a_digest_is_of_the_bytes_of_the_tensor(folder):
    digests = json.loads((folder / DIGESTS_NAME).read_text("utf-8"))
    assert list(digests) == sorted(NAMES)
    for name in NAMES:
        assert digests[name] == hashlib.sha256(read(folder, name)).hexdigest()[:32]
    assert open_checkpoint(folder).digests == digests
    assert open_checkpoint(folder, verify=False).digests == {}


def test_a_tensor_larger_than_a_piece_is_compared_to_its_last_byte(tmp_path):
    data = bytearray(b"0123456789" * 250_000)
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(build({"x": entry}, data))
    write_digests(tmp_path)
    assert read(tmp_path, "x") == data
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(build({"x": entry}, data))
    with pytest.raises(DamagedTensor, match=r"model\.safetensors: tensor 'x' is damaged") as caught:
        read(tmp_path, "x")
    assert hashlib.sha256(data).hexdigest()[:32] in caught.value.message
    assert "emberbox verify" in caught.value.hint
    assert read(tmp_path, "x", verify=False) == data


def test_a_folder_without_digests_opens_as_before(tmp_path):
    folder = plain_folder(tmp_path)
    assert open_checkpoint(folder).digests == {}
    (folder / SUMS_NAME).write_text("anything at all\n")  # of a form that is not ours
    assert read(folder, "c") == b"cccc"


def test_a_changed_digest_is_laid_to_the_file_of_digests_not_to_the_tensor(folder):
    change(folder / DIGESTS_NAME, lambda d: d.update(a=d["a"][::-1]))
    with pytest.raises(CheckpointError, match=f"{DIGESTS_NAME}: is damaged: sha256 .* expected"):
        open_checkpoint(folder)
    (fault,) = verify_folder(folder).faults
    assert fault.file == DIGESTS_NAME
    assert read(folder, "a", verify=False)


def test_a_changed_digest_without_checksums_is_named_by_its_tensor(folder):
    (folder / SUMS_NAME).unlink()
    change(folder / DIGESTS_NAME, lambda d: d.update(a=d["b"]))
    with pytest.raises(DamagedTensor, match="tensor 'a'"):
        read(folder, "a")
    assert read(folder, "b")


def test_digests_that_fit_their_checksum_and_not_the_file_are_told_apart(folder):
    change(folder / DIGESTS_NAME, lambda d: d.update(a=d["b"]))
    write_sums(folder)
    (fault,) = verify_folder(folder).faults
    assert fault.tensors == ("a",)
    assert f"tensor 'a' does not fit its digest, but {SUMS_NAME} fits the file" in fault.what


def test_digests_that_are_listed_and_not_there_are_missed(folder):
    (folder / DIGESTS_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"{DIGESTS_NAME}: missing, {SUMS_NAME} lists it"):
        open_checkpoint(folder)
    assert DIGESTS_NAME in {fault.file for fault in verify_folder(folder).faults}


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda d: d.update(x=d["a"]), "tensor 'x' has a digest, and is in no file"),
        (lambda d: d.pop("b"), "tensor 'b' is in the folder, and has no digest"),
        (lambda d: d.update(b=5), "tensor 'b' is not 32 hex digits"),
        (lambda d: d.update(b=d["b"].upper() + "G"), "tensor 'b' is not 32 hex digits"),
    ],
    ids=["unknown", "extra", "number", "letters"],
)
def test_digests_of_other_tensors_are_refused_by_name(folder, edit, told):
    change(folder / DIGESTS_NAME, edit)
    write_sums(folder)
    with pytest.raises(CheckpointError, match="does not fit the tensors beside it") as caught:
        open_checkpoint(folder)
    assert told in caught.value.message
    assert any(told in fault.what for fault in verify_folder(folder).faults)


def test_every_tensor_that_does_not_fit_is_named_at_once(folder):
    change(folder / DIGESTS_NAME, lambda d: (d.pop("b"), d.update(x=d["a"], y=d["a"])))
    write_sums(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert all(f"tensor {name!r}" in caught.value.message for name in ("b", "x", "y"))


def test_a_tensor_that_came_later_is_refused(folder):
    """An extra shard that the index lists, with neither digest nor checksum."""
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    (folder / "s3.safetensors").write_bytes(build({"d": entry}, b"dd"))
    change(folder / INDEX_NAME, lambda i: i["weight_map"].update(d="s3.safetensors"))
    with pytest.raises(CheckpointError, match="tensor 'd' is in the folder, and has no digest"):
        open_checkpoint(folder)
    files = {fault.file for fault in verify_folder(folder).faults}
    assert files == {DIGESTS_NAME, INDEX_NAME, "s3.safetensors"}


@pytest.mark.parametrize("text", ["", "[]", '{"a": "0", "a": "0"}', "\xff"])
def test_a_file_that_is_no_object_is_refused(folder, text):
    (folder / DIGESTS_NAME).write_bytes(text.encode("latin-1"))
    write_sums(folder)
    with pytest.raises(CheckpointError, match=DIGESTS_NAME):
        open_checkpoint(folder)


def test_the_mtp_folder_has_digests_of_its_own(folder):
    (folder / "mtp").mkdir()
    entry = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    path = folder / "mtp" / "model.safetensors"
    path.write_bytes(build({"y": entry}, b"yyy"))
    assert open_checkpoint(folder).digests.keys() == set(NAMES)
    write_digests(folder / "mtp")
    write_sums(folder)
    assert read(folder, "y") == b"yyy"
    assert verify_folder(folder).num_tensors == 4
    path.write_bytes(build({"y": entry}, b"yyz"))
    with pytest.raises(DamagedTensor, match="tensor 'y'"):
        read(folder, "y")
    (fault,) = verify_folder(folder).faults
    assert (fault.file, fault.tensors) == ("mtp/model.safetensors", ("y",))
    (folder / "mtp" / DIGESTS_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"mtp/{DIGESTS_NAME}: missing"):
        open_checkpoint(folder)
