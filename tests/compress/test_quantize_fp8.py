"""Block FP8 by rounding: nearest code in each block, partial blocks at the edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.compress.quantize_fp8 import quantize_fp8
from emberbox.errors import OpError

FINITE = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def random_weight(rows, columns, seed, scale=1.0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def test_two_blocks_by_hand():
    weight = torch.zeros(2, 130)
    weight[0, :4] = torch.tensor([448.0, 17.0, 19.0, -0.0009765625])  # two ties, half the smallest
    weight[1, 128] = -224.0
    quantized = quantize_fp8("w", weight)
    assert quantized.parts["scale"].tolist() == [[1.0, 0.5]]
    codes = quantized.parts["weight"].float()
    assert codes[0, :4].tolist() == [448.0, 16.0, 20.0, 0.0]
    assert codes[1, 128] == -448.0
    assert quantized.decode()[1, 128] == -224.0
    assert quantized.parts["weight"].dtype is torch.float8_e4m3fn
    assert quantized.shape == (2, 130)


@given(
    st.sampled_from([(1, 1), (3, 200), (129, 5), (130, 260)]),
    st.integers(0, 2**16),
    st.sampled_from([1.0, 1e30, 1e-30, 1e-3]),
)
def test_no_other_code_of_the_same_block_is_nearer(shape, seed, scale):
    weight = random_weight(*shape, seed, scale)[:, :: max(1, shape[1] // 5)]
    quantized = quantize_fp8("w", weight)
    scales = quantized.parts["scale"].double()
    assert scales.shape == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    step = scales.repeat_interleave(128, 0)[: weight.shape[0]]
    step = step.repeat_interleave(128, 1)[:, : weight.shape[1]]
    values = torch.cat([FINITE, -FINITE]) * step.unsqueeze(-1)
    distances = (values - weight.double().unsqueeze(-1)).abs()
    chosen = (quantized.decode().double() - weight.double()).abs()
    assert bool((chosen <= distances.amin(-1) + weight.double().abs() * 2.0**-22).all())


@given(st.integers(0, 2**16), st.sampled_from([1.0, 1e25, 1e-25]))
def test_the_largest_of_a_block_is_the_largest_code(seed, scale):
    weight = random_weight(130, 140, seed, scale)
    quantized = quantize_fp8("w", weight)
    for rows in (slice(0, 128), slice(128, 130)):
        for columns in (slice(0, 128), slice(128, 140)):
            assert quantized.parts["weight"].float()[rows, columns].abs().max() == 448
            amax = weight[rows, columns].abs().max().item()
            found = quantized.parts["scale"][rows.start // 128, columns.start // 128].item()
            assert found * 448 == pytest.approx(amax, rel=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_weight_is_widened_first(dtype):
    weight = random_weight(5, 7, 3).to(dtype)
    wide = quantize_fp8("w", weight.float())
    assert torch.equal(quantize_fp8("w", weight).decode(), wide.decode())


def test_zero_stays_zero_and_the_largest_stays_finite():
    weight = torch.zeros(4, 300)
    weight[:, :128] = torch.finfo(torch.float32).max
    decoded = quantize_fp8("w", weight).decode()
    assert bool(decoded.isfinite().all())
    assert decoded[:, 128:].abs().sum() == 0
    assert torch.allclose(decoded, weight, rtol=2e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(bad):
    weight = torch.ones(3, 200)
    weight[2, 199] = bad
    with pytest.raises(OpError, match=r"^layers\.3\.o_proj: holds NaN or infinity$"):
        quantize_fp8("layers.3.o_proj", weight)


@pytest.mark.parametrize("shape", [(16,), (2, 2, 16), (0, 4)], ids=str)
def test_what_is_no_matrix_is_refused_by_name(shape):
    with pytest.raises(OpError, match=r"^w: expected a floating-point \[out, in\] weight, got "):
        quantize_fp8("w", torch.ones(shape))
