"""NVFP4: values decoded by hand in both layouts, packing, and that encoding settles at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.errors import OpError
from emberbox.formats.base import QuantTensor
from emberbox.formats.nvfp4 import (
    FORMAT,
    MAGNITUDES,
    RECIPROCAL,
    code_values,
    nearest_codes,
    pack_codes,
    unpack_codes,
)
from tests.helpers.stored import Stored

FORMATS = pytest.mark.parametrize("fmt", [FORMAT, RECIPROCAL], ids=lambda fmt: fmt.name)
SHAPES = [(1, 16), (3, 48), (130, 272)]


def random_weight(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hand_made():
    """Two rows of 32: every code, and blocks with scales 1, 2, 0.5 and 448."""
    codes = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
    scales = torch.tensor([[1.0, 2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    return codes, scales


def test_the_low_half_of_a_byte_is_the_even_input():
    packed = torch.tensor([[0x21, 0xF4, 0x8A]], dtype=torch.uint8)
    assert unpack_codes(packed).tolist() == [[1, 2, 4, 15, 10, 8]]
    assert pack_codes(unpack_codes(packed)).tolist() == packed.tolist()


def test_values_of_the_sixteen_codes():
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    values = code_values(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == expected
    assert values[8].signbit()


def test_modelopt_multiplies_by_both_scales():
    codes, scales = hand_made()
    parts = {"codes": pack_codes(codes), "scales": scales, "global": torch.tensor(0.25)}
    decoded = QuantTensor(FORMAT, parts, (2, 32)).decode()
    assert decoded.dtype == torch.float32
    assert decoded[0, :8].tolist() == [0, 0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.5]
    assert decoded[0, 23] == 6 * 2 * 0.25
    assert decoded[1, 15] == -6 * 0.5 * 0.25
    assert decoded[1, 17] == 0.5 * 448 * 0.25


def test_compressed_tensors_divides_by_the_global_scale():
    codes, scales = hand_made()
    parts = {"codes": pack_codes(codes), "scales": scales, "global": torch.tensor([4.0])}
    reciprocal = QuantTensor(RECIPROCAL, parts, (2, 32)).decode()
    parts["global"] = torch.tensor(0.25)
    assert torch.equal(reciprocal, QuantTensor(FORMAT, parts, (2, 32)).decode())


def test_names_in_a_checkpoint():
    assert list(FORMAT.part_names("p").values()) == [
        "p.weight",
        "p.weight_scale",
        "p.weight_scale_2",
        "p.input_scale",
    ]
    assert list(RECIPROCAL.part_names("p").values()) == [
        "p.weight_packed",
        "p.weight_scale",
        "p.weight_global_scale",
        "p.input_global_scale",
    ]


def test_every_code_and_scale_but_two_decode_to_finite_values():
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(256, 1)
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    parts = {"codes": pack_codes(codes), "scales": scales, "global": torch.tensor(1.0)}
    decoded = QuantTensor(FORMAT, parts, (256, 16)).decode()
    bad = (~decoded.isfinite()).any(-1).nonzero().flatten().tolist()
    assert bad == [0x7F, 0xFF]  # the NaNs of E4M3, which a loader refuses


@given(st.lists(st.integers(0, 255), min_size=8, max_size=40).filter(lambda x: len(x) % 8 == 0))
def test_packing_inverts_unpacking(raw):
    packed = torch.tensor(raw, dtype=torch.uint8).view(-1, 8)
    codes = unpack_codes(packed)
    assert codes.max() < 16
    assert torch.equal(pack_codes(codes), packed)
    # -0 is a code of its own, and no float to be nearest to
    positive = codes.masked_fill(codes == 8, 0)
    assert torch.equal(nearest_codes(code_values(positive)), positive)


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=50))
def test_codes_are_the_nearest_ones(numbers):
    values = torch.tensor(numbers)
    chosen = code_values(nearest_codes(values))
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    best = (values.unsqueeze(-1) - table).abs().amin(-1)
    assert torch.equal((values - chosen).abs(), best)


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.25])
    assert nearest_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 14, 8]


@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_half_a_step_of_the_code(fmt, shape):
    weight = random_weight(shape)
    quantized = fmt.quantize(weight)
    assert quantized.num_bytes == weight.numel() * 9 // 16 + 4
    error = (quantized.decode() - weight).abs()
    amax = weight.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    # The widest step is 2 of 6, half of it 1/6; a block scale is within 2^-4 of amax / 6.
    assert (error <= amax * (1 / 6 + 2**-4)).all()
    assert error.pow(2).mean().sqrt() < 0.11 * weight.pow(2).mean().sqrt()


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 6)),
    st.integers(0, 2**31),
    st.integers(-60, 60),
)
def test_encoding_a_decoded_weight_changes_nothing(shape, seed, exponent):
    weight = random_weight((shape[0], 16 * shape[1]), seed) * 2.0**exponent
    first = FORMAT.quantize(weight)
    second = FORMAT.quantize(first.decode())
    for part in ("scales", "global"):
        assert torch.equal(first.parts[part].float(), second.parts[part].float())
    assert torch.equal(first.decode(), second.decode())
    exact = code_values(unpack_codes(first.parts["codes"])).double().unflatten(-1, (-1, 16))
    exact = exact * first.parts["scales"].double().unsqueeze(-1) * first.parts["global"].double()
    assert torch.equal(first.decode().double(), exact.flatten(-2))


@FORMATS
def test_zero_blocks_and_zero_weights_are_zero_again(fmt):
    weight = torch.zeros(2, 48)
    assert torch.equal(fmt.quantize(weight).decode(), weight)
    weight[0, 20:30] = 5.25  # 6 * 448 * 2^-9: a global scale that is exact
    assert torch.equal(fmt.quantize(weight).decode(), weight)


@FORMATS
def test_what_cannot_be_encoded_is_refused(fmt):
    with pytest.raises(OpError, match="multiple of 16"):
        fmt.quantize(torch.ones(2, 24))
    weight = torch.ones(2, 32)
    weight[1, 3] = float("nan")
    with pytest.raises(OpError, match="not finite"):
        fmt.quantize(weight)


def test_a_width_that_is_no_multiple_of_the_block_is_a_reason():
    infos = {
        "p.weight": Stored("U8", (3, 12)),
        "p.weight_scale": Stored("F8_E4M3", (3, 1)),
        "p.weight_scale_2": Stored("F32", (2,)),
    }
    assert FORMAT.problems("p", (3, 24), infos) == [
        "p: shape [3, 24] is not a multiple of [1, 16], as nvfp4 requires",
        "p.weight_scale_2: shape [2], expected []",
    ]
