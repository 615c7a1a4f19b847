"""Tokens weighed by what they decide: gradients, moments made of them, and the whole way."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from emberbox.compress import pipeline
from emberbox.compress.encode import Encoder
from emberbox.compress.hessian import HessianSum
from emberbox.compress.output_weights import (
    Listener,
    OutputWeights,
    WeightedSum,
    fisher_draw,
    output_weights,
    product_of,
    pull_back,
    row_bytes,
    tempered,
)
from emberbox.compress.pipeline import CompressOptions, compress, prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.compress.source import Source
from emberbox.compress.walk import Walk
from emberbox.errors import MemoryRefused, OpError, SettingsError
from emberbox.model.batch import Batch, Span
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable
from emberbox.store.checkpoint import open_checkpoint
from tests.compress.test_pipeline import (
    COLS,
    LAYER,
    ROWS,
    nano_inputs,
    network_of,
    rows_as_batch,
    tensors_of,
)
from tests.compress.test_pipeline import OPTIONS as OPTIONS_OF_PIPELINE
from tests.helpers.nano import NANO
from tests.helpers.quantising import normal
from tests.helpers.quick_search import quick_search

CPU = torch.device("cpu")
OPTIONS = CompressOptions(rows=2, cols=37)
RULES = """
layout = "exllamav3"
expert_moments = "routed"
[[rule]]
match = ["**.layers.[03].self_attn.[qkvo]_proj", "**.layers.3.self_attn.indexer.wq_b"]
part = "trunk"
format = "exl3"
bits = 2
[[rule]]
match = ["**.layers.2.mlp.shared_experts.*", "**.layers.3.mlp.experts.*.*"]
format = "exl3"
bits = 2
"""
WEIGHTED = 'output_weights = "gradient"\n' + RULES


def prepared_for(text, options=OPTIONS):
    return prepare(NANO, parse_recipe(text, "mine"), options)


def weights_of(prepared):
    source = Source(prepared.checkpoint, prepared.config)
    return output_weights(source, prepared.plan, prepared.calibration.token_ids, CPU)


@pytest.fixture(scope="module")
def nano():
    """(config, parameters in float64)"""
    checkpoint = open_checkpoint(NANO)
    config = Glm5NextConfig.from_dict(checkpoint.config)
    found = load_parameters(
        checkpoint, assign(config, checkpoint.tensors), device="cpu", dtype=torch.float32
    )
    return config, {name: value.double() for name, value in found.items()}


def nudged(ops, weight, token, by):
    """`ops` for C rows of 7 tokens, the product with `weight` (or the sum of experts with it) off
    in channel c of `token` in row c."""

    def off(out, w):
        if w is not weight:
            return out
        channels = torch.arange(out.shape[1])
        out[7 * channels + token, channels] += by
        return out

    return replace(
        ops,
        linear=lambda x, w, bias=None: off(ops.linear(x, w, bias), w),
        moe_experts=lambda x, c, s, p, limit: off(ops.moe_experts(x, c, s, p, limit), p[0][0]),
    )


@pytest.mark.parametrize(
    "name",
    [
        "2.self_attn.o_proj",
        "3.self_attn.q_b_proj",
        "5.mlp.shared_experts.down_proj",
        "4.mlp.experts.0.gate_proj",
    ],
)
def test_norms_are_those_of_finite_differences(nano, name):
    config, params = nano
    ids, token = torch.tensor([5, 77, 300, 4, 1200, 9, 42]), 3
    product, weight = product_of(LAYER + name), params[f"{LAYER}{name}.weight"]
    listener = Listener(params, [product], 7, CPU)
    pull_back(Network(config, params, listener.ops), ids, seed=8, num_draws=1)
    found = listener.totals[product][token]

    channels = 256 if "q_b" in name else 128
    spans = tuple(Span(7 * c, 7 * c + 7, 0, c, ()) for c in range(channels))
    batch = Batch(ids.repeat(channels), spans)

    def logits(by):
        network = Network(config, params, nudged(OpTable.reference(), weight, token, by))
        return network.logits(network.forward(batch, None)).view(channels, 7, -1)

    low, high = logits(-1e-6), logits(1e-6)
    towards = fisher_draw(low[0].softmax(-1), torch.Generator().manual_seed(8))
    slopes = (towards * (high - low)).sum((1, 2)) / 2e-6
    torch.testing.assert_close(found, slopes.square().sum().float(), rtol=1e-3, atol=0)
    assert found > 0


def test_draws_have_the_covariance_of_labels():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    draws = fisher_draw(p.expand(100_000, 5), torch.Generator().manual_seed(1))
    torch.testing.assert_close(draws.mean(0), torch.zeros(5).double(), rtol=0, atol=0.01)
    covariance = draws.T @ draws / len(draws)
    torch.testing.assert_close(covariance, p.diag() - p.outer(p), rtol=0, atol=0.01)


def test_weights_of_one_give_the_same_hessian_to_the_bit():
    x, plain = normal(10, 4), HessianSum(4)
    plain.add(x)
    ones = WeightedSum(4, "cpu", torch.ones(10))
    ones.add(x[:3].view(1, 3, 4))
    ones.add(x[3:])
    parts = HessianSum(4)
    parts.add(x[:3])
    parts.add(x[3:])
    assert torch.equal(ones.mean().matrix, parts.mean().matrix)
    assert ones.num_rows == plain.num_rows == 10


def test_rows_are_weighed_in_the_order_of_the_text():
    x, weights = normal(10, 4), torch.arange(10) / 4.5
    total = WeightedSum(4, "cpu", weights)
    total.add(x[:7])
    total.add(x[7:])
    expected = torch.einsum("n,ni,nj->ij", weights.double(), x.double(), x.double()) / 10
    torch.testing.assert_close(total.mean().matrix, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(OpError, match="11 rows, but weights of 10 tokens"):
        total.add(x[:1])


def test_weights_have_mean_one_and_no_token_drowns_the_others():
    total = torch.arange(1, 1001).float()
    expected = total.clone()
    total[[5, 70, 990]] = torch.tensor([1e9, 1e20, torch.finfo(torch.float32).max])
    expected[[5, 70, 990]] = 993  # ten of a thousand are clipped to the next
    expected[992:] = 993
    torch.testing.assert_close(tempered(total, 1.0), expected / expected.mean())
    soft = tempered(torch.tensor([1.0, 4.0, 16.0]), 0.5)
    torch.testing.assert_close(soft, torch.tensor([1.0, 2.0, 4.0]) * 3 / 7)
    assert not tempered(torch.tensor([0.0] * 199 + [1.0]), 1.0).any()


def test_products_share_weights_as_they_share_inputs():
    assert product_of(f"{LAYER}1.self_attn.qkv_proj") == product_of(f"{LAYER}1.self_attn.q_proj")
    assert product_of(f"{LAYER}3.mlp.experts.7.up_proj") == f"{LAYER}3.mlp.experts"
    shared = product_of(f"{LAYER}3.mlp.shared_experts.up_proj")
    assert shared == f"{LAYER}3.mlp.shared_experts.gate_up"


def test_weights_are_of_what_is_searched_and_decides_something():
    found = weights_of(prepared_for(WEIGHTED))
    assert found.by_product.keys() == {
        f"{LAYER}0.self_attn.qkv",
        f"{LAYER}0.self_attn.o_proj",
        f"{LAYER}3.self_attn.o_proj",
        f"{LAYER}2.mlp.shared_experts.gate_up",
        f"{LAYER}2.mlp.shared_experts.down_proj",
        f"{LAYER}3.mlp.experts",
    }  # not the indexer: a choice has no gradient
    for weights in found.by_product.values():
        assert weights.shape == (74,)
        assert float(weights.mean()) == pytest.approx(1, rel=1e-5)
        assert float(weights.min()) < 0.5
        assert float(weights[:37].sum()) != pytest.approx(float(weights[37:].sum()))
    again = weights_of(prepared_for(WEIGHTED))
    assert all(torch.equal(again.by_product[n], w) for n, w in found.by_product.items())
    assert weights_of(prepared_for(RULES)) is None


EARLY = f"""
expert_moments = "routed"
shrink_tokens = 50
allow_mixed_experts = true
[[rule]]
match = ["{LAYER}1.self_attn.o_proj", "{LAYER}1.mlp.experts.3.gate_proj", "lm_head"]
format = "exl3"
bits = 2
"""


def test_moments_weigh_each_token_where_it_is():
    prepared = prepared_for(EARLY, OPTIONS_OF_PIPELINE)
    config, seen = prepared.config.text, {}
    names = ("self_attn.o_proj", "mlp.experts", "lm_head")
    names = [name if name == "lm_head" else f"{LAYER}1.{name}" for name in names]
    drawn = torch.Generator().manual_seed(3)
    weights = {name: torch.rand(ROWS * COLS, generator=drawn) * 2 for name in names}

    class Watched(Encoder):
        def __call__(self, items, hessian, weights=MappingProxyType({})):
            seen.update({i.name: hessian(i) for i in items if i.target.format == "exl3"})
            return iter(())

    source = Source(prepared.checkpoint, prepared.config)
    encoder = Watched(source, quick_search, CPU, 1 << 30)
    walk = Walk(encoder, prepared.calibration.token_ids, 50, OutputWeights(weights))
    walk.begin()
    units = prepared.plan.groups()
    for layer in range(config.num_hidden_layers):
        list(walk.layer(layer, units[f"layer-{layer:03d}"]))
    list(walk.head(units["head"]))

    o_proj, expert = f"{LAYER}1.self_attn.o_proj", f"{LAYER}1.mlp.experts.3.gate_proj"
    hidden = network_of(NANO).forward(rows_as_batch(prepared.calibration.token_ids), None).double()
    for name, x in ((o_proj, nano_inputs(prepared, o_proj)[1]), ("lm_head", hidden)):
        expected = (x * weights[name].double()[:, None]).T @ x / len(x)
        torch.testing.assert_close(seen[name].matrix, expected, atol=1e-4, rtol=1e-3)
    params, x = nano_inputs(prepared, f"{LAYER}1.mlp.shared_experts.gate_proj")
    own = weights[f"{LAYER}1.mlp.experts"].double()
    scores = torch.sigmoid(x @ params[f"{LAYER}1.mlp.gate.weight"].double().T)
    biased = scores + params[f"{LAYER}1.mlp.gate.e_score_correction_bias"].double()
    kept = scores * torch.zeros_like(scores).scatter_(1, biased.topk(4).indices, 1)
    share = (kept / kept.sum(1, keepdim=True))[:, 3]
    mass, count = own * share.square(), int((share > 0).sum())
    mine = (x * mass[:, None]).T @ x / mass.sum()
    every = (x * own[:, None]).T @ x / len(x)
    expected = (count * mine + 50 * every) / (count + 50)
    torch.testing.assert_close(seen[expert].matrix, expected, atol=1e-4, rtol=1e-3)
    assert count > 10


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder without output weights, folder with them)"""
    folder = tmp_path_factory.mktemp("weighted")
    for name, text in (("plain", RULES), ("weighted", WEIGHTED)):
        compress(prepared_for(text), folder / name, quick_search)
    return folder / "plain", folder / "weighted"


