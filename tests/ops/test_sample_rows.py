"""Draws from rows of logits: the reference by hand, kernels token by token, in every odd case."""

import math
import struct

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.launch import STEP_TYPES, Program, arch_of, source
from emberbox.ops.sample_rows import CUTS, OP, Changes, Cuts, make_inputs
from emberbox.ops.sample_rows.kernel_cuda import SOURCE, sample_rows
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

VOCABULARY = 154_880
LAST = 1 - 2**-53
UNIFORMS = (0.0, 0.1, 0.25, 0.5, 0.77, 0.999)
DTYPES = pytest.mark.parametrize("dtype", STEP_TYPES, ids=str)
CUT = (
    Cuts(1.0),
    Cuts(1e-9, 300, 0.77),
    Cuts(5e-324, 7),
    Cuts(100.0, 0, 0.95, 0.3),
    Cuts(0.3, 1000, 0.5),
    Cuts(1.0, 3, 1e-30),
    Cuts(1.0, 0, 0.0),
    Cuts(1.0, 0, 1.0, 1.0),
    Cuts(0.0),
)


@pytest.fixture(scope="module")
def gpu():
    device = gpu_or_skip()
    build_all((source(SOURCE, {"X_TYPE": x}) for x in STEP_TYPES.values()), arch_of(device))
    return device


def moved(changes, device):
    return Changes(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in changes))


def logits_of(kind, size, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed + size)
    x = 3 * torch.randn(rows, size, generator=generator)
    return {
        "normal": x,
        "wide": 30 * x,
        "halves": (2 * x).round() / 2,
        "flat": 1e-7 * x,
        "equal": torch.full_like(x, 1.5),
        "two": (x > 0).float() * 1e-3,
        "few": x.where(torch.arange(size) < 3, torch.tensor(-1e30)),
    }[kind]


# -- without a GPU -------------------------------------------------------------------------------


def test_each_row_has_its_own_uniform_number_and_equal_scores_go_by_id():
    rows = torch.zeros(4, 8)
    assert OP.reference(rows, (0.0, 0.124, 0.125, LAST), Cuts(1.0), Changes()).tolist() == [
        0,
        0,
        1,
        7,
    ]
    assert OP.reference(rows[:0], (), Cuts(1.0), Changes()).tolist() == []


def test_temperature_zero_is_the_first_of_the_best_after_changes():
    rows = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, 0.0, 5.0, 4.0]])
    assert OP.reference(rows, (0.9, 0.9), Cuts(), Changes()).tolist() == [1, 0]
    changes = Changes(
        bias=torch.tensor([0.0, 0.0, 0.5, 0.0]).double(),
        is_seen=torch.tensor([True, False, False, False]),
        repetition=2.0,
        counts=torch.tensor([0.0, 3.0, 0.0, 0.0]).double(),
        presence=0.25,
        frequency=0.125,
        is_banned=torch.tensor([False, False, False, True]),
    )
    # 0.5, 3 - 0.25 - 0.375, 2.5, ban; 2.5, -0.625, 5.5, ban
    assert OP.reference(rows, (0.0, 0.0), Cuts(), changes).tolist() == [2, 2]
    less = changes._replace(counts=torch.tensor([0.0, 1.0, 0.0, 0.0]).double())
    assert OP.reference(rows, (0.0, 0.0), Cuts(), less).tolist() == [1, 2]


def test_a_share_of_nothing_keeps_the_first():
    rows = torch.tensor([[1.0, 1.5, 0.5, 1.5]])
    for top_p in (0.0, 1e-300):
        assert OP.reference(rows, (LAST,), Cuts(1.0, 0, top_p), Changes()).tolist() == [1]
    assert 0.0 in [top_p for _, top_p, _ in CUTS]


