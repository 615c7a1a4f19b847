"""Products with small plain matrices: float32 sums at odd sizes, whatever the types.

Without a GPU: that the reference keeps float32, and what is launched.
"""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.inputs import Random
from emberbox.ops.launch import Program, arch_of, source
from emberbox.ops.numerics import relative_error
from emberbox.ops.small_linear import kernel_cuda as kernels
from emberbox.ops.small_linear.reference import small_linear as reference
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

TYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = 2e-6  # float32 sums, in any order
PIECE = 4096  # inputs that a block fetches ahead


def case(T, N, K, types=(torch.bfloat16, torch.bfloat16), seed=0):
    """x, weight."""
    r = Random(seed + T, torch.float32)
    return r.normal(T, K).to(types[0]), r.normal(N, K, scale=K**-0.5).to(types[1])


def run(x, weight):
    return kernels.small_linear(x.cuda(), weight.cuda()).cpu()


def assert_right(x, weight):
    found = run(x, weight)
    assert found.dtype is torch.float32
    assert relative_error(found, x.double() @ weight.double().T) <= TOLERANCE


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel in the cache."""
    device = gpu_or_skip()
    macros = {kernels.macros_of(x, w, rows) for x in TYPES for w in TYPES for rows in (1, 2, 4, 8)}
    build_all([source(kernels.SOURCE, dict(m)) for m in macros], arch_of(device))
    return device


def test_products_and_sums_are_in_float32():
    x, weight = case(3, 5, 1024)
    y = reference(x, weight)
    expected = x.double() @ weight.double().T
    assert y.dtype is torch.float32
    assert relative_error(y, expected) <= TOLERANCE
    assert relative_error(y.bfloat16(), expected) > 100 * TOLERANCE
    assert reference(x.double(), weight.double()).dtype is torch.float64


@pytest.mark.parametrize(
    ("types", "T", "tokens"),
    [
        ((torch.bfloat16, torch.bfloat16), 1, 1),
        ((torch.bfloat16, torch.float32), 3, 4),
        ((torch.bfloat16, torch.float16), 32, 8),
        ((torch.float32, torch.float32), 32, 4),
        ((torch.float32, torch.bfloat16), 5, 8),
    ],
)
def test_two_rows_of_the_weight_are_a_block(types, T, tokens, monkeypatch):
    launched = []
    monkeypatch.setattr(Program, "launch", lambda *args: launched.append(args))
    x, weight = case(T, 33, 136, types)
    y = kernels.small_linear(x, weight)
    ((program, name, grid, args),) = launched
    assert (name, grid) == ("multiply_small", 17)
    numbers = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
    macros = {"X_TYPE": numbers[types[0]], "W_TYPE": numbers[types[1]], "TOKENS": tokens}
    assert dict(program.macros) == macros
    assert args[3:] == (T, 33, 136)
    assert (y.shape, y.dtype) == ((T, 33), torch.float32)


def test_what_does_not_fit_is_refused_by_name():
    x, weight = case(2, 3, 16)
    with pytest.raises(OpError, match="x has 16 channels, the weight 8"):
        kernels.small_linear(x, weight[:, :8])
    with pytest.raises(OpError, match=r"x has 12 channels, the weight 12; .* multiple of 8"):
        kernels.small_linear(*case(2, 3, 12))
    with pytest.raises(OpError, match=r"weight is .* torch\.float64"):
        kernels.small_linear(x, weight.double())
    with pytest.raises(OpError, match=r"x is torch\.float64"):
        kernels.small_linear(x.double(), weight)
    with pytest.raises(OpError, match=r"weight is .* contiguous"):
        kernels.small_linear(x, weight.T.contiguous().T)  # read before the turn: not copied
    shifted = torch.zeros(3 * 16 + 1, dtype=torch.bfloat16)[1:].view(3, 16)
    with pytest.raises(OpError, match="weight begins at 0x"):
        kernels.small_linear(x, shifted)


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 32])
@pytest.mark.parametrize("N", [288, 320])
@pytest.mark.parametrize("types", [(x, w) for x in TYPES for w in TYPES], ids=str)
def test_real_shapes(gpu, T, N, types):
    assert_right(*case(T, N, 4096, types))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [*range(1, 18), 33])
def test_odd_sizes(gpu, T):
    for N, K in ((1, 8), (5, 136), (33, 2056), (7, PIECE + 8), (3, 2 * PIECE + 2056)):
        assert_right(*case(T, N, K, (torch.bfloat16, torch.float32)))
        assert_right(*case(T, N, K, (torch.float32, torch.float16)))


@pytest.mark.gpu
@pytest.mark.parametrize("K", [128, 4096, PIECE + 264])
def test_a_row_gives_the_same_alone_and_among_others(gpu, K):
    x, weight = case(19, 33, K)
    whole = run(x, weight)
    assert torch.equal(run(x, weight), whole)
    for row in (0, 7, 8, 18):
        assert torch.equal(run(x[row : row + 1], weight)[0], whole[row]), row


@pytest.mark.gpu
def test_any_strides_of_rows_and_no_rows(gpu):
    x, weight = case(3, 6, 128)
    columns = x.cuda().T.contiguous().T
    assert not columns.is_contiguous()
    assert torch.equal(kernels.small_linear(columns, weight.cuda()).cpu(), run(x, weight))
    assert run(x[:0], weight).shape == (0, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 19])
@pytest.mark.parametrize("shape", [(5, 136), (288, 4096), (3, PIECE + 8)], ids=str)
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, shape, monkeypatch):
    x, weight = case(T, *shape)
    expected = run(x, weight)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        inputs = guarded.copy((x, weight))
        with monkeypatch.context() as patch:
            guarded.install(patch)
            found = kernels.small_linear(*inputs)
        torch.cuda.synchronize()
        guarded.check()
        assert torch.equal(found.cpu(), expected)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row(gpu):
    x, weight = case(9, 7, 136)
    whole = run(x, weight)
    x[8, 135] = float("nan")
    found = run(x, weight)
    assert bool(found[8].isnan().all())
    assert torch.equal(found[:8], whole[:8])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 11])
def test_a_captured_graph_gives_what_a_call_gives(gpu, T):
    x, weight = (tensor.cuda() for tensor in case(T, 288, 4096))
    held = torch.zeros_like(x)
    kernels.small_linear(held, weight)  # builds and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.small_linear(held, weight)
    for scale in (1.0, -3.0):
        held.copy_(x * scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, kernels.small_linear(held, weight))
        assert bool(found.any())
