"""What is refused before any weight is read, and how it is said."""

import hashlib
import json
import lzma
import os

import pytest

from emberbox.errors import CheckpointError, LoadRefused, MeasureError
from emberbox.measure import preflight
from emberbox.measure.fidelity import FidelityOptions, measure_fidelity
from emberbox.measure.preflight import check_command, check_output
from emberbox.measure.verify import verify
from emberbox.model.config import Glm5NextConfig
from tests.helpers.receipts import write_receipt
from tests.helpers.tiny import tiny_config, tiny_tensors, write_folder
from tests.measure.tiny_pair import panel_document, tiny_panel, write_pair

SCHEMA = "emberbox.fidelity.v1"


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path)


def refusal(pair, panel, lane="weights", error=MeasureError) -> str:
    """What is said; nothing was begun."""
    seen = []
    with pytest.raises(error) as caught:
        measure_fidelity(*pair, panel, FidelityOptions(lane=lane, device="cpu"), seen.append)
    assert seen == []
    return str(caught.value)


def other_model(folder, **text):
    config = tiny_config()
    config["text_config"] |= text
    return write_folder(folder, config, tiny_tensors(Glm5NextConfig.from_dict(config)))


@pytest.mark.parametrize("lane", ["weights", "served"])
def test_two_vocabularies(pair, tmp_path, lane):
    wide = other_model(tmp_path / "wide", vocab_size=97)
    said = refusal((pair[0], wide), tiny_panel(tmp_path), lane)
    assert f"{pair[0]} has 96 tokens, {wide} has 97" in said


def windows_with(token_ids):
    document = panel_document()
    document["windows"][1]["token_ids"] = token_ids
    return document["windows"]


def test_a_token_outside_the_vocabulary(pair, tmp_path):
    assert measure_fidelity(*pair, tiny_panel(tmp_path, windows=windows_with([1, 89])))
    said = refusal(pair, tiny_panel(tmp_path, windows=windows_with([1, 96])))
    assert (
        "panel tiny, window 'w1': token 96 is outside the vocabulary of the reference, 96" in said
    )


@pytest.mark.parametrize("token", [94, 95])
def test_a_token_that_stands_for_a_picture(pair, tmp_path, token):
    said = refusal(pair, tiny_panel(tmp_path, windows=windows_with([1, token])))
    assert f"window 'w1': token {token} stands for a picture" in said


def test_a_window_longer_than_a_context(pair, tmp_path):
    short = other_model(tmp_path / "short", max_position_embeddings=129)
    said = refusal((pair[0], short), tiny_panel(tmp_path))
    assert "window 'w2': 130 tokens, the context of the candidate holds 129" in said


def test_a_panel_of_another_tokenizer(pair, tmp_path):
    for folder in pair:
        (folder / "tokenizer.json").write_text("{}")
    right = hashlib.sha256(b"{}").hexdigest()
    assert measure_fidelity(*pair, tiny_panel(tmp_path, tokenizer_sha256=right))
    said = refusal(pair, tiny_panel(tmp_path, tokenizer_sha256="ab" * 32))
    assert right in said
    assert "ab" * 32 in said
    (pair[1] / "tokenizer.json").write_text("{ }")
    said = refusal(pair, tiny_panel(tmp_path, tokenizer_sha256=right))
    assert str(pair[1] / "tokenizer.json") in said
    (pair[1] / "tokenizer.json").unlink()
    said = refusal(pair, tiny_panel(tmp_path, tokenizer_sha256=right))
    assert "cannot be read (No such file or directory)" in said
    assert right in said


def test_a_broken_candidate_is_found_before_the_reference_is_run(pair, tmp_path):
    panel = tiny_panel(tmp_path)
    assert "no such folder" in refusal((pair[0], tmp_path / "no"), panel, error=CheckpointError)
    tensors = tiny_tensors(Glm5NextConfig.from_dict(tiny_config()))
    del tensors["lm_head.weight"]
    headless = write_folder(tmp_path / "headless", tiny_config(), tensors)
    assert "lm_head.weight: missing" in refusal((pair[0], headless), panel, error=LoadRefused)


def receipt(path, schema=SCHEMA):
    path.write_text(json.dumps({"schema": schema}))
    return path


