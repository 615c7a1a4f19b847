"""Routed experts in EXL3 on a GPU, a few tokens and many, against the reference in float64.

Without a GPU: how slots are sorted, and that what a launch asks for is compiled ahead.
"""

import pytest
import torch

from emberbox.ops import ahead
from emberbox.ops import check as checks
from emberbox.ops.check import expected_of
from emberbox.ops.inputs import Random
from emberbox.ops.launch import TYPES, Program, arch_of
from emberbox.ops.linear_exl3 import kernel_cuda as linear_kernels
from emberbox.ops.linear_exl3 import random_weight
from emberbox.ops.linear_exl3.kernel_cuda import CODEBOOKS
from emberbox.ops.moe_experts import OP, decode_cuda, make_inputs, prefill_cuda
from emberbox.ops.moe_experts import kernel_cuda as kernels
from emberbox.ops.moe_experts.bank import ExpertBank, bank_of
from emberbox.ops.numerics import relative_error
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

TOLERANCE = {**OP.kernels["cuda"].tolerance, torch.float16: 2e-3}
TWO_BITS = ((32, "mul1"),)
MIXED = ((32, "mul1"), (48, "mcg"), (40, "mul1"), (64, None), (24, "mul1"))
ROUTED = [(t, 19, 4) for t in range(1, 17)] + [(t, 300, 8) for t in (1, 16, 17)]


def case(T, E, top, *, H=128, W=128, kinds=TWO_BITS, dtype=torch.float32, seed=0):
    """Inputs of the op. kinds: words of a tile and codebook of the experts' matrices in turn."""
    r = Random(seed, dtype)
    shapes = ((W, H), (W, H), (H, W))
    turn = iter(range(3 * E))
    experts = tuple(
        tuple(random_weight(r, shape, *kinds[next(turn) % len(kinds)]) for shape in shapes)
        for _ in range(E)
    )
    chosen = torch.rand(T, E, generator=r.generator).argsort(-1)[:, :top].contiguous()
    return {
        "x": r.normal(T, H, scale=2.0),
        "experts": chosen,
        "weights": r.uniform(T, top, low=0.05),
        "projections": experts,
        "limit": 1.5,
    }


def on_gpu(inputs):
    here = {name: checks.moved(value, torch.device("cuda")) for name, value in inputs.items()}
    return here | {"projections": bank_of(here["projections"])}


def run(inputs):
    return kernels.moe_experts(**on_gpu(inputs)).cpu()


def error_of(inputs):
    expected, _ = expected_of(OP, inputs)
    return relative_error(run(inputs), expected)


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device = gpu_or_skip()
    arch = arch_of(device)
    sources = {}
    for words, book in {*TWO_BITS, *MIXED, (16, "mul1"), (128, "mul1"), (96, "mcg")}:
        kind = words // 8, CODEBOOKS[book or "3inst"]
        types = TYPES.values() if (words, book) in MIXED else [TYPES[torch.float32]]
        for x_type in types:
            made = [ahead.decode(kind, tiles, x_type) for tiles in (1, 2)]
            for source in (*made, ahead.prefill(kind, x_type, arch)):
                sources[str(source)] = source
    build_all(sources.values(), arch)
    return device


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "E", "top"), [(1, 3, 2), (17, 5, 3), (300, 4, 2), (700, 300, 8)])
def test_slots_are_sorted_by_expert_in_tiles_of_at_most_128_rows(T, E, top):
    generator = torch.Generator().manual_seed(T)
    experts = torch.rand(T, E, generator=generator).argsort(-1)[:, :top].contiguous()
    slot_of, tiles = prefill_cuda.sort_slots(experts, E)
    assert slot_of.dtype is tiles.dtype is torch.int32
    assert len(slot_of) % 8 == 0
    held = slot_of[slot_of >= 0].tolist()
    assert sorted(held) == list(range(T * top))
    seen = []
    for expert, first, rows in tiles.tolist():
        if rows == 0:
            continue
        assert first % 8 == 0
        assert 1 <= rows <= 128
        slots = slot_of[first : first + rows]
        assert bool((experts.flatten()[slots.long()] == expert).all())
        seen += slots.tolist()
    assert sorted(seen) == list(range(T * top))
    starts = [first for _, first, rows in tiles.tolist() if rows]
    assert len(set(starts)) == len(starts)


