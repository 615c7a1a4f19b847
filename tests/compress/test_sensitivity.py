"""Losses are measured as one would by hand, and a budget buys the least of them."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emberbox.compress import measure_sensitivity
from emberbox.compress.beside import report_of
from emberbox.compress.bit_budget import Group
from emberbox.compress.measure_sensitivity import sensitivity_of
from emberbox.compress.pipeline import CompressOptions, compress, prepare
from emberbox.compress.recipe import Budget, load_recipe, parse_recipe
from emberbox.compress.sensitivity import (
    choose_measured,
    losses_in,
    made_sensitivity,
    source_digest,
)
from emberbox.device import Device
from emberbox.errors import MemoryRefused, SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Part
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.safetensors_header import read_header
from tests.compress.test_pipeline import network_of
from tests.helpers.nano import NANO
from tests.helpers.quick_search import quick_search
from tests.helpers.tiny import tiny_config, tiny_tensors, write_folder

A, B, C = (Group(Part.TRUNK, layer, "self_attn.o_proj") for layer in (0, 1, 2))
RATES = (1.5, 2.0, 3.0)
OPTIONS = CompressOptions(rows=2, cols=48)
ONE = """
budget_bytes = 30_000_000
[[rule]]
match = ["**.layers.1.self_attn.[qkv]_proj", "**.layers.6.mlp.experts.*.down_proj", "lm_head"]
part = "trunk"
format = "exl3"
"""


def spent(weights, bits, lowest=1.0):
    return sum(int(weights[g] * (bits[g] - lowest)) // 8 for g in bits)


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.floats(0, 4), min_size=3, max_size=3), min_size=3, max_size=3),
    st.lists(st.integers(1, 50), min_size=3, max_size=3),
    st.integers(0, 400),
)
def test_what_is_chosen_fits_and_no_single_raise_would_be_better(losses, sizes, more):
    weights = {g: 64 * size for g, size in zip((A, B, C), sizes, strict=True)}
    offers = {
        g: dict(zip(RATES, row, strict=True)) for g, row in zip((A, B, C), losses, strict=True)
    }
    free = spent(weights, dict.fromkeys(weights, 1.5)) + 16 * more
    bits = choose_measured(weights, offers, free, 1.0)
    assert spent(weights, bits) <= free
    for group, rate in itertools.product(weights, RATES):
        raised = bits | {group: rate}
        better = offers[group][rate] < offers[group][bits[group]]
        assert not (rate > bits[group] and better and spent(weights, raised) <= free)


def test_of_all_ways_to_spend_the_best_is_found_where_losses_fall_and_flatten():
    weights = {A: 800, B: 800, C: 1600}
    offers = {A: {1.5: 9, 2: 4, 3: 3}, B: {1.5: 2, 2: 1, 3: 0.5}, C: {1.5: 10, 2: 9.8, 3: 9.7}}
    for free in range(200, 801, 25):
        bits = choose_measured(weights, offers, free, 1.0)
        ways = (dict(zip(weights, way, strict=True)) for way in itertools.product(RATES, repeat=3))
        best = min(
            sum(offers[g][way[g]] for g in way) for way in ways if spent(weights, way) <= free
        )
        assert sum(offers[g][bits[g]] for g in bits) <= best + 0.5  # greedy at the rest, no more


def test_the_lowest_loss_of_a_group_is_never_paid_beyond():
    assert choose_measured({A: 800}, {A: {1.5: 1.0, 2.0: 0.2, 3.0: 0.3}}, 10**6, 1.0) == {A: 2.0}


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(SettingsError, match="1 groups were not measured, the first layer 1 self"):
        choose_measured({A: 800, B: 800}, {A: {2.0: 1.0}}, 10**6, 1.0)
    with pytest.raises(SettingsError, match="out of reach even at the lowest bits"):
        choose_measured({A: 800}, {A: {2.0: 1.0}}, 99, 1.0)
    assert choose_measured({A: 800}, {A: {2.0: 1.0}}, 100, 1.0) == {A: 2.0}


def test_the_file_says_what_was_measured_and_nothing_else_is_read(tensors):
    losses = {A: {2.0: 0.25, 1.5: 0.5}, Group(Part.TRUNK, -1, "lm_head"): {6.0: 1e-4}}
    found = made_sensitivity(losses, {"rows": 2}, source_digest(tensors))
    assert losses_in(found.text, tensors) == losses
    whole = json.loads(found.text)
    assert whole["about"] == {"rows": 2}
    crooked = [
        "",
        "[]",
        json.dumps(whole | {"schema": "emberbox.sensitivity.v2"}),
        json.dumps({k: v for k, v in whole.items() if k != "groups"}),
        json.dumps({k: v for k, v in whole.items() if k != "source_sha256"}),
        json.dumps(whole | {"source_sha256": ["x"], "about": "y"}),
        json.dumps(whole | {"groups": whole["groups"] * 2}),
        *(
            json.dumps(whole | {"groups": [whole["groups"][0] | change]})
            for change in (
                {"part": "nose"},
                {"layer": "x"},
                {"layer": float("inf")},
                {"loss": {"2": 10**400}},
                {"loss": {"2.25": 1}},
                {"loss": {"2": True}},
                {"loss": {"2": float("nan")}},
                {"loss": 3},
            )
        ),
        "[" * 100_000,
    ]
    for text in crooked:
        with pytest.raises(SettingsError, match="sensitivity"):
            losses_in(text, tensors)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """Of a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    return open_checkpoint(
        write_folder(folder, tiny_config(), tiny_tensors(Glm5NextConfig.from_dict(tiny_config())))
    ).tensors


