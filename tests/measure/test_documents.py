"""JSON in the one spelling that is hashed, and files that may be anything."""

import os

import pytest

from emberbox.errors import MeasureError
from emberbox.measure.documents import canonical_json, parse_document, read_file
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
