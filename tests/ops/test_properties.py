"""Identities that hold for any shape: two orders of one sum, a commit after a verify."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.ops import kda_chunk, kda_verify, mla_attention
from emberbox.ops.hyper_mix.reference import sinkhorn
from emberbox.ops.index_scores.reference import index_scores
from emberbox.ops.index_select.reference import index_select
from emberbox.ops.kda_commit.reference import kda_commit
from emberbox.ops.numerics import relative_error
from emberbox.ops.route_topk.reference import route_topk

seeds = st.integers(0, 10_000)


@given(seed=seeds, T=st.integers(1, 80), cut=st.integers(0, 80), collinear=st.integers(0, 1))
def test_kda_in_two_pieces_equals_one(seed, T, cut, collinear):
    x = kda_chunk.make_inputs(T, 2, 8, collinear=collinear, dtype=torch.float32, seed=seed)
    chunked = kda_chunk.OP.load("cpu")
    recurrent = kda_chunk.OP.reference
    whole, end = recurrent(**x)
    cut = min(cut, T)
    state, parts = x["state"], []
    for rows in (slice(0, cut), slice(cut, T)):
        piece = {k: v[rows] for k, v in x.items() if k != "state"}
        out, state = chunked(**piece, state=state)
        parts.append(out)
    assert relative_error(torch.cat(parts), whole) < 2e-4
    assert relative_error(state, end) < 2e-4


@given(seed=seeds, T=st.integers(1, 8), accepted=st.integers(0, 8))
def test_commit_after_verify_equals_the_recurrence(seed, T, accepted):
    x = kda_chunk.make_inputs(T, 2, 8, dtype=torch.float32, seed=seed)
    accepted = min(accepted, T)
    before = x["state"].clone()
    out, deltas = kda_verify.OP.reference(**x)
    assert torch.equal(x["state"], before)
    state = kda_commit(x["k"][:accepted], deltas[:accepted], x["gate"][:accepted], before)
    piece = {k: v[:accepted] for k, v in x.items() if k != "state"}
    wanted_out, wanted_state = kda_chunk.OP.reference(**piece, state=before)
    assert torch.equal(out[:accepted], wanted_out)
    assert relative_error(state, wanted_state) < 1e-6


@given(seed=seeds, T=st.integers(1, 9), N=st.integers(1, 40), K=st.integers(1, 40))
def test_absorbed_attention_equals_plain(seed, T, N, K):
    x = mla_attention.make_inputs(T, N, min(K, N), dtype=torch.float32, seed=seed)
    assert relative_error(mla_attention.OP.load("cpu")(**x), mla_attention.OP.reference(**x)) < 1e-5


@given(seed=seeds, start=st.integers(0, 40), T=st.integers(1, 20), topk=st.sampled_from([4, 8, 16]))
def test_selection_is_complete_pools_then_the_tail(seed, start, T, topk):
    generator = torch.Generator().manual_seed(seed)
    num_pools = (start + T) // 4
    scores = torch.randn(T, num_pools, generator=generator)
    chosen = index_select(scores, torch.arange(start, start + T), 4, topk)
    for row, position in zip(chosen.tolist(), range(start, start + T), strict=True):
        tokens = [t for t in row if t >= 0]
        complete = (position + 1) // 4
        tail = list(range(4 * complete, position + 1))
        ranked = scores[position - start, :complete].sort(descending=True).indices.tolist()
        best = sorted(ranked[: topk // 4])
        assert sorted(tokens) == sorted([4 * p + i for p in best for i in range(4)] + tail)
        assert len(set(tokens)) == len(tokens) > 0 or (tokens == [] and complete == 0)


def test_selection_may_leave_out_the_querys_own_pool():
    scores = torch.tensor([[5.0, 4.0, -1.0]])
    chosen = index_select(scores, torch.tensor([11]), 4, 8)
    assert sorted(t for t in chosen[0].tolist() if t >= 0) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_pool_whose_heads_are_all_negative_scores_zero():
    q = torch.tensor([[[1.0, 0.0]]])
    pooled = torch.tensor([[-3.0, 1.0], [-1.0, 2.0], [2.0, 0.0]])
    scores = index_scores(q, pooled, torch.tensor([[-0.5]]))
    assert scores[0, :2].tolist() == [0.0, 0.0]
    assert scores[0, 2] < 0  # head weights may be negative: a matching pool can lose


@given(seed=seeds)
def test_sinkhorn_ends_with_columns(seed):
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(seed)) * 3
    m = sinkhorn(logits, 20, 1e-6)
    assert torch.allclose(m.sum(-2), torch.ones(5, 4), atol=1e-5)
    halves = sinkhorn(logits, 1, 1e-6)
    start = torch.softmax(logits, -1) + 1e-6
    assert torch.allclose(halves, start / (start.sum(-2, keepdim=True) + 1e-6))


def test_router_bias_chooses_and_does_not_weigh():
    x = torch.tensor([[1.0]])
    gate = torch.tensor([[2.0], [1.0], [0.0]])
    experts, weights = route_topk(x, gate, torch.tensor([0.0, 0.0, 10.0]), 2, 2.5)
    scores = torch.sigmoid(torch.tensor([0.0, 2.0]))
    assert experts.tolist() == [[2, 0]]
    assert torch.allclose(weights[0], scores / scores.sum() * 2.5)


def test_router_bias_needs_more_than_bfloat16():
    # A band around 10 resolved to 1e-3 decides the ranking; bfloat16 steps there are 0.0625.
    gate = torch.zeros(3, 1)
    bias = torch.tensor([10.000, 10.002, 10.001])
    chosen, _ = route_topk(torch.ones(1, 1), gate, bias, 1, 1.0)
    assert chosen.item() == 1
    rounded, _ = route_topk(torch.ones(1, 1), gate, bias.bfloat16().float(), 1, 1.0)
    assert rounded.item() != 1
