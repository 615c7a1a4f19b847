"""Panel files: what is read, what is hashed, what is refused and how it is said."""

import hashlib
import json
import lzma
import os

import pytest

from emberbox.errors import MeasureError
from emberbox.measure import panel as panels
from emberbox.measure.panel import SCHEMA, Window, load_panel, shipped_panels


def document(**changes):
    windows = [
        {"id": "w00", "document": "tale-1", "domain": "prose", "source": "s", "token_ids": [5, 6]},
        {"id": "w01", "document": "код", "domain": "code", "source": "s", "token_ids": [7, 8, 9]},
    ]
    return {
        "schema": SCHEMA,
        "name": "two",
        "about": "for tests",
        "tokenizer_sha256": "ab" * 32,
        "windows": windows,
    } | changes


def write(folder, value, name="p.json"):
    path = folder / name
    raw = json.dumps(value).encode()
    path.write_bytes(lzma.compress(raw) if name.endswith(".xz") else raw)
    return path


@pytest.mark.parametrize("name", ["p.json", "p.json.xz"])
def test_everything_of_a_panel_is_read(tmp_path, name):
    found = load_panel(write(tmp_path, document(), name))
    assert found.name == "two"
    assert found.tokenizer_sha256 == "ab" * 32
    assert found.windows == (
        Window("w00", "tale-1", "prose", (5, 6)),
        Window("w01", "код", "code", (7, 8, 9)),
    )
    assert [window.num_positions for window in found.windows] == [1, 2]
    assert found.num_positions == 3


def test_the_hash_is_of_the_canonical_document_however_it_is_written(tmp_path):
    text = json.dumps(document(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    expected = hashlib.sha256(text.encode()).hexdigest()
    turned = dict(reversed(document().items()))
    plain = load_panel(write(tmp_path, document(), "a.json"))
    spaced = tmp_path / "b.json"
    spaced.write_text("\n" + json.dumps(turned, indent=4) + "\n")
    assert plain.sha256 == expected
    assert load_panel(spaced).sha256 == expected
    assert load_panel(write(tmp_path, document(), "c.json.xz")).sha256 == expected


@pytest.mark.parametrize("key", ["name", "about", "tokenizer_sha256", "windows"])
def test_the_hash_is_of_every_key(tmp_path, key):
    changed = document()
    if key == "windows":
        changed["windows"][1]["source"] = "t"
    else:
        changed[key] = "cd" * 32
    hashes = {load_panel(write(tmp_path, each)).sha256 for each in (document(), changed)}
    assert len(hashes) == 2


def test_a_window_names_its_tokens_by_their_hash():
    # sha256 of 0500000000000000 0600000000000000
    expected = hashlib.sha256(bytes([5, *[0] * 7, 6, *[0] * 7])).hexdigest()
    assert Window("w", "d", "x", (5, 6)).token_sha256() == expected


def test_the_public_form_takes_its_name_from_the_file(tmp_path):
    public = {"schema": SCHEMA, "windows": document()["windows"]}
    for window in public["windows"]:
        del window["source"]
    found = load_panel(write(tmp_path, public, "final25.json.xz"))
    assert (found.name, found.tokenizer_sha256, len(found.windows)) == ("final25", None, 2)


def test_shipped_panels_are_known_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(panels, "SHIPPED", tmp_path)
    write(tmp_path, document(), "b-2.json.xz")
    write(tmp_path, document(name="other"), "a-1.json")
    assert shipped_panels() == ["a-1", "b-2"]
    assert load_panel("a-1").name == "other"
    assert load_panel("b-2").name == "two"
    with pytest.raises(MeasureError, match="no panel 'c-3'\nhint: shipped: a-1, b-2;"):
        load_panel("c-3")


def wrong(key, value, number=1):
    """A document whose window `number` has another value, or none, under `key`."""
    found = document()
    if value is None:
        del found["windows"][number][key]
    else:
        found["windows"][number][key] = value
    return found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (document(schema="emberbox.panel.v2"), "schema is 'emberbox.panel.v2'"),
        (document(seed=1), "unknown key 'seed'"),
        ({"schema": SCHEMA}, "'windows' is missing"),
        (document(windows=[]), "windows is empty"),
        (document(windows={}), "windows is '{}', not of the expected kind"),
        (document(windows=[5]), "window number 0: not an object"),
        (document(name="a\nb"), r"name is 'a\\nb', expected a line of text"),
        (document(tokenizer_sha256="ab"), "tokenizer_sha256 is 'ab', expected 64 hex digits"),
        (wrong("seed", 1), r"window number 1 \('w01'\): unknown key 'seed'"),
        (wrong("domain", None), r"\('w01'\): 'domain' is missing"),
        (wrong("id", None), "window number 1: 'id' is missing"),
        (wrong("id", "w00"), "window 'w00': the id stands twice"),
        (wrong("document", ""), r"\('w01'\): document is '', expected a line of text"),
        (wrong("domain", "\x1b[1m"), r"\('w01'\): domain is "),
        (wrong("domain", "x" * 201), r"\('w01'\): domain is .*at most 200 characters"),
        (document(name="x" * 201), "name is .*at most 200 characters"),
        (document(windows=[5] * 10_001), "10001 windows, at most 10000"),
        (wrong("token_ids", [5, 6]), "window 'w01': the same tokens as window 'w00'"),
        (wrong("token_ids", []), r"\('w01'\): 0 tokens; at least 2"),
        (wrong("token_ids", [5]), r"\('w01'\): 1 tokens; at least 2"),
        (wrong("token_ids", [5, 6.0]), r"\('w01'\): token_ids holds something"),
        (wrong("token_ids", [5, True]), r"\('w01'\): token_ids holds something"),
        (wrong("token_ids", [5, -1]), r"\('w01'\): token_ids holds something"),
        (wrong("token_ids", [5, 2**31]), r"\('w01'\): token_ids holds something"),
        (wrong("token_ids", "56"), r"\('w01'\): token_ids is '56', not of the expected kind"),
    ],
)
def test_a_panel_that_is_not_one_is_refused(tmp_path, value, said):
    path = write(tmp_path, value)
    with pytest.raises(MeasureError, match=said) as caught:
        load_panel(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("p.json", b"[]", "does not start with '{'"),
        ("p.json", b'{"a": 1, "a": 2}', "'a' stands twice"),
        ("p.json.xz", b"{}", "not a panel: Input format not supported"),
        ("p.json.xz", lzma.compress(b'{"schema": 1}')[:-9], "not a panel: Compressed file ended"),
        ("p.json", b'{"about": "\\ud800"}', "not a panel: cannot be written again"),
        ("p.json", b'{"windows": [1e400]}', "not a panel: cannot be written again"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, raw, said):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(MeasureError, match=said):
        load_panel(tmp_path / name)


@pytest.mark.parametrize("name", ["p.json", "p.json.xz"])
def test_what_has_no_end_is_not_read(tmp_path, name):
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / name).symlink_to("/dev/zero")
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "zero" / name):
        with pytest.raises(MeasureError, match="cannot be read: not a file"):
            load_panel(path)


def test_a_file_that_is_not_there_and_one_that_unpacks_without_end(tmp_path, monkeypatch):
    with pytest.raises(MeasureError, match=r"none\.json: cannot be read: no such file"):
        load_panel(tmp_path / "none.json")
    monkeypatch.setattr(panels, "MAX_BYTES", 1000)
    with pytest.raises(MeasureError, match="more than 1000 bytes"):
        load_panel(write(tmp_path, document(about=" " * 2000), "p.json.xz"))