def test_the_whole_way_has_the_same_bytes_of_another_content(made):
    plain, weighted = (tensors_of(folder) for folder in made)
    assert {n: len(d) for n, d in plain.items()} == {n: len(d) for n, d in weighted.items()}
    changed = {name.rpartition(".")[0] for name in plain if plain[name] != weighted[name]}
    assert {f"{LAYER}0.self_attn.qkv_proj", f"{LAYER}3.mlp.experts.9.down_proj"} <= changed
    assert {f"{LAYER}3.mlp.experts.9.up_proj", f"{LAYER}2.mlp.shared_experts.up_proj"} <= changed


@pytest.mark.parametrize("moments", ["all", "routed"])
def test_weights_of_one_make_the_same_folder(monkeypatch, tmp_path, moments):
    rules = RULES.replace('"routed"', f'"{moments}"')
    compress(prepared_for(rules), tmp_path / "plain", quick_search)

    def ones(_source, _plan, token_ids, _device):
        every = torch.ones(token_ids.numel())
        products = {product_of(item.name) for item in prepared_for(rules).plan.items}
        return OutputWeights(dict.fromkeys(products, every))

    monkeypatch.setattr(pipeline, "output_weights", ones)
    compress(prepared_for(rules), tmp_path / "ones", quick_search)
    assert tensors_of(tmp_path / "ones") == tensors_of(tmp_path / "plain")


