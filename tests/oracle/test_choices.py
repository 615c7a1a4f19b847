"""What is chosen: pools by the indexer, experts by the router. Compared as sets."""

from dataclasses import replace

import pytest
import torch

from emberbox.ops.index_scores.reference import index_scores
from emberbox.ops.index_select.reference import index_select
from emberbox.ops.route_topk.reference import route_topk
from emberbox.ops.table import OpTable
from tests.oracle import checkpoints
from tests.oracle.harness import TABLES, Oracle, Sequences, load_network

LENGTH = 139
POOL, TOPK = checkpoints.TEXT["index_kpool"], checkpoints.TEXT["index_topk"]


def sets(rows):
    """One set per row, -1 dropped; no index may stand twice."""
    found = []
    for row in rows.tolist():
        kept = [index for index in row if index >= 0]
        assert len(kept) == len(set(kept))
        found.append(set(kept))
    return found


def recording(ops: OpTable, name: str, log: list) -> OpTable:
    function = getattr(ops, name)

    def recorded(*args):
        log.append((args, function(*args)))
        return log[-1][1]

    return replace(ops, **{name: recorded})


def hooked(model, kind, log):
    """Forward outputs of every module whose class name ends in `kind`."""
    modules = [m for m in model.modules() if type(m).__name__.endswith(kind)]
    return [m.register_forward_hook(lambda m, x, y: log.append(y)) for m in modules]


def outputs(oracle, kind, ids):
    log = []
    hooks = hooked(oracle.model, kind, log)
    oracle.model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    return log


def test_selected_tokens_are_the_same(oracle):
    ids, log = oracle.token_ids(LENGTH), []
    load_network(oracle.folder, recording(OpTable.reference(), "index_select", log)).full(ids[None])
    theirs = outputs(oracle, "TextIndexer", ids)
    assert len(log) == len(theirs) == len(checkpoints.SPARSE_LAYERS)
    for (_, ours), expected in zip(log, theirs, strict=True):
        assert sets(ours) == sets(expected[0])
        own_pool_lost = [t for t, chosen in enumerate(sets(ours)) if t not in chosen]
        assert own_pool_lost  # a query's own pool has to win its place; some lose it
        assert all((t + 1) % POOL == 0 for t in own_pool_lost)


def test_chosen_experts_and_their_weights_are_the_same(oracle):
    ids, log = oracle.token_ids(LENGTH), []
    load_network(oracle.folder, recording(OpTable.reference(), "route_topk", log)).full(ids[None])
    theirs = outputs(oracle, "TopkRouter", ids)
    assert len(log) == len(theirs) == checkpoints.TEXT["mlp_layer_types"].count("sparse")
    for (_, (experts, weights)), (_, their_weights, their_experts) in zip(log, theirs, strict=True):
        assert sets(experts) == sets(their_experts)
        assert torch.allclose(weights.sum(-1), torch.tensor(2.5))
        dense, expected = (torch.zeros(LENGTH, 10) for _ in range(2))
        dense.scatter_(1, experts, weights)
        expected.scatter_(1, their_experts, their_weights)
        assert float((dense - expected).abs().max()) < oracle.tolerance


def test_experts_are_ranked_in_float32_whatever_the_activations():
    """288 biases in a narrow band around 10 and small sigmoids, as released: BF16 resolves 0.03."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1000, 96, generator=g).bfloat16()
    gate = torch.randn(288, 96, generator=g) * 0.02
    bias = 10 + 0.01 * torch.randn(288, generator=g)
    scores = torch.sigmoid(x.double() @ gate.double().T) + bias.double()
    best = scores.sort(-1, descending=True)
    clear = best.values[:, 7] - best.values[:, 8] > 1e-5
    assert int(clear.sum()) > 900
    experts, _ = route_topk(x, gate, bias, 8, 2.5)
    expected = sets(best.indices[:, :8])
    assert [s for s, c in zip(sets(experts), clear, strict=True) if c] == [
        s for s, c in zip(expected, clear, strict=True) if c
    ]


def test_pools_are_ranked_in_float32_whatever_the_activations():
    g = torch.Generator().manual_seed(4)
    q = torch.randn(32, 16, 64, generator=g).bfloat16()
    pooled, weights = (torch.randn(*s, generator=g) for s in ((400, 64), (32, 16)))
    match = torch.einsum("thd,pd->thp", q.double(), pooled.double()) * 64**-0.5
    expected = torch.einsum("thp,th->tp", match.clamp(min=0), weights.double())
    scores = index_scores(q, pooled, weights)
    assert scores.dtype == torch.float32
    assert float((scores - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.fixture(scope="module")
def one_signed(tmp_path_factory):
    """Every head of an indexer gives a token the same weight: half the tokens' are all negative."""
    folder = tmp_path_factory.mktemp("one-signed")
    same = {"indexer.weights_proj": lambda w: w[:1].expand_as(w)}
    checkpoints.write_checkpoint(folder, "sharp", overrides=same)
    return Oracle("sharp", folder)


@pytest.mark.parametrize("sizes", [[LENGTH], [50, 1, 1, 1, 86]], ids=["whole", "pieces"])
def test_negative_scores_are_ranked_and_never_lose_to_what_may_not_be_chosen(one_signed, sizes):
    ids, log = one_signed.token_ids(LENGTH), []
    network = load_network(one_signed.folder, recording(TABLES["cpu"](), "index_select", log))
    one_signed.check(Sequences(network).feed(ids, sizes), ids)
    scores = torch.cat([args[0][:, :8] for args, _ in log])
    assert int((scores < 0).all(-1).sum()) > 50


@pytest.fixture(scope="module")
def all_tied(tmp_path_factory):
    """Indexer queries are zero: every pool of every token scores exactly 0."""
    folder = tmp_path_factory.mktemp("all-tied")
    checkpoints.write_checkpoint(folder, "sharp", overrides={"indexer.wq_b": torch.zeros_like})
    return Oracle("sharp", folder)


@pytest.mark.parametrize("sizes", [[LENGTH], [50, 1, 1, 1, 86]], ids=["whole", "pieces"])
def test_ties_are_broken_by_some_valid_choice(all_tied, sizes):
    ids, log = torch.arange(LENGTH), []
    network = load_network(all_tied.folder, recording(TABLES["cpu"](), "index_select", log))
    logits = Sequences(network).feed(ids, sizes)
    assert logits.isfinite().all()
    all_tied.check(logits[:TOPK], ids)  # up to here there is no choice
    for (scores, positions, *_), chosen in log:
        assert not scores.any()
        for t, tokens in zip(positions.tolist(), sets(chosen), strict=True):
            complete = (t + 1) // POOL
            pools = {token // POOL for token in tokens if token < complete * POOL}
            expected = {POOL * p + i for p in pools for i in range(POOL)}
            assert len(pools) == min(complete, TOPK // POOL)
            assert tokens == expected | set(range(complete * POOL, t + 1))


def test_pools_with_equal_scores_share_the_places_left_over():
    """A pool that no head matches scores exactly 0: after the positive, before the negative."""
    scores = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 1.0, 5.0]])
    chosen = sets(index_select(scores, torch.tensor([23]), 4, 16))[0]  # pool 6 is not complete
    pools = {token // 4 for token in chosen}
    assert {1, 5} < pools
    assert len(pools & {0, 2, 4}) == 2
    assert 3 not in pools
    assert 6 not in pools
