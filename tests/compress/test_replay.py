"""A few matrices of a finished conversion, compressed again, and the hashes of all."""

import json

import pytest

from emberbox.cli import demo_compress
from emberbox.compress import trellis_search_cpu
from emberbox.compress.pipeline import CompressOptions, compress, prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.compress.replay import compress_again, decoded_hashes
from emberbox.errors import CheckpointError, DamagedTensor
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.digests import write_digests
from tests.helpers.nano import NANO
from tests.helpers.quick_search import quick_search
from tests.helpers.whole_folder import write_sums

LAYERS = "model.language_model.layers."
RECIPE = """
layout = "exllamav3"
[[rule]]
match = ["**.layers.[01].self_attn.[qkvo]_proj", "**.layers.1.mlp.experts.[012].*"]
format = "exl3"
bits = 2
"""
NAMES = (
    f"{LAYERS}0.self_attn.o_proj",
    f"{LAYERS}1.mlp.experts.0.gate_proj",
    f"{LAYERS}1.mlp.experts.2.down_proj",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "two-bits"
    # All experts of a layer are stored alike: three of them are searched, so mixing is allowed.
    recipe = parse_recipe("allow_mixed_experts = true\n" + RECIPE, "recipe.toml")
    options = CompressOptions(rows=2, cols=40, max_shard_bytes=8_000_000)
    compress(prepare(NANO, recipe, options), folder, quick_search)
    return folder


def test_matrices_come_out_with_the_error_that_they_had(made):
    found = list(compress_again(NANO, made, NAMES, quick_search))
    assert [again.name for again in found] == list(NAMES)
    for again in found:
        assert 0.01 < again.then < 1
        assert again.now == pytest.approx(again.then, rel=1e-6)


def test_a_matrix_that_was_not_searched_is_refused(made):
    with pytest.raises(CheckpointError, match=r"has no .*experts\.3\.up_proj"):
        next(compress_again(NANO, made, [f"{LAYERS}1.mlp.experts.3.up_proj"], quick_search))


def test_a_folder_that_does_not_say_how_it_was_made_is_refused():
    with pytest.raises(CheckpointError, match=r"compression\.json: cannot be read"):
        next(compress_again(NANO, NANO, NAMES, quick_search))


def test_the_live_part_tells_a_changed_matrix_and_a_changed_error(made, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_compress, "LIVE", NAMES)
    monkeypatch.setattr(trellis_search_cpu, "search", quick_search)
    hashes = made.with_name("two-bits.decoded.json")
    hashes.write_text(json.dumps(decoded_hashes(made)), "utf-8")
    assert len(json.loads(hashes.read_text("utf-8"))) == 2 * 2 + 3 * 3
    from rich.console import Console

    console = Console(quiet=True)
    assert demo_compress.compress_live(NANO, made, console).is_right

    report_path = made / "compression.json"
    report = json.loads(report_path.read_text("utf-8"))
    report["matrices"][NAMES[1]]["proxy_error"] *= 1.04
    whole = report_path.read_text("utf-8")
    report_path.write_text(json.dumps(report), "utf-8")
    assert not demo_compress.compress_live(NANO, made, console).is_right
    report_path.write_text(whole, "utf-8")

    info = open_checkpoint(made).tensors[f"{NAMES[0]}.trellis"]
    with info.file.open("r+b") as file:
        file.seek(info.start)
        first = file.read(1)
        file.seek(info.start)
        file.write(bytes([first[0] ^ 1]))
    with pytest.raises(DamagedTensor, match=rf"{NAMES[0]}\.trellis"):
        demo_compress.compress_live(NANO, made, console)
    write_digests(made)  # another matrix, not a damaged one
    write_sums(made)
    found = demo_compress.compress_live(NANO, made, console)
    assert found.differing == (NAMES[0],)
    assert not found.is_right
