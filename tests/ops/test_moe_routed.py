"""Routed experts from the logits on: the choice against the router's, the rest against moe_experts.

Without a GPU: the reference, and that a call is nothing but launches.
"""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.check import expected_of, moved
from emberbox.ops.inputs import Random
from emberbox.ops.launch import Program
from emberbox.ops.moe_experts import KERNEL_TOLERANCE, decode_cuda
from emberbox.ops.moe_experts.bank import PlainBank, bank_of, ready_bank
from emberbox.ops.moe_experts.reference import moe_experts
from emberbox.ops.moe_routed import OP, make_inputs
from emberbox.ops.moe_routed import kernel_cuda as kernels
from emberbox.ops.numerics import relative_error
from emberbox.ops.route_topk.reference import chosen, route_topk
from tests.helpers.gpu import gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

SCALING = 2.5


@pytest.fixture
def gpu():
    return gpu_or_skip()


def case(T, E, top, *, H=128, dtype=torch.float32, seed=0):
    """Inputs of the op; experts 256 wide, of several rates and codebooks."""
    inputs = make_inputs(T, E, H, 1, dtype=dtype, seed=seed)
    bias = inputs["bias"] - 10  # float32 and float64 then choose the same
    return inputs | {"bias": bias, "top": top, "projections": bank_of(inputs["projections"])}


def run(inputs):
    here = {name: moved(value, torch.device("cuda")) for name, value in inputs.items()}
    return kernels.moe_routed(**here | {"projections": bank_of(here["projections"])}).cpu()


# -- the reference -------------------------------------------------------------------------------


def test_the_choice_is_the_routers():
    r = Random(1, torch.float32)
    x, gate, bias = r.normal(9, 24), r.normal(33, 24, scale=0.2), 0.5 * r.normal(33)
    experts, weights = chosen(x @ gate.T, bias, 4, SCALING)
    wanted, wanted_weights = route_topk(x, gate, bias, 4, SCALING)
    assert torch.equal(experts, wanted)
    assert torch.allclose(weights, wanted_weights, rtol=1e-6)
    unbiased, _ = chosen(x @ gate.T, torch.zeros(33), 4, SCALING)
    assert not torch.equal(unbiased, experts)


def test_lower_experts_come_first_among_equals():
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, -1.0]])
    experts, weights = chosen(logits, torch.zeros(6), 4, 2.0)
    assert experts.tolist() == [[1, 3, 4, 0]]
    high, low = torch.sigmoid(torch.tensor([1.0, 0.0])).tolist()
    total = 3 * high + low
    expected = torch.tensor([[high, high, high, low]]) * 2.0 / total
    assert torch.allclose(weights, expected, rtol=1e-6)


def test_the_rest_is_moe_experts():
    inputs = make_inputs(5, 7, 24, dtype=torch.float32)
    experts, weights = chosen(inputs["logits"], inputs["bias"], 2, SCALING)
    y = moe_experts(inputs["x"], experts, weights, inputs["projections"], inputs["limit"])
    assert torch.equal(OP.reference(**inputs), y)
    found = kernels.moe_routed(**inputs)  # plain experts of one shape: gathered
    assert isinstance(bank_of(inputs["projections"]), PlainBank)
    assert relative_error(found, y.double()) <= 1e-6


def test_a_bank_of_plain_experts_is_their_only_copy():
    experts = make_inputs(5, 7, 24, dtype=torch.float32)["projections"]
    before = [[weight.clone() for weight in expert] for expert in experts]
    addresses = [weight.data_ptr() for expert in experts for weight in expert]
    bank_of(experts)  # as an op does, which leaves what it is given alone
    assert addresses == [weight.data_ptr() for expert in experts for weight in expert]
    stacked = ready_bank(experts).stacked
    for e, (expert, old) in enumerate(zip(experts, before, strict=True)):
        for whole, weight, value in zip(stacked, expert, old, strict=True):
            assert torch.equal(weight, value)
            assert weight.data_ptr() == whole[e].data_ptr()


def test_plain_experts_are_gathered_in_pieces_of_few_tokens(monkeypatch):
    inputs = make_inputs(5, 7, 24, dtype=torch.float32)
    whole = kernels.moe_routed(**inputs)
    monkeypatch.setattr(kernels, "GATHERED_WEIGHTS", 1)  # one token at a time
    assert relative_error(kernels.moe_routed(**inputs), whole.double()) <= 1e-6


def test_plain_experts_of_two_shapes_are_left_to_the_reference():
    inputs = make_inputs(5, 7, 24, dtype=torch.float32)
    gate, up, down = inputs["projections"][3]
    narrow = (gate[:-1], up[:-1], down[:, :-1])
    projections = (*inputs["projections"][:3], narrow, *inputs["projections"][4:])
    assert bank_of(projections) is projections
    mixed = inputs | {"projections": projections}
    assert torch.equal(kernels.moe_routed(**mixed), OP.reference(**mixed))