def test_a_conversion_that_stops_goes_on_to_the_same_bytes(made, tmp_path):
    def stop(progress):
        if progress.unit == "layer-003":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(prepared_for(WEIGHTED), tmp_path / "weighted", quick_search, stop)
    options = replace(OPTIONS, resume=True)
    compress(prepared_for(WEIGHTED, options), tmp_path / "weighted", quick_search)
    assert tensors_of(tmp_path / "weighted") == tensors_of(made[1])


def test_the_result_knows_whether_tokens_were_weighed():
    hows = [
        prepared_for(text).how for text in (RULES, WEIGHTED, WEIGHTED.replace("gradient", "root"))
    ]
    assert len(set(hows)) == 3


def test_what_the_recipe_says():
    assert parse_recipe(RULES, "mine").output_power is None
    assert parse_recipe('output_weights = "none"\n' + RULES, "mine").output_power is None
    assert parse_recipe(WEIGHTED, "mine").output_power == 1
    assert parse_recipe('output_weights = "root"\n' + RULES, "mine").output_power == 0.5
    with pytest.raises(SettingsError) as caught:
        parse_recipe('output_weights = "gradents"\n' + RULES, "mine")
    assert "output_weights is 'gradents', expected one of none, gradient, root" in str(
        caught.value.message
    )


@pytest.mark.parametrize("cols", [33, 160])
def test_the_plan_bounds_what_a_row_keeps_for_its_way_back(nano, cols):
    config, wide = nano
    params = {name: value.float() for name, value in wide.items()}
    own = {value.untyped_storage().data_ptr() for value in params.values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    network = Network(config, params, Listener(params, [], cols, CPU).ops)
    network.embedding = network.embedding.detach().requires_grad_()
    own.add(network.embedding.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = Batch(torch.arange(cols), (Span(0, cols, 0, 0, ()),))
        logits = network.logits(network.forward(batch, None))
    assert logits.requires_grad
    found = sum(kept.values())
    assert found < row_bytes(config.text, cols, is_gpu=False) < 1.5 * found
    assert row_bytes(config.text, cols, is_gpu=True) > row_bytes(config.text, cols, is_gpu=False)


def test_a_network_that_does_not_fit_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    assert prepared_for(RULES).weighing_bytes == 0
    monkeypatch.setattr(pipeline, "weighing_bytes", lambda *_: 1 << 60)
    with pytest.raises(MemoryRefused, match="output weights take"):
        compress(prepared_for(WEIGHTED), tmp_path / "never", quick_search)
    assert not (tmp_path / "never").exists()
