"""The training graph computes what emberbox.model computes, from the same parameters."""

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import gradcheck

from emberbox.model.batch import Batch, Span
from emberbox.model.network import Network
from emberbox.model.weights import parameters_from_dict
from emberbox.ops.hyper_mix.reference import sinkhorn as sinkhorn_reference
from emberbox.ops.table import bind_all
from tests.helpers.nano import NANO, nano_network
from tests.training.nano_runs import IMAGE, context, rough_parameters, tiny_config
from training.context import Rows
from training.kda import unit_lower_inverse
from training.losses import figure_names, objective
from training.network import TrainingNetwork
from training.parameters import ROUTER_BIAS_CENTRE, initial, released, stacked
from training.pointwise import Pointwise
from training.recipe import Recipe
from training.shape import config_json
from training.sinkhorn import sinkhorn
from training.vision import patchify

LOGIT_TOLERANCE = 1e-4  # absolute; the logits reach several units
CONFIG = tiny_config()
T = 160  # the selection of 64 binds


def rows(B, length=T, dense=0.0):
    return Rows(B, length, torch.ones(B * length), torch.tensor(dense))


def both(config=CONFIG, seed=0):
    params = rough_parameters(config, seed)
    operands = parameters_from_dict(config, released(params), dtype=torch.float32)
    return TrainingNetwork(context(config, params)), Network(
        config, operands, bind_all(torch.device("cpu"))
    )