def test_weights_are_known_again_and_others_of_the_same_shapes_are_not(tmp_path):
    made = tiny_tensors(Glm5NextConfig.from_dict(tiny_config()))

    def digest(name, changed):
        return source_digest(
            open_checkpoint(write_folder(tmp_path / name, tiny_config(), changed)).tensors
        )

    whole = digest("a", made)
    assert digest("another name", dict(reversed(made.items()))) == whole
    first = [name for name in made if ".experts." not in name or ".experts.0." in name]
    assert len(first) < len(made)
    for number, name in enumerate(first):
        other = made[name].clone()
        other.view(-1).view(torch.uint8)[0] ^= 1
        assert digest(f"changed-{number}", made | {name: other}) != whole, name
    fewer = {name: tensor for name, tensor in made.items() if name != "lm_head.weight"}
    assert digest("fewer", fewer) != whole


def test_the_file_of_another_model_is_refused_and_both_are_named(measured, tmp_path):
    path = tmp_path / "losses.json"
    path.write_text(measured.text)
    changed = tmp_path / "ember-nano"  # the same name and the same shapes
    shutil.copytree(NANO, changed)
    shard = sorted(changed.glob("*.safetensors"))[0]
    with shard.open("r+b") as file:
        file.seek(next(i.start for i in read_header(shard).values()))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    text = ONE.partition("\n[[rule]]")[2]
    (tmp_path / "one.toml").write_text(f"[[rule]]{text}")
    recipe = load_recipe(tmp_path / "one.toml", Budget(23_100_000, path))
    prepare(NANO, recipe, OPTIONS)
    with pytest.raises(SettingsError) as caught:
        prepare(changed, recipe, OPTIONS)
    own, other = (source_digest(open_checkpoint(f).tensors)[:12] for f in (NANO, changed))
    assert caught.value.message == (
        f"sensitivity: measured on 'ember-nano' with weights {own}; this checkpoint has {other}"
    )


def test_the_committed_losses_are_of_the_committed_model():
    path = NANO.parents[1] / "receipts" / "nano" / "recipes" / "sensitivity.json"
    losses = losses_in(path.read_text(), open_checkpoint(NANO).tensors)
    assert len(losses) == 53


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_sensitivity, "MEASURED_RATES", (2.0, 4.0))
        return sensitivity_of(NANO, parse_recipe(ONE, "one"), OPTIONS, quick_search)