def test_the_shapes_of_sorted_slots_say_nothing_of_the_routing():
    """So that a graph may be captured, and nothing waits for the GPU."""
    even = torch.arange(40).view(20, 2) % 8
    one = torch.tensor([[3, 5]]).repeat(20, 1)
    shapes = [[t.shape for t in prefill_cuda.sort_slots(experts, 8)] for experts in (even, one)]
    assert shapes[0] == shapes[1]


def test_what_a_launch_asks_for_is_compiled_ahead(monkeypatch):
    """bfloat16 experts and products, recorded in place of launched."""
    asked = set()

    def record(program, name, grid, args, shared=0):
        asked.add((program.path, tuple(sorted(program.macros))))

    monkeypatch.setattr(Program, "launch", record)
    monkeypatch.setattr(Program, "load", lambda *_: None)
    for module in (decode_cuda, linear_kernels):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 48)
    for module in (prefill_cuda, linear_kernels):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_121")
    bank = bank_of(make_inputs(1, 5, 128, 1, dtype=torch.bfloat16)["projections"])
    for T in (1, 9, 17):
        inputs = make_inputs(T, 5, 128, 1, dtype=torch.bfloat16) | {"projections": bank}
        kernels.moe_experts(**inputs)
        linear_kernels.linear_exl3(inputs["x"], bank[0][0])
    ready = {(s.path, tuple(sorted(s.macros.items()))) for s in ahead.sources("sm_121")}
    assert asked <= ready
    # Three kinds for few, more and many tokens; one product, for few and many rows the same.
    assert len(asked) == 3 * 3 + 2


def test_other_experts_are_left_to_the_reference():
    """On any device: a bank is what the kernels take, and only that."""
    inputs = make_inputs(3, 4, 128, 1, dtype=torch.float32)
    gate, up, down = inputs["projections"][1]
    mixed = (inputs["projections"][0], (gate.decode(), up, down), *inputs["projections"][2:])
    inputs |= {"projections": mixed}
    assert not isinstance(bank_of(mixed), ExpertBank)
    expected, _ = expected_of(OP, inputs)
    assert relative_error(kernels.moe_experts(**inputs), expected) <= OP.tolerance[torch.float32]


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "E", "top"), ROUTED)
def test_a_few_tokens(gpu, T, E, top):
    assert error_of(case(T, E, top, seed=T)) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 16, 17, 129])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_each_matrix_has_its_own_rate_and_codebook(gpu, T, dtype):
    inputs = case(T, 11, 5, H=384, W=256, kinds=MIXED, dtype=dtype, seed=T)
    assert len({w.parts["trellis"].shape[-1] for e in inputs["projections"] for w in e}) == 5
    assert error_of(inputs) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(16, "mul1"), (96, "mcg"), (128, "mul1")])
@pytest.mark.parametrize("T", [3, 16, 40])
def test_extreme_rates(gpu, kind, T):
    assert error_of(case(T, 5, 3, H=256, W=384, kinds=(kind,))) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "E", "top"), [(700, 300, 8), (700, 2, 2), (257, 5, 1), (300, 19, 17)]
)
def test_many_tokens(gpu, T, E, top):
    assert error_of(case(T, E, top)) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_more_slots_than_the_kernels_for_a_few_tokens_hold(gpu):
    assert error_of(case(16, 19, 17)) <= TOLERANCE[torch.float32]  # 272 slots


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 16, 130])
def test_all_tokens_choose_the_same_experts(gpu, T):
    inputs = case(T, 7, 2, H=256)
    inputs["experts"] = torch.tensor([[6, 2]]).repeat(T, 1)
    assert error_of(inputs) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_no_tokens(gpu):
    assert run(case(0, 3, 2)).shape == (0, 128)


@pytest.mark.gpu
def test_many_tokens_are_taken_in_pieces(gpu, monkeypatch):
    inputs = case(257, 5, 3)
    whole = run(inputs)
    monkeypatch.setattr(kernels, "PREFILL_TOKENS", 100)
    in_pieces = run(inputs)
    assert relative_error(in_pieces, whole.double()) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 13, 300])
