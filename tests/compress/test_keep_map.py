"""Which experts stay: three ways to say it, and every way to say it wrongly."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.compress.keep_map import Heaviest, KeepMap, made_map, read_keep_map
from emberbox.model.config import Glm5NextConfig
from emberbox.store.checkpoint import open_checkpoint
from tests.helpers.nano import NANO

LAYERS = range(1, 8)  # of ember-nano with experts: 16, of which a token needs 4; the MTP layer is 8


@pytest.fixture(scope="module")
def text():
    return Glm5NextConfig.from_dict(open_checkpoint(NANO).config).text


def keep_of(ids, *, mtp=True):
    return KeepMap(dict.fromkeys([*LAYERS, *([8] if mtp else [])], tuple(ids)))


def refused(table, folder=None):
    problems = []
    assert read_keep_map(table, folder, problems) is None
    return problems


def test_a_map_in_the_recipe_in_json_and_in_toml_is_the_same(tmp_path):
    (tmp_path / "kept.json").write_text('{"3": [0, 2], "10": [1, 5]}')
    (tmp_path / "kept.toml").write_text("3 = [0, 2]\n10 = [1, 5]\n")
    problems = []
    inline = read_keep_map({"layers": {"3": [0, 2], "10": [1, 5]}}, None, problems)
    of_json = read_keep_map({"file": "kept.json"}, tmp_path, problems)
    of_toml = read_keep_map({"file": "kept.toml"}, tmp_path, problems)
    assert problems == []
    assert inline.layers == of_json.layers == of_toml.layers == {3: (0, 2), 10: (1, 5)}
    assert (inline.file, inline.text) == (None, '{"10": [1, 5], "3": [0, 2]}')
    assert (of_json.file, of_json.text) == ("kept.json", '{"3": [0, 2], "10": [1, 5]}')
    assert of_toml.file == "kept.toml"
    assert inline.num_experts == 2


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({}, "expected lists of expert ids by layer number"),
        ([[0, 1]], "expected lists of expert ids by layer number"),
        ({"x": [0]}, "'x' is not the number of a layer"),
        ({"-1": [0]}, "'-1' is not the number of a layer"),
        ({"03": [0]}, "'03' is not the number of a layer"),
        ({"": [0]}, "'' is not the number of a layer"),
        ({"9" * 5000: [0]}, f"'{'9' * 5000}' is not the number of a layer"),
        ({"3": 4}, "layer 3: expected a list of expert ids"),
        ({"3": [0, True]}, "layer 3: expected a list of expert ids"),
        ({"3": [0, -1]}, "layer 3: expected a list of expert ids"),
        ({"3": [0, 1.0]}, "layer 3: expected a list of expert ids"),
        ({"3": []}, "layer 3: expected ascending ids, each once, at least one"),
        ({"3": [1, 0]}, "layer 3: expected ascending ids, each once, at least one"),
        ({"3": [0, 0]}, "layer 3: expected ascending ids, each once, at least one"),
    ],
)
def test_what_is_no_map_is_refused(layers, said):
    assert refused({"layers": layers}) == [f"keep.layers: {said}"]


def test_all_bad_layers_are_named():
    said = refused({"layers": {"3": [], "4": [0], "x": [1]}})
    assert [line.partition(":")[2][:9] for line in said] == [" layer 3:", " 'x' is n"]


@pytest.mark.parametrize(
    "table",
    [
        {},
        3,
        {"file": "a.json", "layers": {}},
        {"experts": {}},
        {"count": 4},
        {"by": "routing-mass"},
        {"by": "routing-mass", "count": 4, "file": "a.json"},
    ],
    ids=str,
)
def test_there_is_one_way_at_a_time(table):
    assert refused(table) == [
        "keep: expected one of file, layers, or by and count, and nothing else"
    ]


def test_the_heaviest_are_asked_for_by_their_number():
    problems = []
    keep = read_keep_map({"by": "routing-mass", "count": 12}, None, problems)
    assert (keep, problems) == (Heaviest(12), [])
    assert keep.num_experts == 12


@pytest.mark.parametrize(
    ("by", "count", "said"),
    [
        ("mass", 4, ["keep.by is 'mass', expected 'routing-mass'"]),
        ("routing-mass", 0, ["keep.count is 0, expected a whole number of experts"]),
        ("routing-mass", True, ["keep.count is True, expected a whole number of experts"]),
        ("routing-mass", 4.0, ["keep.count is 4.0, expected a whole number of experts"]),
        (
            ["routing-mass"],
            "4",
            [
                "keep.by is ['routing-mass'], expected 'routing-mass'",
                "keep.count is '4', expected a whole number of experts",
            ],
        ),
    ],
)
def test_what_does_not_say_how_many_or_by_what_is_refused(by, count, said):
    assert refused({"by": by, "count": count}) == said


def test_so_many_of_each_layer_must_be_there_and_enough_for_a_token(text):
    few = "keep.count is {}, expected 4 (a token needs so many) to {} (a layer has no more)"
    for count in (4, 16):
        assert list(Heaviest(count).problems(text, has_mtp=True)) == []
    for count in (3, 17):
        assert list(Heaviest(count).problems(text, has_mtp=True)) == [few.format(count, 16)]
    smaller = replace(text, mtp_experts=10)
    assert list(Heaviest(11).problems(smaller, has_mtp=True)) == [few.format(11, 10)]
    assert list(Heaviest(11).problems(smaller, has_mtp=False)) == []


def test_a_map_that_stands_in_lists_every_layer_with_experts(text):
    keep = Heaviest(5).stand_in(text, has_mtp=True)
    assert keep.layers == dict.fromkeys([*LAYERS, 8], (0, 1, 2, 3, 4))
    assert Heaviest(5).stand_in(text, has_mtp=False).layers.keys() == {*LAYERS}


def test_a_map_that_is_made_is_read_again_from_its_file(tmp_path):
    keep = made_map({3: [0, 2], 10: [1, 5]})
    (tmp_path / keep.file).write_text(keep.text, "utf-8")
    assert read_keep_map({"file": "kept.json"}, tmp_path, []) == keep
    assert keep.text == '{\n"3": [0, 2],\n"10": [1, 5]\n}\n'


def test_files_that_cannot_be_read_are_named(tmp_path):
    at = f"keep.file: {tmp_path}"
    (tmp_path / "twice.json").write_text('{"3": [0], "3": [1]}')
    (tmp_path / "bad.toml").write_text("3 = [")
    (tmp_path / "list.json").write_text("[1]")
    assert refused({"file": "kept.txt"}) == [
        "keep.file is 'kept.txt', expected the path of a .json or .toml file"
    ]
    for name in ("none.json", "twice.json", "bad.toml", "list.json"):
        (said,) = refused({"file": name}, tmp_path)
        assert said.startswith(f"{at}/{name}: ")


@given(st.sets(st.integers(0, 15), min_size=4))
def test_equally_many_in_every_layer_fit_whatever_they_are(text, ids):
    kept = sorted(ids)
    assert list(keep_of(kept).problems(text, has_mtp=True)) == []
    assert list(keep_of(kept, mtp=False).problems(text, has_mtp=False)) == []
    assert keep_of(kept).num_experts == len(ids)


def test_layers_left_out_are_named(text):
    keep = KeepMap({3: (0, 1, 2, 3)})
    assert list(keep.problems(text, has_mtp=True)) == [
        "keep: layers 1, 2, 4, 5, 6, 7, 8 have experts and are not listed"
    ]


def test_layers_without_experts_are_refused(text):
    keep = KeepMap(keep_of(range(4), mtp=False).layers | {0: (0, 1, 2, 3), 8: (0, 1, 2, 3)})
    assert list(keep.problems(text, has_mtp=False)) == [
        "keep: layer 0 has no routed experts",
        "keep: layer 8 has no routed experts",
    ]


def test_experts_that_do_not_exist_are_refused(text):
    keep = KeepMap(keep_of(range(4)).layers | {5: (0, 1, 2, 16)})
    assert list(keep.problems(text, has_mtp=True)) == [
        "keep: layer 5 has 16 experts, there is no 16"
    ]


def test_the_mtp_layer_has_experts_of_its_own_number(text):
    wider = replace(text, mtp_experts=20)
    keep = KeepMap(keep_of(range(4)).layers | {8: (0, 1, 2, 19)})
    assert list(keep.problems(wider, has_mtp=True)) == []
    assert list(keep.problems(text, has_mtp=True)) == [
        "keep: layer 8 has 16 experts, there is no 19"
    ]


def test_one_number_for_all_layers_and_the_mtp_layer(text):
    keep = KeepMap(keep_of(range(6)).layers | {8: tuple(range(5)), 2: tuple(range(5))})
    assert list(keep.problems(text, has_mtp=True)) == [
        "keep: all layers must keep equally many experts, "
        "found 6 in layers 1, 3, 4, 5, 6, 7; 5 in layers 2, 8"
    ]


def test_a_token_must_find_as_many_experts_as_it_needs(text):
    assert list(keep_of([0, 1, 15]).problems(text, has_mtp=True)) == [
        "keep: 3 experts are kept in layer 1, a token needs 4"
    ]


@pytest.mark.parametrize("text", ["3 = " + "[" * 5000, "3 = " + "9" * 5000], ids=["deep", "long"])
def test_toml_that_the_parser_gives_up_on_is_refused(tmp_path, text):
    (tmp_path / "kept.toml").write_text(text)
    (said,) = refused({"file": "kept.toml"}, tmp_path)
    assert said.startswith(f"keep.file: {tmp_path / 'kept.toml'}: ")


def test_what_is_no_file_is_not_read(tmp_path):
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("zero.json", "pipe.toml"):
        assert refused({"file": name}, tmp_path) == [f"keep.file: {tmp_path / name}: not a file"]
    (said,) = refused({"file": "a\0.json"}, tmp_path)
    assert said.endswith("embedded null byte")
