"""Experts fitted to the tokens that choose them: their moments against the formula, in float64."""

import pytest
import torch

from emberbox.compress.pipeline import prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.errors import SettingsError
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
