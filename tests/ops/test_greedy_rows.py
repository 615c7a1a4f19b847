"""The argmax of rows: its first index, and what is not finite, by reference and on a GPU."""

import math

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.greedy_rows import OP, kernel_cuda, make_inputs
from emberbox.ops.greedy_rows.kernel_cuda import SOURCE, greedy_rows
from emberbox.ops.launch import STEP_TYPES, Program, arch_of, source
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

SHAPES = [(1, 1), (1, 154_880), (2, 255), (3, 1025), (7, 4096), (32, 154_880), (32, 3)]
DTYPES = pytest.mark.parametrize("dtype", STEP_TYPES, ids=str)


@pytest.fixture(scope="module")
def gpu():
    device = gpu_or_skip()
    build_all((source(SOURCE, {"X_TYPE": x}) for x in STEP_TYPES.values()), arch_of(device))
    return device


def odd_rows(dtype, size=3001):
    """Rows that are not finite, and one of zeros of either sign after a lower number."""
    x = torch.zeros(5, size, dtype=dtype)
    x[0, 5], x[1, size - 1], x[2, 0], x[3, :] = math.nan, math.inf, -math.inf, math.nan
    x[4, 1:] = -0.0
    x[4, 7] = 0.0
    x[4, 0] = -1.0
    return x


# -- without a GPU -------------------------------------------------------------------------------


@DTYPES
def test_the_first_of_equal_maxima_and_what_is_not_finite(dtype):
    best, is_finite = OP.reference(torch.tensor([[-2.0, 3.0, 3.0], [-2.0, -2.0, -3.0]]).to(dtype))
    assert (best.tolist(), is_finite.tolist()) == ([1, 0], [True, True])
    best, is_finite = OP.reference(odd_rows(dtype))
    assert is_finite.tolist() == [False] * 4 + [True]
    assert int(best[4]) == 1


@pytest.mark.parametrize(
    ("logits", "named"),
    [
        (torch.zeros(33, 4), "33"),
        (torch.zeros(4), r"\[R, V\]"),
        (torch.zeros(2, 0), "not empty"),
        (torch.zeros(2, 2, dtype=torch.float64), "float64"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(logits, named):
    with pytest.raises(OpError, match=named):
        greedy_rows(logits)


@pytest.mark.parametrize(("R", "V"), SHAPES)
def test_blocks_fill_a_gpu_and_none_is_without_work(R, V, monkeypatch):
    found = []
    monkeypatch.setattr(Program, "launch", lambda program, *call: found.append(call))
    greedy_rows(torch.zeros(R, V))
    ((name, blocks, (*_, pieces, size)),) = found
    assert (name, blocks, size) == ("greedy", R * pieces, V)
    assert (pieces - 1) * kernel_cuda.THREADS < V
    assert blocks >= 132 or V < R * 132 * kernel_cuda.LEAST_PIECE


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "V"), SHAPES)
@DTYPES
def test_a_gpu_gives_the_first_index_of_the_maximum(gpu, R, V, dtype, monkeypatch):
    logits = make_inputs(R, V, dtype=dtype)["logits"]
    expected = OP.reference(logits)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        with monkeypatch.context() as patch:
            guarded.install(patch)
            found = greedy_rows(guarded.copy(logits))
        torch.cuda.synchronize()
        guarded.check()
        for f, e in zip(found, expected, strict=True):
            assert torch.equal(f.cpu(), e)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("size", [9, 3001, 154_880])
def test_a_gpu_finds_what_is_not_finite(gpu, dtype, size):
    logits = odd_rows(dtype, size)
    best, is_finite = greedy_rows(logits.to(gpu))
    assert is_finite.tolist() == [False] * 4 + [True]
    assert int(best[4]) == 1
    assert all(0 <= i < size for i in best.tolist())


@pytest.mark.gpu
def test_a_captured_graph_gives_what_a_call_gives(gpu):
    held = torch.zeros(8, 154_880, device=gpu)
    greedy_rows(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = greedy_rows(held)
    for seed in range(3):
        logits = make_inputs(8, 154_880, dtype=torch.float32, seed=seed)["logits"]
        held.copy_(logits)
        graph.replay()
        torch.cuda.synchronize()
        for f, e in zip(found, OP.reference(logits), strict=True):
            assert torch.equal(f.cpu(), e)