def token_ids(B, length=T, seed=1):
    return torch.randint(10, 490, (B, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_logits_equal_those_of_the_network():
    trained, reference = both()
    ids = token_ids(2)
    expected = reference.full(ids)
    found = trained.logits(trained.trunk(ids, None, rows(2)).hidden).view_as(expected)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < LOGIT_TOLERANCE


@torch.no_grad()
def test_logits_and_drafts_equal_with_the_shipped_weights():
    reference = nano_network()
    tensors = {n: t for file in NANO.glob("*.safetensors") for n, t in load_file(file).items()}
    trained = TrainingNetwork(context(reference.config, stacked(tensors)))
    ids = torch.randint(10, 4000, (1, 128), generator=torch.Generator().manual_seed(5))
    trunk = trained.trunk(ids, None, rows(1, 128))
    expected = reference.full(ids)[0]
    assert (trained.logits(trunk.hidden) - expected).abs().max() < LOGIT_TOLERANCE
    batch = Batch(ids.flatten(), (Span(0, 128, 0, 0, ()),))
    expected = reference.draft(trunk.hidden, ids.roll(-1, 1).flatten(), batch, None)[:-1]
    found = trained.drafts(trunk, rows(1, 128), 1)[0].hidden[:-1]
    assert (found - expected).abs().max() < LOGIT_TOLERANCE


@torch.no_grad()
def test_selection_binds_and_dense_attention_differs():
    trained, _ = both()
    ids = token_ids(2)
    sparse, dense = (trained.trunk(ids, None, rows(2, dense=flag)) for flag in (0.0, 1.0))
    early = (sparse.hidden - dense.hidden).view(2, T, -1)[:, :64].abs().max()
    late = (sparse.hidden - dense.hidden).view(2, T, -1)[:, 70:].abs().max()
    assert early < 1e-5
    assert late > 1e-2
    assert sparse.attended[0].kept < 0.98
    assert dense.attended[0].kept == pytest.approx(1.0, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("slices", [1, 2])
def test_pictures_equal_those_of_the_network(slices):
    trained, reference = both()
    ids = token_ids(2)
    per_slice = 4 * 6
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(
        0, 255, (2, 2 * slices, 112, 168, 3), dtype=torch.uint8, generator=generator
    )
    ids[:, 5 : 5 + per_slice * slices] = IMAGE
    patches, _ = patchify(pixels.unflatten(1, (-1, 2)).flatten(0, 1), CONFIG.vision)
    features = reference.vision(patches.flatten(0, 1), [(1, 8, 12)] * (2 * slices))
    places = (ids == IMAGE).flatten().nonzero().flatten()
    expected = reference.full(ids, (places, features))
    found = trained.logits(trained.trunk(ids, pixels, rows(2)).hidden).view_as(expected)
    assert (found - expected).abs().max() < LOGIT_TOLERANCE


@torch.no_grad()
def test_first_drafts_equal_those_of_the_network():
    trained, reference = both()
    ids = token_ids(2)
    trunk = trained.trunk(ids, None, rows(2))
    found = trained.logits(trained.drafts(trunk, rows(2), 1)[0].hidden)
    spans = tuple(Span(b * T, (b + 1) * T, 0, b, ()) for b in range(2))
    batch = Batch(ids.flatten(), spans)
    following = ids.roll(-1, 1).flatten()
    expected = reference.logits(reference.draft(trunk.hidden, following, batch, None))
    known = torch.arange(2 * T) % T < T - 1  # the last place has no next token
    assert (found - expected)[known].abs().max() < LOGIT_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("at", [50, 58])  # one chain within a pool, one across its end
def test_chained_drafts_equal_a_draft_of_a_draft(at):
    """The chain from one place: true hidden states up to it, drafts after it."""
    trained, reference = both()
    ids = token_ids(1, 64)
    trunk = trained.trunk(ids, None, rows(1, 64))
    found = trained.drafts(trunk, rows(1, 64), 3)
    hidden = trunk.hidden[: at + 1]
    for depth in range(3):
        n = at + 1 + depth
        batch = Batch(ids[0, :n], (Span(0, n, 0, 0, ()),))
        drafted = reference.draft(hidden, ids[0, 1 : n + 1], batch, None)[-1]
        assert (found[depth].hidden[n - 1] - drafted).abs().max() < LOGIT_TOLERANCE
        hidden = torch.cat([hidden, drafted[None]])


def test_router_bias_is_held_where_the_release_holds_it_and_decides():
    params = initial(CONFIG, 0)
    biases = {name: value for name, value in params.items() if "correction_bias" in name}
    assert len(biases) == 3  # two layers with experts, and MTP
    assert all(torch.equal(b, torch.full_like(b, ROUTER_BIAS_CENTRE)) for b in biases.values())
    for name in biases:
        params[name][0] += 1.0
    network = TrainingNetwork(context(CONFIG, params))
    trunk = network.trunk(token_ids(1, 64), None, rows(1, 64))
    assert all(load[0] == 64 for load in trunk.loads.values())


def test_padding_counts_in_no_load_and_no_loss():
    network = TrainingNetwork(context(CONFIG, rough_parameters(CONFIG)))
    ids, weights = token_ids(2, 64), torch.ones(2, 64)
    weights[:, 40:] = -1
    changed = ids.clone()
    changed[:, 40:] = 7
    # The index loss of the last token sees the next one, here padding, through the draft's input.
    recipe = Recipe(index_weight=0)
    results = [
        objective(network, (i, weights, None), torch.zeros(()), 3, recipe) for i in (ids, changed)
    ]
    assert float(results[0].total) == pytest.approx(float(results[1].total), rel=1e-5)
    assert [int(load.sum()) for load in results[0].loads.values()] == [160, 160, 480]


def test_index_loss_alone_reaches_the_indexer():
    params = {n: p.requires_grad_() for n, p in rough_parameters(CONFIG).items()}
    network = TrainingNetwork(context(CONFIG, params))
    batch = (token_ids(1, 96), torch.ones(1, 96), None)
    for weight, expected in ((0.0, False), (0.5, True)):
        recipe = Recipe(index_weight=weight)
        total = objective(network, batch, torch.zeros(()), 3, recipe).total
        names = [n for n in params if ".indexer." in n and n.endswith("wq_b.weight")]
        grads = torch.autograd.grad(total, [params[n] for n in names], allow_unused=True)
        assert len(names) == 2
        assert [g is not None and bool(g.abs().sum() > 0) for g in grads] == [expected] * 2


def test_every_parameter_has_a_gradient():
    params = {
        n: p.requires_grad_("bias" not in n or "correction" not in n)
        for n, p in rough_parameters(CONFIG).items()
    }
    network = TrainingNetwork(context(CONFIG, params))
    ids = token_ids(2, 64)
    ids[:, 4:20] = IMAGE
    pixels = torch.randint(0, 255, (2, 2, 112, 112, 3), dtype=torch.uint8)
    result = objective(network, (ids, torch.ones(2, 64), pixels), torch.zeros(()), 3, Recipe())
    result.total.backward()
    without = [
        n for n, p in params.items() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert without == []
    assert result.figures.shape == (len(figure_names(1)),)


def test_sinkhorn_and_its_backward_equal_autograd_of_the_reference():
    logits = torch.randn(7, 4, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, 4, 4, dtype=torch.float64)
    expected = sinkhorn_reference(logits, 20, 1e-6)
    (expected_grad,) = torch.autograd.grad(expected, logits, grad)
    found = sinkhorn(logits, 20, 1e-6)
    (found_grad,) = torch.autograd.grad(found, logits, grad)
    assert torch.allclose(found, expected, atol=1e-14)
    assert torch.allclose(found_grad, expected_grad, atol=1e-12)


def test_unit_lower_inverse_and_its_gradient():
    lower = torch.tril(torch.randn(2, 32, 32) * 0.3, -1)
    product = unit_lower_inverse(lower) @ (torch.eye(32) + lower)
    assert (product - torch.eye(32)).abs().max() < 1e-4

    def inverse(entries):
        return unit_lower_inverse(torch.tril(entries.view(1, 8, 8), -1))

    small = (torch.randn(64, dtype=torch.float64) * 0.3).requires_grad_()
    assert gradcheck(inverse, (small,))


def test_released_names_and_back():
    config = tiny_config()
    params = initial(config, 0)
    again = stacked(released(params))
    assert again.keys() == params.keys()
    assert all(torch.equal(again[name], params[name]) for name in params)


def test_starting_values_depend_on_the_seed_and_the_name():
    one, same, other = (initial(CONFIG, seed) for seed in (0, 0, 1))
    name = "lm_head.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_nano_has_the_size_it_claims():
    from emberbox.model.config import Glm5NextConfig

    config = Glm5NextConfig.from_dict(config_json())
    assert sum(t.numel() for t in initial(config, 0).values()) == 11_790_524


def test_pointwise_functions_trace_without_a_break():
    params = rough_parameters(CONFIG)
    ids, weights = token_ids(1, 64), torch.ones(1, 64)
    totals = []
    for fused in (Pointwise(), Pointwise.compiled(backend="eager")):
        ctx = context(CONFIG, params)
        network = TrainingNetwork(type(ctx)(ctx.config, ctx.params, fused, ctx.dtype))
        result = objective(network, (ids, weights, None), torch.zeros(()), 3, Recipe())
        totals.append(float(result.total))
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
