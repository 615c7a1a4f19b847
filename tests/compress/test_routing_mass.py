"""Experts kept by routing mass: what is counted, which stay, and what comes out."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from emberbox.cli.main import main
from emberbox.compress import walk
from emberbox.compress.calibration import Calibration
from emberbox.compress.conversion_plan import plan_conversion
from emberbox.compress.keep_map import KeepMap
from emberbox.compress.pipeline import CompressOptions, compress, prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.compress.replay import compress_again
from emberbox.compress.routing_mass import RoutingMass, routing_mass
from emberbox.compress.source import Source
from emberbox.engine.llm import LLM
from emberbox.engine.request import SamplingParams
from emberbox.errors import CheckpointError, MemoryRefused, SettingsError
from emberbox.model.batch import Batch, Span
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.checksums import verify_checksums
from tests.helpers.nano import NANO
from tests.helpers.quick_search import quick_search

ROWS, COLS, COUNT = 3, 41, 7
OPTIONS = CompressOptions(rows=ROWS, cols=COLS, max_shard_bytes=8_000_000)
LAYER = "model.language_model.layers."
MOE_LAYERS, MTP, EXPERTS, CHOSEN = range(1, 8), 8, 16, 4
KEEP = f'[keep]\nby = "routing-mass"\ncount = {COUNT}\n'
SOME = f"""
layout = "exllamav3"
[[rule]]
match = ["**.layers.0.self_attn.o_proj", "**.layers.3.mlp.experts.**"]
format = "exl3"
bits = 2
{KEEP}
"""


def params_of(folder):
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config)
    assignment = assign(config, checkpoint.tensors)
    return config, load_parameters(checkpoint, assignment, device="cpu", dtype=torch.float32)


def batch_of(ids):
    rows, length = ids.shape
    spans = tuple(Span(i * length, (i + 1) * length, 0, i, ()) for i in range(rows))
    return Batch(ids.flatten(), spans)


def counted(ids):
    """Layer -> mass, float64 [16], from what the routers of the whole network are asked."""
    config, params = params_of(NANO)
    reference, asked = OpTable.reference(), []

    def watched(x, gate, bias, top_k, scaling):
        asked.append((x.double().numpy(), gate.double().numpy(), bias.double().numpy()))
        return reference.route_topk(x, gate, bias, top_k, scaling)

    network = Network(config, params, replace(reference, route_topk=watched))
    hidden = network.forward(batch_of(ids), None).view(*ids.shape, -1)
    before = hidden[:, :-1].flatten(0, 1)
    network.draft(before, ids[:, 1:].flatten(), batch_of(ids[:, :-1]), None)
    masses = {}
    for layer, (x, gate, bias) in zip([*MOE_LAYERS, MTP], asked, strict=True):
        masses[layer] = np.zeros(EXPERTS)
        for row in x:
            score = 1 / (1 + np.exp(-(gate @ row)))
            chosen = np.argsort(-(score + bias))[:CHOSEN]
            for expert in chosen:
                masses[layer][expert] += score[expert] / score[chosen].sum()
    return masses


@pytest.fixture(scope="module")
def prepared():
    return prepare(NANO, parse_recipe(KEEP, "kept"), OPTIONS)


@pytest.fixture(scope="module")
def kept_folder(prepared, tmp_path_factory):
    """Experts alone are cut; every weight that stays is the source's."""
    folder = tmp_path_factory.mktemp("kept") / "nano-kept"
    compress(prepared, folder, quick_search)
    return folder


@pytest.mark.parametrize("tokens_at_once", [8192, COLS], ids=["at once", "row by row"])
def test_the_mass_is_what_the_routers_of_the_network_give_out(
    prepared, monkeypatch, tokens_at_once
):
    monkeypatch.setattr(walk, "TOKENS_AT_ONCE", tokens_at_once)
    source = Source(prepared.checkpoint, prepared.config)
    found = routing_mass(source, prepared.mass.text, torch.device("cpu"))
    expected = counted(prepared.mass.text.token_ids)
    assert list(found.layers) == list(expected) == [*MOE_LAYERS, MTP]
    for layer, masses in found.layers.items():
        np.testing.assert_allclose(masses, expected[layer], rtol=1e-4, atol=1e-3)
        tokens = ROWS * (COLS - 1 if layer == MTP else COLS)
        assert sum(masses) == pytest.approx(tokens, rel=1e-5)
    assert len({tuple(masses) for masses in found.layers.values()}) == len(found.layers)


