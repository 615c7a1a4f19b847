"""Block FP8: values decoded by hand, the bound on the error, and that encoding settles at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emberbox.errors import OpError
from emberbox.formats.base import QuantTensor
from emberbox.formats.fp8_block import FORMAT, MIN_SCALE

SHAPES = [(1, 1), (3, 5), (128, 128), (127, 129), (130, 300), (256, 384)]
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def _weight(shape, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * spread


def test_each_block_is_multiplied_by_its_own_scale():
    codes = torch.full((130, 257), 1.5).to(torch.float8_e4m3fn)
    codes[129, 256] = -448.0
    scale = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    decoded = QuantTensor(FORMAT, {"weight": codes, "scale": scale}, (130, 257)).decode()
    assert decoded.dtype == torch.float32
    assert decoded[0, 0] == 1.5
    assert decoded[127, 128] == 3.0
    assert decoded[127, 256] == 4.5
    assert decoded[128, 127] == 15.0
    assert decoded[129, 255] == 30.0
    assert decoded[129, 256] == -13440.0


def test_every_code_but_two_decodes_to_a_finite_value():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    parts = {"weight": codes, "scale": torch.tensor([[0.25]])}
    decoded = QuantTensor(FORMAT, parts, (2, 128)).decode().flatten()
    assert (~decoded.isfinite()).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert decoded[0x7E] == 112.0
    assert decoded[0x01] == 2.0**-9 / 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_half_a_step_of_the_code(shape):
    weight = _weight(shape)
    quantized = FORMAT.quantize(weight)
    amax = torch.nn.functional.pad(weight, (0, -shape[1] % 128, 0, -shape[0] % 128)).abs()
    amax = amax.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax(dim=(1, 3))
    assert torch.allclose(quantized.parts["scale"] * 448, amax, rtol=2e-6, atol=0)
    per_weight = quantized.parts["scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    per_weight = per_weight[: shape[0], : shape[1]]
    # Normal codes have 3 fraction bits: half a step is 2^-4 of the value. Below 2^-6 the step is
    # 2^-9. 1e-6 covers the division in float32.
    bound = torch.maximum(weight.abs() * 2**-4, per_weight * 2**-10) * (1 + 1e-6)
    assert ((quantized.decode() - weight).abs() <= bound).all()


@QUICK
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 140)),
    st.integers(0, 2**31),
    st.integers(-130, 100),
)
def test_encoding_a_decoded_weight_changes_nothing(shape, seed, exponent):
    # exponents below -111 reach the smallest scale
    first = FORMAT.quantize(_weight(shape, seed) * 2.0**exponent)
    second = FORMAT.quantize(first.decode())
    for part in ("weight", "scale"):
        assert torch.equal(
            first.parts[part].view(torch.uint8), second.parts[part].view(torch.uint8)
        )
    assert torch.equal(first.decode(), second.decode())


@QUICK
@given(st.integers(0, 2**31), st.integers(-140, 100) | st.integers(-120, -110))
def test_decoding_an_encoded_weight_does_not_round(seed, exponent):
    weight = _weight((129, 131), seed) * 2.0**exponent
    weight[::2] *= 2.0**-12  # reaches the smallest codes
    quantized = FORMAT.quantize(weight)
    scale = quantized.parts["scale"].double()
    per_weight = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:129, :131]
    exact = quantized.parts["weight"].double() * per_weight
    assert torch.equal(quantized.decode().double(), exact)


def test_a_zero_block_is_zero_again():
    quantized = FORMAT.quantize(torch.zeros(130, 2))
    assert torch.equal(quantized.decode(), torch.zeros(130, 2))
    assert (quantized.parts["scale"] == MIN_SCALE).all()


def test_the_largest_weight_is_kept():
    weight = torch.tensor([[3.0e38, -1.0], [0.5, 3.4e38]])
    decoded = FORMAT.quantize(weight).decode()
    assert decoded.isfinite().all()
    assert abs(decoded[1, 1] / weight[1, 1] - 1) < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    weight = torch.ones(3, 3)
    weight[1, 2] = value
    with pytest.raises(OpError, match="not finite"):
        FORMAT.quantize(weight)


def test_bytes_are_counted_exactly():
    quantized = FORMAT.quantize(_weight((130, 257)))
    assert quantized.num_bytes == 130 * 257 + 4 * 6
    full = FORMAT.quantize(_weight((256, 256)))
    assert full.num_bytes * 8 / 256**2 == FORMAT.bits