def test_two_runs_are_bit_equal(gpu, T):
    inputs = case(T, 11, 4, H=512, W=256, kinds=MIXED)
    assert torch.equal(run(inputs), run(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 8, 16])
def test_a_token_gives_the_same_alone_and_among_others(gpu, T):
    inputs = case(T, 11, 4, H=512, W=256)
    whole = run(inputs)
    for t in range(T):
        one = {n: inputs[n][t : t + 1].contiguous() for n in ("x", "experts", "weights")}
        assert torch.equal(run(inputs | one)[0], whole[t]), t


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5, 8, 11, 16, 17, 150])
@pytest.mark.parametrize("kinds", [TWO_BITS, MIXED], ids=["2 bits", "mixed"])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, kinds, monkeypatch):
    inputs = case(T, 7, 3, H=384, W=256, kinds=kinds)
    expected, results = run(inputs), []
    prepared = {**inputs, "projections": tuple(bank_of(inputs["projections"]))}
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in prepared.items()}
        bank = bank_of(here["projections"])
        bank.__dict__["matrices"] = guarded.copy(bank.matrices)
        with monkeypatch.context() as patch:
            guarded.install(patch)
            patch.setattr(prefill_cuda, "sort_slots", guarded.around(prefill_cuda.sort_slots))
            results.append(kernels.moe_experts(**{**here, "projections": bank}))
        torch.cuda.synchronize()
        guarded.check()
    assert all(torch.equal(result.cpu(), expected) for result in results)
    assert bool(expected.isfinite().all())


def logits_for(T, E, kind):
    """[T, E] and a bias that changes who is chosen. kind "ties": equal numbers side by side."""
    r = Random(T + E, torch.float32)
    logits, bias = r.normal(T, E), 0.5 * r.normal(E)
    if kind == "ties":
        logits, bias = logits.round(), torch.zeros(E)
    return logits, bias


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "E"), [(1, 19), (5, 33), (8, 288), (16, 33)])
@pytest.mark.parametrize("kind", ["biased", "ties"])
def test_experts_chosen_from_logits_are_those_of_the_router(gpu, T, E, kind, monkeypatch):
    top, scaling = 8, 2.5
    logits, bias = logits_for(T, E, kind)
    scores = torch.sigmoid(logits)
    chosen = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top]
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
    inputs = case(T, E, top) | {"experts": chosen.contiguous(), "weights": weights}
    expected, _ = expected_of(OP, inputs)
    guarded = Guarded(gpu, FILLS[0])
    x, given, added = (guarded.copy(value) for value in (inputs["x"], logits, bias))
    bank = on_gpu(inputs)["projections"]
    with monkeypatch.context() as patch:
        guarded.install(patch)
        routing = decode_cuda.Logits(given, added, top, scaling)
        found = decode_cuda.decode(x, bank, inputs["limit"], routing)
    torch.cuda.synchronize()
    guarded.check()
    assert relative_error(found.cpu(), expected) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [3, 40])
def test_what_is_not_a_number_stays_so_and_stays_with_its_token(gpu, T):
    inputs = case(T, 7, 3, H=256)
    whole = run(inputs)
    inputs["x"][1, 5] = float("nan")
    found = run(inputs)
    assert bool(found[1].isnan().all())
    others = [row for row in range(T) if row != 1]
    assert torch.equal(found[others], whole[others])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 12, 90])
def test_a_captured_graph_gives_what_a_call_gives(gpu, T):
    inputs = [on_gpu(case(T, 11, 4, H=256, W=256, kinds=MIXED, seed=seed)) for seed in range(3)]
    bank = inputs[0]["projections"]
    held = {name: inputs[0][name].clone() for name in ("x", "experts", "weights")}
    kernels.moe_experts(**held, projections=bank, limit=1.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = kernels.moe_experts(**held, projections=bank, limit=1.5)
        second = kernels.moe_experts(**(held | {"x": first}), projections=bank, limit=1.5)
    for other in inputs:
        for name, value in held.items():
            value.copy_(other[name])
        graph.replay()
        torch.cuda.synchronize()
        alone = kernels.moe_experts(**held, projections=bank, limit=1.5)
        assert torch.equal(first, alone)
        again = kernels.moe_experts(**(held | {"x": alone}), projections=bank, limit=1.5)
        assert torch.equal(second, again)