def test_the_heaviest_stay_and_of_equal_ones_the_first():
    text = Calibration(torch.zeros(1, 2, dtype=torch.int64), "text", "")
    mass = RoutingMass(text, {3: (0.5, 2.0, 0.5, 1.0), 4: (0.0, 0.0, 0.0, 4.0)})
    assert mass.heaviest(3).layers == {3: (0, 1, 3), 4: (0, 1, 3)}
    assert mass.heaviest(1).layers == {3: (1,), 4: (3,)}
    assert list(mass.notes(mass.heaviest(2))) == [
        "layer 3 keeps 2 of 4 experts, which have 75.0% of its routing mass: 1, 3",
        "layer 4 keeps 2 of 4 experts, which have 100.0% of its routing mass: 0, 3",
    ]


def test_the_plan_keeps_the_heaviest_of_every_layer_and_says_so(prepared):
    keep = prepared.plan.recipe.keep
    for layer, masses in counted(prepared.mass.text.token_ids).items():
        assert keep.layers[layer] == tuple(sorted(np.argsort(-masses)[:COUNT]))
        assert any(note.startswith(f"layer {layer} keeps 7 of 16") for note in prepared.plan.notes)
    assert prepared.plan.num_experts == COUNT
    # A plan from headers alone has the same bytes: which experts stay does not matter for that.
    plain = plan_conversion(prepared.config, prepared.checkpoint.tensors, parse_recipe(KEEP, "k"))
    assert plain.num_bytes == prepared.plan.num_bytes
    assert plain.digest != prepared.plan.digest


def test_the_map_and_the_masses_lie_beside_the_result(prepared, kept_folder):
    assert verify_checksums(kept_folder) > 0
    keep = prepared.plan.recipe.keep
    written = json.loads((kept_folder / "kept.json").read_text("utf-8"))
    assert written == {str(layer): list(ids) for layer, ids in keep.layers.items()}
    assert (kept_folder / "recipe.toml").read_text("utf-8") == KEEP
    report = json.loads((kept_folder / "compression.json").read_text("utf-8"))
    told = report["routing_mass"]
    assert told["layers"] == {str(n): list(masses) for n, masses in prepared.mass.layers.items()}
    assert told["text"]["sha256"] == prepared.mass.text.sha256
    assert (told["text"]["rows"], told["text"]["cols"], told["text"]["seed"]) == (ROWS, COLS, 0)
    assert report["calibration"] is None  # nothing was searched
    assert f"--rows {ROWS} --cols {COLS} --seed 0" in report["command"]  # the text chose experts
    # The written map asked for by its name makes the same tensors.
    (kept_folder.parent / "kept.json").write_bytes((kept_folder / "kept.json").read_bytes())
    by_file = parse_recipe('[keep]\nfile = "kept.json"\n', "again", kept_folder.parent)
    assert prepare(NANO, by_file, OPTIONS).plan.items == prepared.plan.items


def test_router_rows_bias_and_experts_of_the_result_are_those_of_the_kept(prepared, kept_folder):
    config, params = params_of(kept_folder)
    _, source = params_of(NANO)
    assert (config.text.n_routed_experts, config.text.mtp_experts) == (COUNT, COUNT)
    for layer, kept in prepared.plan.recipe.keep.layers.items():
        at = f"{LAYER}{layer}.mlp."
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            assert torch.equal(params[at + name], source[at + name][list(kept)])
        for new, old in enumerate(kept):
            name = "experts.{}.down_proj.weight"
            assert torch.equal(params[at + name.format(new)], source[at + name.format(old)])
        assert f"{at}experts.{COUNT}.down_proj.weight" not in params


