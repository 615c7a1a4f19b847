"""Products with EXL3 weights on a GPU: golden results, every weight bit for bit, odd sizes.

Weights are decoded by the kernel as `formats.exl3` decodes them, and sums agree with float64 sums
of the same float16 numbers. Without a GPU: the plain twin that says what is expected.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.ops import ahead
from emberbox.ops.launch import TYPES
from emberbox.ops.linear_exl3 import kernel_cuda as kernels
from emberbox.ops.numerics import relative_error
from emberbox.ops.prepared import prepared
from tests.formats.test_exl3_golden import LINEAR, WEIGHTS, stored
from tests.helpers import exl3_twin
from tests.helpers.exl3_cases import (
    KINDS,
    assert_bit_exact,
    exact_rotation,
    inner_from,
    kind_name,
    one_input_each,
    weight_of,
)
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

TOLERANCE = {torch.float32: 5e-4, torch.float16: 8e-4, torch.bfloat16: 8e-3}
SUM_TOLERANCE = 2e-6  # float32 sums of products of float16 numbers, in any order
ROWS = (*range(1, 17), 17, 128, 129, 300)
OTHER_TYPES = [(32, "mul1"), (40, "mul1"), (48, "mcg"), (64, "3inst")]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


def macros_of(kind):
    return kind[0] // 8, kernels.CODEBOOKS[kind[1]]


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device = gpu_or_skip()
    arch = kernels.arch_of(device)
    pairs = [(kind, torch.float32) for kind in KINDS]
    pairs += [(kind, dtype) for kind in OTHER_TYPES for dtype in TOLERANCE]
    sources = {
        str(source): source
        for kind, dtype in pairs
        for source in (
            ahead.linear(macros_of(kind), 1, TYPES[dtype], arch),
            ahead.linear(macros_of(kind), 2, TYPES[dtype], arch),
        )
    }
    build_all(sources.values(), arch)
    return device


def run(x, weight, bias=None):
    """On the GPU, prepared before; the result on the CPU."""
    ready = prepared(weight.to("cuda"))
    return kernels.linear_exl3(x.cuda(), ready, None if bias is None else bias.cuda()).cpu()


# -- what is expected ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [(32, "mul1"), (48, "mcg"), (64, "3inst")], ids=kind_name)
def test_the_twin_is_the_reference_but_for_the_rounding_of_x(kind):
    weight = weight_of((130, 257), kind)
    x = torch.randn(5, 257, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.decode().double().T
    assert 1e-5 < relative_error(exl3_twin.product(x, weight), expected) < 5e-4


def test_a_weight_is_read_back_through_products_and_one_bit_shows():
    x, weight = one_input_each(weight_of((256, 256), (32, "mul1")))
    y = exl3_twin.product(x, weight).float()
    inner = exl3.inner(weight.parts)
    assert_bit_exact(inner_from(y), inner)
    wrong = inner.clone()
    wrong[200, 7] = torch.nextafter(wrong[200, 7], torch.tensor(4.0).half())
    with pytest.raises(AssertionError):
        assert_bit_exact(inner_from(y), wrong)


def test_sums_show_one_wrong_weight():
    x, weight = exact_rotation(3, weight_of((256, 256), (32, "mul1")))
    expected = exl3_twin.product(x, weight)
    parts = dict(weight.parts)
    parts["trellis"] = parts["trellis"].clone()
    parts["trellis"][3, 5, 7] ^= 1
    wrong = exl3_twin.product(x, replace(weight, parts=parts))
    assert relative_error(wrong, expected) > 100 * SUM_TOLERANCE
    rounded = exl3_twin.rotated(x, weight.parts["suh"])
    assert torch.equal(rounded, rounded.half().double())


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("repeat", [1, 6], ids=["3 rows", "18 rows"])
def test_golden_products(gpu, name, repeat):
    x = torch.from_numpy(LINEAR[f"{name}_x"]).float().repeat(repeat, 1)
    expected = np.tile(LINEAR[f"{name}_y"], (repeat, 1))
    assert relative_error(run(x, stored(name)), torch.from_numpy(expected)) <= 5e-4
    in_half = run(x.half(), stored(name))
    assert in_half.dtype is torch.float16
    assert relative_error(in_half, torch.from_numpy(expected)) <= TOLERANCE[torch.float16]


@pytest.mark.gpu
@by_kind
def test_every_weight_is_decoded_bit_for_bit(gpu, kind):
    x, weight = one_input_each(weight_of((384, 256), kind, seed=kind[0]))
    inner = exl3.inner(weight.parts)
    assert_bit_exact(inner_from(run(x, weight)), inner)  # 256 rows: tiles decoded for many
    few = torch.cat([run(piece, weight) for piece in x.split(16)])
    assert_bit_exact(inner_from(few), inner)
    fewer = torch.cat([run(piece, weight) for piece in x.split(7)])
    assert_bit_exact(inner_from(fewer), inner)


@pytest.mark.gpu
@by_kind
def test_every_count_of_rows_at_odd_sizes(gpu, kind):
    weight = weight_of((130, 257), kind, seed=kind[0])
    ready = prepared(weight.to("cuda"))
    generator = torch.Generator().manual_seed(kind[0])
    for rows in ROWS:
        x = torch.randn(rows, 257, generator=generator)
        bias = torch.randn(130, generator=generator) if rows % 2 else None
        y = kernels.linear_exl3(x.cuda(), ready, None if bias is None else bias.cuda())
        assert y.shape == (rows, 130)
        expected = x.double() @ weight.decode().double().T
        expected = expected if bias is None else expected + bias.double()
        assert relative_error(y.cpu(), expected) <= TOLERANCE[torch.float32], rows


@pytest.mark.gpu
@by_kind
@pytest.mark.parametrize("shape", [(130, 257), (640, 1152)], ids=str)
def test_sums_are_those_of_the_rounded_rows(gpu, kind, shape):
    x, weight = exact_rotation(33, weight_of(shape, kind, seed=kind[0]), seed=kind[0])
    expected = exl3_twin.product(x, weight)
    for rows in (1, 8, 9, 16, 33):
        error = relative_error(run(x[:rows], weight), expected[:rows])
        assert error <= SUM_TOLERANCE, rows


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OTHER_TYPES, ids=kind_name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_each_type_of_activations(gpu, kind, dtype):
    weight = weight_of((257, 385), kind)
    for rows in (1, 3, 8, 9, 16, 17, 131):
        x = torch.randn(rows, 385, generator=torch.Generator().manual_seed(rows)).to(dtype)
        bias = torch.randn(257, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = run(x, weight, bias)
        assert y.dtype is dtype
        expected = x.double() @ weight.decode().double().T + bias.double()
        assert relative_error(y, expected) <= TOLERANCE[dtype], rows


@pytest.mark.gpu
def test_any_leading_dimensions_strides_and_no_rows(gpu):
    weight = weight_of((128, 130), (32, "mul1"))
    wide = torch.randn(2, 3, 260, generator=torch.Generator().manual_seed(1))
    y = run(wide[..., ::2], weight)
    assert y.shape == (2, 3, 128)
    flat = run(wide[..., ::2].reshape(6, 130), weight)
    assert torch.equal(y.reshape(6, 128), flat)
    assert run(wide[:0, 0, :130], weight).shape == (0, 128)
    assert torch.equal(run(wide[0, 0, :130], weight), run(wide[:1, 0, :130], weight)[0])


@pytest.mark.gpu
def test_a_weight_as_stored_is_prepared_by_the_kernel(gpu):
    weight = weight_of((128, 128), (32, "mul1")).to("cuda")
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).cuda()
    y = kernels.linear_exl3(x, prepared(weight))
    assert torch.equal(kernels.linear_exl3(x, weight), y)


@pytest.mark.gpu
def test_what_does_not_fit_is_refused_by_name(gpu):
    ready = prepared(weight_of((128, 128), (32, "mul1")).to("cuda"))
    with pytest.raises(OpError, match=r"x is torch\.float64"):
        kernels.linear_exl3(torch.zeros(1, 128, device="cuda", dtype=torch.float64), ready)
    with pytest.raises(OpError, match="x has 129 channels, the weight 128"):
        kernels.linear_exl3(torch.zeros(1, 129, device="cuda"), ready)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(32, "mul1"), (56, "mul1"), (128, "mcg")], ids=kind_name)
def test_two_runs_and_rows_alone_are_bit_equal(gpu, kind):
    weight = weight_of((384, 4096), kind)
    x = torch.randn(300, 4096, generator=torch.Generator().manual_seed(1))
    for rows in (1, 5, 16, 300):
        assert torch.equal(run(x[:rows], weight), run(x[:rows], weight))
    many, few = run(x, weight), run(x[:16], weight)
    for row in (0, 7, 8, 15):
        assert torch.equal(run(x[row : row + 1], weight)[0], few[row]), row
    assert torch.equal(run(x[100:150], weight), many[100:150])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*OTHER_TYPES, (16, "mul1"), (128, "mul1")], ids=kind_name)
@pytest.mark.parametrize("rows", [1, 7, 8, 13, 16, 17, 131])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, kind, rows, monkeypatch):
    ready = prepared(weight_of((130, 257), kind))
    x = torch.randn(rows, 257, generator=torch.Generator().manual_seed(rows))
    bias = torch.randn(130, generator=torch.Generator().manual_seed(1))
    results = []
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        inputs = guarded.copy((x, ready, bias))
        with monkeypatch.context() as patch:
            guarded.install(patch)
            results.append(kernels.linear_exl3(*inputs))
        torch.cuda.synchronize()
        guarded.check()
    expected = run(x, ready, bias)
    assert all(torch.equal(result.cpu(), expected) for result in results)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 3, 5])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_however_units_are_dealt_to_blocks(gpu, multiprocessors, rows, monkeypatch):
    """Few blocks have many units each, and begin and end in the middle of an output group."""
    weight = weight_of((640, 1152), (32, "mul1"))
    ready = prepared(weight.to("cuda"))
    x = torch.randn(rows, 1152, generator=torch.Generator().manual_seed(rows))
    expected = x.double() @ weight.decode().double().T
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: multiprocessors)
    guarded = Guarded(gpu, FILLS[0])
    inputs = guarded.copy((x, ready))
    with monkeypatch.context() as patch:
        guarded.install(patch)
        found = [kernels.linear_exl3(*inputs) for _ in range(2)]
    torch.cuda.synchronize()
    guarded.check()
    assert torch.equal(*found)
    assert relative_error(found[0].cpu(), expected) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 40])
def test_what_is_not_a_number_stays_so_and_stays_in_its_row(gpu, rows):
    weight = weight_of((256, 384), (32, "mul1"))
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(2))
    whole = run(x, weight)
    x[1, 5] = float("nan")
    found = run(x, weight)
    assert bool(found[1].isnan().all())
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], whole[others])


@pytest.mark.gpu
def test_a_write_outside_of_a_buffer_would_show(gpu):
    guarded = Guarded(gpu, 0xFF)
    inside = guarded.new((5,), torch.float32, 0)
    guarded.check()
    inside.as_strided((6,), (1,))[5] = 1.0
    with pytest.raises(AssertionError, match=r"a buffer of 20 bytes, written at \[20"):
        guarded.check()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 11, 140])
def test_a_captured_graph_gives_what_a_call_gives(gpu, rows):
    ready = prepared(weight_of((384, 4096), (32, "mul1")).to("cuda"))
    held = torch.zeros(rows, 4096, device="cuda")
    kernels.linear_exl3(held, ready)  # builds, loads, takes working memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = kernels.linear_exl3(held, ready)
        second = kernels.linear_exl3(first.repeat(1, 11)[:, :4096].contiguous(), ready)
    for seed in range(3):
        x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(seed)).cuda()
        held.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        alone = kernels.linear_exl3(x, ready)
        assert torch.equal(first, alone)
        again = kernels.linear_exl3(alone.repeat(1, 11)[:, :4096].contiguous(), ready)
        assert torch.equal(second, again)


def test_codebooks_have_the_numbers_of_the_header():
    assert set(kernels.CODEBOOKS) == set(CODEBOOKS)
    text = (kernels.SOURCE.parents[1] / "trellis.cuh").read_text(encoding="utf-8")
    assert "enum Codebook { THREE_INST = 0, MCG = 1, MUL1 = 2 };" in text
    assert kernels.CODEBOOKS == {"3inst": 0, "mcg": 1, "mul1": 2}
