"""The small models themselves: quiet enough to compare, rich enough that a mistake shows."""

import pytest
import torch
from transformers import DynamicCache

from tests.oracle import checkpoints
from tests.oracle.harness import difference

LENGTH = 139


def kl(p, q):
    """KL(p, q) of logits, the largest over positions."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


def cached(oracle, ids, sizes):
    cache = DynamicCache(config=oracle.model.config.text_config)
    pieces = ids.split(sizes)
    runs = [oracle.model(input_ids=p[None], cache=cache, use_cache=True) for p in pieces]
    return torch.cat([run.logits[0] for run in runs])


@pytest.mark.parametrize("sizes", [[110] + [1] * 29, [37, 37, 37, 28]], ids=["decode", "pieces"])
def test_transformers_agrees_with_itself(oracle, sizes):
    ids = oracle.token_ids(LENGTH)
    error = difference(cached(oracle, ids, sizes), oracle.logits(ids))
    assert 0 < error < oracle.tolerance / 2


def test_sparse_attention_differs_from_dense(oracle, monkeypatch):
    ids = oracle.token_ids(LENGTH)
    sparse = oracle.logits(ids)
    for layer in checkpoints.SPARSE_LAYERS:
        indexer = oracle.model.model.language_model.layers[layer].self_attn.indexer
        monkeypatch.setattr(indexer, "index_topk", 1024)
    dense = oracle.model(input_ids=ids[None]).logits[0]
    assert difference(dense[:35], sparse[:35]) < oracle.tolerance  # all is selected up to here
    assert kl(sparse, dense) > 0.05


def test_embeddings_lie_below_the_epsilon_of_the_stream_norm(oracle):
    if oracle.weights == "sharp":
        rms = oracle.model.get_input_embeddings().weight.pow(2).mean().sqrt()
        assert 0.5 < float(rms) / oracle.model.config.text_config.rms_norm_eps**0.5 < 1.0


def test_every_kind_of_feed_forward_reaches_the_clamp_on_all_sides(oracle):
    limit = checkpoints.TEXT["swiglu_limit"]
    pairs = {"dense": [], "shared": [], "routed": []}
    hooks = []
    for layer in oracle.model.model.language_model.layers:
        dense = not hasattr(layer.mlp, "experts")
        linears = layer.mlp if dense else layer.mlp.shared_experts
        kind = "dense" if dense else "shared"
        for place, module in ((0, linears.gate_proj), (1, linears.up_proj)):
            keep = pairs[kind]
            hooks.append(
                module.register_forward_hook(lambda m, x, y, k=keep, p=place: k.append((p, y)))
            )
    original = type(oracle.model.model.language_model.layers[-1].mlp.experts)._apply_gate

    def apply_gate(module, gate_up):
        pairs["routed"] += list(enumerate(gate_up.chunk(2, dim=-1)))
        return original(module, gate_up)

    ids = oracle.token_ids(LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        experts = oracle.model.model.language_model.layers[-1].mlp.experts
        patch.setattr(type(experts), "_apply_gate", apply_gate)
        oracle.model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    for kind, seen in pairs.items():
        gate = torch.cat([y.flatten() for place, y in seen if place == 0])
        up = torch.cat([y.flatten() for place, y in seen if place == 1])
        for beyond in (gate > limit, gate < -limit, up > limit, up < -limit):
            assert float(beyond.float().mean()) > 0.02, kind