def test_a_penalty_is_not_rounded_to_single_precision():
    counts = torch.tensor([1.0, 0.0]).double()
    changes = Changes(counts=counts, presence=0.1)
    rows = torch.tensor([[0.1, 0.0]]).double()
    assert OP.reference(rows, (0.0,), Cuts(), changes).tolist() == [0]  # 0.1 - 0.1 is 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"logits": torch.zeros(1, 2**18)}, "262143"),
        ({"logits": torch.zeros(8)}, r"\[R, V\]"),
        ({"logits": torch.zeros(1, 8, dtype=torch.float64)}, "float64"),
        ({"uniforms": (0.5, 0.5)}, "2 uniform numbers for 1 rows"),
        ({"changes": Changes(bias=torch.zeros(8))}, "bias is not"),
        ({"changes": Changes(counts=torch.zeros(7).double())}, "counts is not"),
        ({"changes": Changes(is_seen=torch.zeros(8))}, "is_seen is not"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(changed, named):
    inputs = {"logits": torch.zeros(1, 8), "uniforms": (0.5,), "cuts": Cuts(1.0)}
    with pytest.raises(OpError, match=named):
        sample_rows(**{**inputs, "changes": Changes(), **changed})


def test_three_launches_draw_and_two_pick_and_numbers_pass_whole(monkeypatch):
    calls = []
    monkeypatch.setattr(Program, "launch", lambda program, *call: calls.append(call))
    logits = torch.zeros(2, 1025, dtype=torch.bfloat16)
    sample_rows(logits, (0.3, 0.7), Cuts(0.8, 5000, 0.9, 0.01), Changes(presence=-0.1))
    assert [(name, grid) for name, grid, _ in calls] == [
        ("score", 2),
        ("weigh", 2),
        ("draw", 2),
    ] * 2
    score, weigh, draw = (arguments for _, _, arguments in calls[3:])
    assert score[0].data_ptr() == logits[1].data_ptr()
    assert [whole(*score[at : at + 2]) for at in (7, 9, 11)] == [1.0, -0.1, 0.0]
    assert [whole(*weigh[at : at + 2]) for at in (2, 4)] == [0.8, 0.01]
    assert draw[4] == 1025
    assert [whole(*draw[at : at + 2]) for at in (5, 7)] == [0.9, 0.7]
    calls.clear()
    sample_rows(logits[:1], (0.3,), Cuts(), Changes())
    assert [(name, grid) for name, grid, _ in calls] == [("score", 2), ("pick", 1)]


def whole(low, high):
    return struct.unpack("<d", struct.pack("<ii", low, high))[0]


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("penalties", [0, 1])
@pytest.mark.parametrize("case", range(len(CUTS)))
def test_a_whole_vocabulary_gives_the_tokens_of_the_reference(gpu, case, penalties, dtype):
    inputs = make_inputs(16, VOCABULARY, case, penalties, dtype=dtype)
    expected = OP.reference(**inputs)
    here = {"logits": inputs["logits"].to(gpu), "changes": moved(inputs["changes"], gpu)}
    found = sample_rows(**{**inputs, **here})
    assert found.tolist() == expected.tolist()
    assert sample_rows(**{**inputs, **here}).tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "wide", "halves", "flat", "equal", "two", "few"])
@pytest.mark.parametrize("size", [1, 2, 255, 257, 1023, 1025, 20_011, VOCABULARY, 200_000])
def test_odd_sizes_ties_and_cuts(gpu, kind, size):
    # The last number of all finds what weighs least, where that is not too little for a kernel.
    uniforms = UNIFORMS if kind == "wide" else (*UNIFORMS, LAST)
    logits = logits_of(kind, size, len(uniforms))
    for cuts in CUT:
        expected = OP.reference(logits, uniforms, cuts, Changes())
        found = sample_rows(logits.to(gpu), uniforms, cuts, Changes())
        assert found.tolist() == expected.tolist(), cuts


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_everywhere", [False, True])
def test_what_is_not_finite_ends_with_some_token(gpu, value, is_everywhere):
    logits = logits_of("normal", 5003)
    logits[0, 77] = value
    if is_everywhere:
        logits[:] = value
    for cuts in CUT:
        token = int(sample_rows(logits.to(gpu), (0.5,), cuts, Changes()))
        assert 0 <= token < 5003
    usual = logits_of("normal", 5003)
    expected = OP.reference(usual, (0.5,), Cuts(1.0), Changes())
    assert torch.equal(sample_rows(usual.to(gpu), (0.5,), Cuts(1.0), Changes()).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 300, 1025, 5003, 40_001])
@DTYPES
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, size, dtype, monkeypatch):
    for fill in FILLS:
        for case in range(len(CUTS)):
            inputs = make_inputs(3, size, case, 1, dtype=dtype)
            expected = OP.reference(**inputs)
            guarded = Guarded(gpu, fill)
            here = {name: guarded.copy(inputs[name]) for name in ("logits", "changes")}
            with monkeypatch.context() as patch:
                guarded.install(patch)
                found = sample_rows(**{**inputs, **here})
            torch.cuda.synchronize()
            guarded.check()
            assert found.tolist() == expected.tolist()


@pytest.mark.gpu
def test_a_captured_graph_gives_what_a_call_gives(gpu):
    cuts = Cuts(0.8, 0, 0.95)
    held = torch.zeros(2, VOCABULARY, device=gpu)
    sample_rows(held, (0.3, 0.6), cuts, Changes())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sample_rows(held, (0.3, 0.6), cuts, Changes())
    for seed in range(3):
        logits = logits_of("normal", VOCABULARY, 2, seed)
        held.copy_(logits)
        graph.replay()
        torch.cuda.synchronize()
        assert found.tolist() == OP.reference(logits, (0.3, 0.6), cuts, Changes()).tolist()