def test_the_result_answers_as_the_source_does_without_its_other_experts(prepared, kept_folder):
    config, params = params_of(NANO)
    for layer, kept in prepared.plan.recipe.keep.layers.items():
        bias = params[f"{LAYER}{layer}.mlp.gate.e_score_correction_bias"]
        bias[[expert for expert in range(EXPERTS) if expert not in kept]] = -torch.inf
    masked = Network(config, params, OpTable.reference())
    llm = LLM(kept_folder, EngineSettings(dtype="float32", device="cpu"))
    ids = prepared.mass.text.token_ids[:1]
    expected = masked.full(ids)[0]
    torch.testing.assert_close(llm.score_all(ids[0].tolist()), expected, atol=1e-3, rtol=1e-3)
    (said,) = llm.generate(ids[0].tolist(), SamplingParams(max_tokens=1, temperature=0))
    assert list(said.token_ids) == [int(expected[-1].argmax())]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def stop_after(unit):
    def listener(progress):
        if progress.unit == unit:
            raise KeyboardInterrupt

    return listener


@pytest.fixture(scope="module")
def searched_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched") / "some"
    compress(prepare(NANO, parse_recipe(SOME, "some"), OPTIONS), folder, quick_search)
    return folder


def test_what_was_stopped_goes_on_with_the_same_map(searched_folder, tmp_path):
    options = replace(OPTIONS, resume=True)
    first = prepare(NANO, parse_recipe(SOME, "some"), options)
    with pytest.raises(KeyboardInterrupt):
        compress(first, tmp_path / "some", quick_search, stop_after("layer-005"))
    again = prepare(NANO, parse_recipe(SOME, "some"), options)
    compress(again, tmp_path / "some", quick_search)
    assert again.plan.recipe.keep == first.plan.recipe.keep
    assert contents(tmp_path / "some") == contents(searched_folder)


def test_with_another_map_nothing_goes_on(prepared, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        compress(prepared, tmp_path / "out", quick_search, stop_after("layer-002"))
    keep = prepared.plan.recipe.keep
    other = {layer: tuple(sorted({*range(EXPERTS)} - {*ids})[:COUNT]) for layer, ids in
             keep.layers.items()}  # fmt: skip
    recipe = replace(prepared.plan.recipe, keep=KeepMap(other, keep.file, str(other)))
    changed = prepare(NANO, recipe, replace(OPTIONS, resume=True))
    with pytest.raises(CheckpointError, match="the beginning of another conversion"):
        compress(changed, tmp_path / "out", quick_search)


def test_matrices_of_kept_experts_come_out_again(searched_folder, monkeypatch):
    monkeypatch.setattr(RoutingMass, "heaviest", None)  # the folder says which they were
    name = f"{LAYER}3.mlp.experts.{COUNT - 1}.down_proj"
    (again,) = compress_again(NANO, searched_folder, [name], quick_search)
    assert again.now == pytest.approx(again.then, rel=1e-6)


@pytest.mark.parametrize("count", [CHOSEN - 1, EXPERTS + 1])
def test_too_few_and_too_many_are_refused_before_the_text_is_read(tmp_path, count):
    recipe = parse_recipe(f'[keep]\nby = "routing-mass"\ncount = {count}\n', "kept")
    options = replace(OPTIONS, text=tmp_path / "absent.txt")
    said = rf"keep\.count is {count}, expected 4 \(a token needs so many\) to 16 "
    with pytest.raises(SettingsError, match=said):
        prepare(NANO, recipe, options)


def test_the_text_does_not_pass_without_memory_for_it(monkeypatch):
    monkeypatch.setattr("emberbox.device.Device.free_memory_bytes", lambda _: 1000)
    with pytest.raises(MemoryRefused, match="for the calibration text"):
        prepare(NANO, parse_recipe(KEEP, "kept"), OPTIONS)


def test_the_command_line_plans_with_the_map_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "kept.toml").write_text(KEEP, "utf-8")
    flags = ["--recipe", str(tmp_path / "kept.toml"), "--rows", "2", "--cols", "9", "--plan"]
    assert main(["compress", str(NANO), str(tmp_path / "out"), *flags]) == 0
    assert "note: layer 8 keeps 7 of 16 experts, which have " in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
