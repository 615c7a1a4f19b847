"""Experts fitted to the tokens that choose them: their moments against the formula, in float64."""

import weakref
from dataclasses import replace

import pytest
import torch

from emberbox.cli.compress import _needs
from emberbox.compress import encode, hessian, routing
from emberbox.compress.encode import Encoder
from emberbox.compress.hessian import Hessian
from emberbox.compress.pipeline import _require_memory, prepare
from emberbox.compress.quantize_exl3 import group_bytes
from emberbox.compress.recipe import parse_recipe
from emberbox.compress.source import Source
from emberbox.compress.walk import Walk
from emberbox.device import Device
from emberbox.errors import MemoryRefused, SettingsError
from tests.compress.test_pipeline import OPTIONS, moments_up_to, nano_inputs
from tests.helpers.nano import NANO

AT = "model.language_model.layers.3.mlp."
SHRINK = 50
TEXT = f"""
expert_moments = "routed"
shrink_tokens = {SHRINK}
allow_mixed_experts = true
[[rule]]
match = ["{AT}experts.*.down_proj", "{AT}experts.*.gate_proj"]
format = "exl3"
bits = 2
"""


def route(x, params, config):
    """Weight of each expert for each token [T, E], zero where it was not chosen."""
    scores = torch.sigmoid(x @ params[f"{AT}gate.weight"].double().T)
    bias = params[f"{AT}gate.e_score_correction_bias"].double()
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, (scores + bias).topk(config.num_experts_per_tok).indices, True)
    kept = scores * chosen
    return kept / kept.sum(1, keepdim=True)


def test_moments_weigh_an_expert_s_own_tokens_and_lean_on_the_layer():
    prepared = prepare(NANO, parse_recipe(TEXT, "routed"), OPTIONS)
    config = prepared.config.text
    seen = moments_up_to(prepared, 3)
    params, x = nano_inputs(prepared, f"{AT}shared_experts.gate_proj")
    weights = route(x, params, config)
    counts = (weights > 0).sum(0)
    assert 0 < int(counts.min()) < int(counts.max())  # so that shrinkage matters, and unevenly
    for expert in range(config.n_routed_experts):
        gate, up = (
            x @ params[f"{AT}experts.{expert}.{p}_proj.weight"].double().T for p in ("gate", "up")
        )
        limit = config.swiglu_limit
        inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        own = weights[:, expert, None]
        for leaf, rows in (("gate", x), ("down", inner)):
            mine = (rows * own).T @ (rows * own) / own.square().sum()
            every = rows.T @ rows / len(rows)
            count = int(counts[expert])
            expected = (count * mine + SHRINK * every) / (count + SHRINK)
            found = seen[f"{AT}experts.{expert}.{leaf}_proj"]
            assert found.num_rows == count
            torch.testing.assert_close(found.matrix, expected, atol=1e-4, rtol=1e-3)
            assert (mine - every).abs().max() > 100 * (found.matrix - expected).abs().max()


def test_an_expert_that_no_token_chooses_has_the_moments_of_all():
    prepared = prepare(NANO, parse_recipe(TEXT, "routed"), OPTIONS)
    few = prepared.calibration.token_ids[:1, :2]  # two tokens choose eight of sixteen at most
    object.__setattr__(prepared.calibration, "token_ids", few)
    seen = moments_up_to(prepared, 3)
    matrices = [seen[f"{AT}experts.{e}.gate_proj"].matrix for e in range(16)]
    same = [e for e in range(16) if sum(torch.equal(matrices[e], m) for m in matrices) > 1]
    assert len(same) >= 8
    assert len(same) < 16


ALL_OF_LAYER_3 = TEXT.replace(
    f'"{AT}experts.*.down_proj", "{AT}experts.*.gate_proj"', f'"{AT}experts.**"'
)


class Enough(Exception):
    """The search would begin: by now all moments of a group are at hand."""