def test_every_group_that_the_text_reaches_is_measured_at_every_rate(measured):
    assert {(g.layer, g.kind): set(rates) for g, rates in measured.losses.items()} == {
        (1, "self_attn.qkv"): {2.0, 4.0},
        (6, "mlp.experts.down_proj"): {2.0, 4.0},
        (-1, "lm_head"): {2.0, 4.0},
    }
    for rates in measured.losses.values():
        assert rates[2.0] > rates[4.0] > 0
    about = json.loads(measured.text)["about"]
    assert (about["rows"], about["cols"], about["seed"]) == (2, 48, OPTIONS.seed)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (1, "**.layers.1.self_attn.[qkv]_proj"),
        (6, "**.layers.6.mlp.experts.*.down_proj"),
        (-1, "lm_head"),
    ],
)
def test_a_loss_is_the_divergence_of_the_network_with_that_group_exchanged(
    measured, tmp_path, layer, match
):
    text = f'[[rule]]\nmatch = "{match}"\npart = "trunk"\nformat = "exl3"\nbits = 2\n'
    prepared = prepare(NANO, parse_recipe(text, "two"), OPTIONS)
    compress(prepared, tmp_path / "two", quick_search)
    ids = prepared.calibration.token_ids
    with torch.inference_mode():
        source, changed = (
            network_of(folder).full(ids).double().log_softmax(-1)
            for folder in (NANO, tmp_path / "two")
        )
    expected = float((source.exp() * (source - changed)).sum(-1).mean())
    (found,) = (rates[2.0] for g, rates in measured.losses.items() if g.layer == layer)
    # The scales in the folder are float16, as are those that were measured.
    assert found == pytest.approx(expected, rel=2e-3)


def test_a_budget_and_a_file_make_a_recipe_that_can_be_read_again(measured, tmp_path):
    path = tmp_path / "losses.json"
    path.write_text(measured.text)
    text = ONE.partition("\n[[rule]]")[2]
    (tmp_path / "one.toml").write_text(f"[[rule]]{text}")
    small = load_recipe(tmp_path / "one.toml", Budget(23_000_000, path))
    large = load_recipe(tmp_path / "one.toml", Budget(23_100_000, path))
    prepared = prepare(NANO, small, OPTIONS)
    assert prepared.plan.num_bytes <= 23_000_000
    assert prepared.plan.digest != prepare(NANO, large, OPTIONS).plan.digest
    (tmp_path / "sensitivity.json").write_text(measured.text)
    again = parse_recipe(small.text, "recipe.toml", tmp_path)
    assert replace(again, name=small.name, budget=small.budget) == small
    with pytest.raises(SettingsError, match="sensitivity: without budget_bytes"):
        parse_recipe(f'sensitivity = "x"\n[[rule]]{text}', "x")


def test_what_does_not_fit_into_memory_is_refused_before_the_work(monkeypatch):
    def refused(*_):
        raise AssertionError("the text has begun to move")

    monkeypatch.setattr(measure_sensitivity.Walk, "begin", refused)
    for free, what in ((10_000_000, "decoded to float32"), (49_000_000, "the text before every")):
        monkeypatch.setattr(Device, "free_memory_bytes", lambda _, free=free: free)
        large = replace(OPTIONS, rows=100, cols=512)
        with pytest.raises(MemoryRefused, match=what):
            sensitivity_of(NANO, parse_recipe(ONE, "one"), large, quick_search)


def test_a_file_that_is_not_there_is_an_error_of_the_recipe(tmp_path):
    with pytest.raises(SettingsError, match=r"losses\.json: cannot be read"):
        load_recipe("measured", Budget(10**7, tmp_path / "losses.json"))


def test_the_folder_tells_the_command_with_every_flag_that_matters(measured, tmp_path):
    path = tmp_path / "losses.json"
    path.write_text(measured.text)
    recipe = load_recipe("measured", Budget(8_065_844))
    options = replace(OPTIONS, group_bytes=1 << 30, seed=3)
    report = json.loads(report_of(prepare(NANO, recipe, options), {}))
    assert report["command"] == (
        "emberbox compress SRC DST --recipe measured --budget-bytes 8065844 "
        "--rows 2 --cols 48 --seed 3 --device cpu --group-bytes 1073741824"
    )
    text = '[[rule]]\nmatch = "lm_head"\nformat = "exl3"\n'
    own = parse_recipe(text, "mine", budget=Budget(24_000_000, path))
    command = json.loads(report_of(prepare(NANO, own, OPTIONS), {}))["command"]
    assert command == (
        "emberbox compress SRC DST --recipe mine --budget-bytes 24000000 --sensitivity "
        "sensitivity.json --rows 2 --cols 48 --seed 0 --device cpu"
    )


def test_a_recipe_with_a_budget_takes_no_other():
    with pytest.raises(SettingsError, match="has a budget of its own"):
        parse_recipe(ONE, "one", budget=Budget(5))
    with pytest.raises(SettingsError, match=r"sensitivity: expected 'sensitivity\.json'"):
        parse_recipe('sensitivity = "sub/x.json"\n' + ONE, "one")
