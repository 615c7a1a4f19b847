"""Identities that hold for any shape: two orders of one sum, a commit after a verify."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.ops import conv_step, hyper_mix, kda_chunk, kda_step, kda_verify, mla_attention
from emberbox.ops.hyper_mix.reference import sinkhorn
from emberbox.ops.index_scores.reference import index_scores
from emberbox.ops.index_select.reference import index_select
from emberbox.ops.inputs import Random
from emberbox.ops.kda_commit.reference import kda_commit
from emberbox.ops.numerics import relative_error
from emberbox.ops.route_topk.reference import route_topk
from emberbox.ops.short_conv.reference import short_conv
from emberbox.ops.table import OPS

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


@given(seed=seeds, B=st.integers(1, 6))
def test_a_step_of_several_sequences_equals_each_alone(seed, B):
    x = kda_step.make_inputs(B, 2, 8, dtype=torch.float32, seed=seed)
    states, slots = x.pop("states"), x.pop("slots")
    for function in (kda_step.OP.reference, kda_step.OP.load("cpu")):
        changed = states.clone()
        out = function(**x, states=changed, slots=slots)
        for b, slot in enumerate(slots.tolist()):
            own = (value[b : b + 1] for value in (*x["qkv"], x["gate"], x["beta"]))
            wanted, state = kda_chunk.OP.reference(*own, states[slot])
            assert relative_error(out[b : b + 1], wanted) < 5e-6
            assert relative_error(changed[slot], state) < 5e-6
        others = [n for n in range(len(states)) if n not in slots.tolist()]
        assert torch.equal(changed[others], states[others])


@given(seed=seeds, B=st.integers(1, 6), T=st.integers(1, 5))
def test_convolution_token_by_token_equals_the_whole(seed, B, T):
    r = Random(seed, torch.float32)
    x, weight, history = r.normal(T, B, 5), r.normal(5, 4), r.normal(B, 3, 5)
    for function in (conv_step.OP.reference, conv_step.OP.load("cpu")):
        changed, slots = history.clone(), torch.arange(B)
        steps = torch.stack([function(token, weight, changed, slots) for token in x])
        for b in range(B):
            assert relative_error(steps[:, b], short_conv(x[:, b], weight, history[b])) < 2e-6
            assert torch.equal(changed[b], torch.cat([history[b], x[:, b]])[-3:])


@given(seed=seeds, T=st.sampled_from([1, 2, 5]), S=st.sampled_from([3, 4]))
def test_coefficients_hold_for_steep_logits(seed, T, S):
    """The model's logits reach 20: 20 iterations do not converge there, so each of them counts."""
    x = hyper_mix.make_inputs(T, S, 9, dtype=torch.float32, seed=seed)
    x["scale"] = x["scale"] * 12
    exact = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in x.items()}
    wanted = hyper_mix.OP.reference(**exact)
    for a, e, r in zip(
        hyper_mix.OP.load("cpu")(**x), wanted, hyper_mix.OP.reference(**x), strict=True
    ):
        assert relative_error(a, e) <= max(5e-6, 2 * relative_error(r, e))


@pytest.mark.parametrize(
    "name", ["rms_norm", "hyper_mix", "kda_inputs", "route_topk", "index_select"]
)
def test_kernels_on_numpy_views_keep_gradients(name):
    op = OPS[name]
    inputs = op.make_inputs(**op.cases[-1], dtype=torch.float32)
    leaves = {n: v.requires_grad_() for n, v in inputs.items() if is_float(v)}
    results = op.load("cpu")(**inputs)
    results = results if isinstance(results, tuple) else (results,)
    wanted = op.reference(**inputs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert leaves
    assert [r.requires_grad for r in results] == [w.requires_grad for w in wanted]


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


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


@given(seed=seeds, P=st.integers(1, 40), topk=st.sampled_from([4, 8, 32]), big=st.booleans())
def test_of_equal_scores_the_earlier_pools_are_chosen(seed, P, topk, big):
    generator = torch.Generator().manual_seed(seed)
    T = 2000 if big else 3  # more than NumPy views take
    scores = torch.randint(-1, 2, (T, P), generator=generator).float() * -0.0
    scores += torch.randint(0, 2, (T, P), generator=generator)
    positions = torch.randint(0, 4 * P, (T,), generator=generator)
    for select in (index_select, OPS["index_select"].load("cpu")):
        chosen = select(scores, positions, 4, topk)
        for t in range(0, T, 97):
            row, complete = scores[t].tolist(), (int(positions[t]) + 1) // 4
            ranked = sorted(range(complete), key=lambda p, row=row: (-row[p], p))[: topk // 4]
            tail = range(4 * complete, int(positions[t]) + 1)
            wanted = sorted([4 * p + i for p in ranked for i in range(4)] + [*tail])
            assert sorted(i for i in chosen[t].tolist() if i >= 0) == wanted


@pytest.mark.parametrize("P", [0, 5])
def test_no_query_chooses_nothing(P):
    scores, positions = torch.zeros(0, P), torch.zeros(0, dtype=torch.int64)
    for select in (index_select, OPS["index_select"].load("cpu")):
        assert select(scores, positions, 4, 16).shape == (0, min(4, P) * 4 + 3)


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