def test_what_is_there_is_kept_unless_it_may_be_replaced(tmp_path):
    new, beside = tmp_path / "new.json", tmp_path / "new.record.xz"
    check_output(new, SCHEMA, beside=beside)
    receipt(new)
    with pytest.raises(MeasureError, match=r"new\.json: is there already") as caught:
        check_output(new, SCHEMA, beside=beside)
    assert "--force" in caught.value.hint
    write_receipt(tmp_path / "a.json").record_path.rename(beside)
    (tmp_path / "a.json").unlink()
    check_output(new, SCHEMA, beside=beside, may_replace=True)
    new.unlink()  # a record that was left alone when a writer was killed
    with pytest.raises(MeasureError, match=r"new\.record\.xz: is there already"):
        check_output(new, SCHEMA, beside=beside)
    check_output(new, SCHEMA, beside=beside, may_replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["new.record.xz"]


@pytest.mark.parametrize("has_receipt", [False, True])
def test_what_is_no_record_is_never_replaced(tmp_path, has_receipt):
    new, beside = tmp_path / "new.json", tmp_path / "new.record.xz"
    if has_receipt:
        receipt(new)
    for raw in (b"precious", b"", lzma.compress(b"precious"), lzma.compress(b'{"schema":"x"}')):
        beside.write_bytes(raw)
        with pytest.raises(MeasureError, match=r"new\.record\.xz: is there already, and is not a"):
            check_output(new, SCHEMA, beside=beside, may_replace=True)
    beside.unlink()
    beside.symlink_to("nowhere")
    with pytest.raises(MeasureError, match=r"new\.record\.xz: is there already, and is not a"):
        check_output(new, SCHEMA, beside=beside, may_replace=True)


@pytest.mark.parametrize("may_replace", [False, True])
def test_what_is_no_receipt_is_never_replaced(tmp_path, may_replace):
    new, beside = tmp_path / "new.json", tmp_path / "new.record.xz"
    for text in ('{"schema": "emberbox.speed.v1"}', "{}", "not json", ""):
        new.write_text(text)
        with pytest.raises(MeasureError, match=r"new\.json: is there already, and is not a rec"):
            check_output(new, SCHEMA, beside=beside, may_replace=may_replace)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(MeasureError, match="is there already"):
        check_output(
            tmp_path / "folder.json",
            SCHEMA,
            beside=tmp_path / "folder.record.xz",
            may_replace=may_replace,
        )


@pytest.mark.parametrize(
    "name",
    ["a.txt", "a", ".json", "a b.json", ".a.json", "", "a" * 181 + ".json", "ä" * 91 + ".json"],
)
def test_a_name_that_no_receipt_may_have(tmp_path, name):
    with pytest.raises(MeasureError, match="not the name of a receipt"):
        check_output(tmp_path / name, SCHEMA, beside=tmp_path / "a.record.xz")


def test_the_longest_name_that_can_be_checked_can_be_written(tmp_path):
    path = tmp_path / ("ä" * 90 + ".json")
    check_output(path, SCHEMA, beside=path.with_suffix(".record.xz"))
    assert verify(write_receipt(path).path) == []


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    receipt(tmp_path / "a.json")
    (tmp_path / "a.record.xz").mkdir()
    for name in ("pipe", "zero", "a"):
        beside = tmp_path / f"{name}.record.xz"
        with pytest.raises(MeasureError, match="is there already, and is not a"):
            check_output(tmp_path / f"{name}.json", SCHEMA, beside=beside)


@pytest.mark.parametrize("word", ["a\x1b[2J", "a\nb", "a\udcff", "a" * 20_000])
def test_a_command_that_no_receipt_can_hold(word):
    check_command("emberbox measure fidelity ä b")
    with pytest.raises(MeasureError, match="a receipt cannot hold this command: command "):
        check_command(f"emberbox {word}")


def test_more_positions_than_a_receipt_can_hold(pair, tmp_path, monkeypatch):
    panel = tiny_panel(tmp_path)
    monkeypatch.setattr(preflight, "MAX_POSITIONS", panel.num_positions - 1)
    assert "panel tiny: 196 positions, at most 195" in refusal(pair, panel)


def test_a_folder_that_cannot_take_it(tmp_path, monkeypatch):
    with pytest.raises(MeasureError, match="there is no folder"):
        check_output(tmp_path / "no" / "a.json", SCHEMA, beside=tmp_path / "a.record.xz")
    with pytest.raises(MeasureError, match="there is no folder"):
        check_output(tmp_path / ("a" * 300) / "a.json", SCHEMA, beside=tmp_path / "a.record.xz")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # tests may run as root
    with pytest.raises(MeasureError, match="cannot be written"):
        check_output(tmp_path / "a.json", SCHEMA, beside=tmp_path / "a.record.xz")