@pytest.mark.parametrize(
    ("moments", "num_experts", "expected"),
    [("routed", 3, 4), ("routed", 6, 8), ("routed", 15, 20), ("all", 6, 5)],
)
def test_the_plan_counts_the_moments_that_are_held_at_once(
    monkeypatch, moments, num_experts, expected
):
    text = ALL_OF_LAYER_3
    if moments == "all":
        text = text.replace('"routed"', '"all"').replace(f"shrink_tokens = {SHRINK}\n", "")
    size = group_bytes(2 * num_experts, 128, 128)
    options = replace(OPTIONS, group_bytes=size)
    prepared = prepare(NANO, parse_recipe(text, "routed"), options)
    alive, peaks = [], []

    def watched(matrix, num_rows):
        alive.append(weakref.ref(matrix))
        held = [found for ref in alive if (found := ref()) is not None]
        peaks.append(sum(each.nbytes for each in held))
        return Hessian(matrix, num_rows)

    def begun(weights, hessians, *_, **__):
        if len(weights) > 3:  # not the shared expert
            raise Enough(len({id(one) for one in hessians}))
        return ()

    monkeypatch.setattr(routing, "Hessian", watched)
    monkeypatch.setattr(hessian, "Hessian", watched)  # the means
    monkeypatch.setattr(encode, "quantize", begun)
    source = Source(prepared.checkpoint, prepared.config)
    encoder = Encoder(source, begun, torch.device("cpu"), size)
    walk = Walk(encoder, prepared.calibration.token_ids, prepared.plan.recipe.shrink_tokens)
    walk.begin()
    with pytest.raises(Enough) as caught:
        list(walk.layer(3, prepared.plan.groups()["layer-003"]))
    # All matrices of ember-nano have one shape: gate, up and down of two thirds of the experts.
    (distinct,) = caught.value.args
    assert distinct == expected
    one = 128 * 128 * 8
    counted = prepared.moments_bytes - num_experts * 3 * 128 * 128 * 12
    assert distinct * one <= max(peaks) <= counted <= (distinct + num_experts + 8) * one


def test_the_moments_of_a_plan_are_shown_and_decide_whether_it_fits(monkeypatch):
    prepared = prepare(NANO, parse_recipe(ALL_OF_LAYER_3, "routed"), OPTIONS)
    assert _needs(prepared)["memory for a group of experts and its moments"] == 14_548_992
    enough = prepared.activation_bytes + prepared.moments_bytes + prepared.search_bytes
    for free, fits in ((enough, True), (enough - 1, False)):
        monkeypatch.setattr(Device, "free_memory_bytes", lambda _, free=free: free)
        if fits:
            _require_memory(prepared)
        else:
            with pytest.raises(MemoryRefused, match=r"14\.5 MB for a group of experts and its mom"):
                _require_memory(prepared)
    nothing = prepare(
        NANO, parse_recipe('[[rule]]\nmatch = "lm_head"\nformat = "nvfp4"\n', "x"), OPTIONS
    )
    assert nothing.moments_bytes == 0
    downs = TEXT.replace(f', "{AT}experts.*.gate_proj"', "")
    some = prepare(NANO, parse_recipe(downs, "downs"), OPTIONS)
    assert some.moments_bytes == prepared.moments_bytes - 16 * 128 * 128 * 8


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('expert_moments = "own"\n', "expert_moments is 'own', expected one of all, routed"),
        ("shrink_tokens = 5\n", 'shrink_tokens: only expert_moments = "routed" shrinks anything'),
        (
            'expert_moments = "routed"\nshrink_tokens = 0\n',
            "shrink_tokens is 0, expected a whole number from 1",
        ),
    ],
)
def test_what_the_recipe_may_not_say(text, problem):
    with pytest.raises(SettingsError) as caught:
        parse_recipe(text + '[[rule]]\nmatch = "**"\nformat = "exl3"\nbits = 2\n', "mine")
    assert problem in caught.value.message


def test_routed_moments_are_not_the_default():
    rule = '[[rule]]\nmatch = "**"\nformat = "exl3"\nbits = 2\n'
    assert parse_recipe(rule, "mine").shrink_tokens is None
    assert parse_recipe('expert_moments = "all"\n' + rule, "mine").shrink_tokens is None
    assert parse_recipe('expert_moments = "routed"\n' + rule, "mine").shrink_tokens == 256
