"""JSON in the one spelling that is hashed, and files that may be anything."""

import os
import resource

import pytest

from emberbox.errors import MeasureError
from emberbox.measure.documents import (
    canonical_json,
    parse_document,
    read_file,
    require_free,
    require_writable,
)
from emberbox.store.strict_json import JsonProblem


def test_what_is_parsed_can_be_spelt_again():
    found = parse_document('\n{"b": [1, 2.5], "a": "ü"} \n'.encode())
    assert found == {"a": "ü", "b": [1, 2.5]}
    assert canonical_json(found) == '{"a":"ü","b":[1,2.5]}'.encode()


@pytest.mark.parametrize("value", ["1e400", "-1e400", '"\\ud800"', '[{"b": "\\udfff"}]'])
def test_what_could_not_be_hashed_is_refused(value):
    with pytest.raises(JsonProblem, match="cannot be written again"):
        parse_document(f'{{"a": {value}}}'.encode())


def test_a_file_is_read_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(7))
    assert read_file(path, 7) == bytes(7)
    with pytest.raises(MeasureError, match="a: larger than the 6 bytes"):
        read_file(path, 6)
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("no", "no such file"), ("zero", "not a file"), ("pipe", "not a file")):
        with pytest.raises(MeasureError, match=f"{name}: cannot be read: {said}"):
            read_file(tmp_path / name, 7)
    with pytest.raises(MeasureError, match="cannot be read: not a file"):
        read_file(tmp_path, 7)


def no_places(folder):
    """Names under which nothing can be written: each kind once, and why."""
    (folder / "file").write_text("")
    return {
        folder / "none" / "a.json": "No such file",
        folder / "file" / "a.json": "Not a directory",
        folder / ("a" * 300 + ".json"): "name too long",
        folder / ("b" * 245 + ".json"): "name too long",  # the name on the way alone
        folder / ("c" * 300) / "a.json": "name too long",
    }


def test_what_cannot_be_written_is_found_by_trying(tmp_path):
    for path, said in no_places(tmp_path).items():
        with pytest.raises(MeasureError, match=f"not a place for a receipt: .*{said}"):
            require_writable(path)
        require_free(path, may_replace=False)
    (tmp_path / "there.json").write_text("mine")
    require_writable(tmp_path / "there.json")
    require_writable(tmp_path / "new.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there.json"]
    assert (tmp_path / "there.json").read_text() == "mine"


def test_a_place_for_the_name_alone_is_none(tmp_path):
    """A full disk, here a limit on the size of files: the name can be made, its bytes not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(MeasureError, match="not a place for a receipt: File too large"):
            require_writable(tmp_path / "a.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