# -- what is launched ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("T", "top", "rows"),
    [
        (1, 2, [1]),
        (16, 2, [16]),
        (17, 2, [16, 1]),
        (32, 2, [16, 16]),
        (7, 5, [7]),
        (16, 17, [15, 1]),
    ],
)
def test_tokens_are_taken_by_sixteen_or_fewer(T, top, rows, monkeypatch):
    launched = []
    monkeypatch.setattr(Program, "launch", lambda *args: launched.append(args))
    monkeypatch.setattr(Program, "load", lambda *_: None)
    monkeypatch.setattr(decode_cuda, "num_multiprocessors", lambda device: 132)
    inputs = case(T, 19, top)
    y = kernels.moe_routed(**inputs)
    assert (y.shape, y.dtype) == ((T, 128), torch.float32)
    sorts = [args for _, name, _, args, *_ in launched if name == "sort_and_rotate"]
    downs = [args for _, name, _, args in (call[:4] for call in launched) if name == "down"]
    kinds = len(inputs["projections"].kinds[1])
    assert (len(sorts), len(downs)) == (len(rows), kinds * len(rows))
    at = 0
    for piece, (args, count) in enumerate(zip(sorts, rows, strict=True)):
        assert args[0].data_ptr() == inputs["x"][at:].data_ptr()
        assert args[3].data_ptr() == inputs["logits"][at:].data_ptr()
        assert args[4].data_ptr() == inputs["bias"].data_ptr()
        assert args[9:11] == (count, top)
        assert args[13] == SCALING
        assert downs[kinds * piece][6].data_ptr() == y[at:].data_ptr()
        at += count


def test_what_does_not_fit_is_refused_by_name():
    inputs = case(2, 5, 2)
    with pytest.raises(OpError, match=r"\[2, 4\], \[5\]\], top 2; expected \[T, 128\], \[T, 5\]"):
        kernels.moe_routed(**inputs | {"logits": inputs["logits"][:, :4]})
    for top in (0, 6):
        with pytest.raises(OpError, match=f"top {top}"):
            kernels.moe_routed(**inputs | {"top": top})
    with pytest.raises(OpError, match=r"logits torch\.bfloat16, bias torch\.float32"):
        kernels.moe_routed(**inputs | {"logits": inputs["logits"].bfloat16()})


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 9, 16, 17, 31, 32, 33, 70])
@pytest.mark.parametrize("dtype", KERNEL_TOLERANCE, ids=str)
@pytest.mark.parametrize(("E", "top", "H"), [(19, 4, 128), (7, 7, 384), (33, 8, 512)])
def test_few_tokens_and_many(gpu, T, dtype, E, top, H):
    inputs = case(T, E, top, H=H, dtype=dtype, seed=T)
    expected, _ = expected_of(OP, inputs)
    assert relative_error(run(inputs), expected) <= KERNEL_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("E", [288, decode_cuda.MAX_EXPERTS, decode_cuda.MAX_EXPERTS + 1])
def test_of_many_experts_with_equal_scores_the_lower_ones_are_chosen(gpu, E):
    inputs = case(3, E, 8)
    inputs["logits"] = (2 * inputs["logits"]).round() / 2
    inputs["logits"][1] = 0
    inputs["bias"] = torch.zeros(E)
    expected, _ = expected_of(OP, inputs)
    assert relative_error(run(inputs), expected) <= KERNEL_TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 8, 16, 32])
def test_a_token_gives_the_same_alone_and_among_others(gpu, T):
    inputs = case(T, 11, 4, H=512)
    whole = run(inputs)
    assert torch.equal(run(inputs), whole)
    for t in {0, 1, T // 2, T - 1}:
        one = {name: inputs[name][t : t + 1].contiguous() for name in ("x", "logits")}
        assert torch.equal(run(inputs | one)[0], whole[t]), t


@pytest.mark.gpu
def test_no_tokens(gpu):
    assert run(case(0, 3, 2)).shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5, 11, 16, 32])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, monkeypatch):
    inputs = case(T, 7, 3, H=384)
    expected = run(inputs)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        bank = bank_of(tuple(here["projections"]))
        bank.__dict__["matrices"] = guarded.copy(bank.matrices)
        with monkeypatch.context() as patch:
            guarded.install(patch)
            found = kernels.moe_routed(**here | {"projections": bank})
        torch.cuda.synchronize()
        guarded.check()
        assert torch.equal(found.cpu(), expected)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 11, 32])
def test_a_captured_graph_follows_the_logits(gpu, T):
    inputs = case(T, 33, 4, H=384, dtype=torch.bfloat16)
    here = {name: moved(value, gpu) for name, value in inputs.items()}
    here["projections"] = bank_of(here["projections"])
    kernels.moe_routed(**here)  # builds, loads, takes working memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.moe_routed(**here)
    results = []
    for seed in range(3):
        here["logits"].copy_(Random(seed, torch.float32).normal(T, 33))
        graph.replay()
        torch.cuda.synchronize()
        results.append(found.clone())
        assert torch.equal(found, kernels.moe_routed(**here))
    assert not torch.equal(results[0], results[1])
