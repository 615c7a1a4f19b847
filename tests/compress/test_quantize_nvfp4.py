"""NVFP4 by rounding: every code is the nearest of its scale; one global scale for a set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.compress.quantize_nvfp4 import quantize_nvfp4
from emberbox.errors import OpError
from emberbox.formats.nvfp4 import MAGNITUDES, unpack_codes

TINY = 2.0**-140


def random_weight(rows, columns, seed, scale=1.0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def one(weight):
    return quantize_nvfp4({"w": weight})["w"]


def steps(quantized):
    """float64 [out, in]: what one unit of a code is worth."""
    scales = quantized.parts["scales"].double() * quantized.parts["global"].double()
    return scales.repeat_interleave(16, dim=1)


def test_a_block_by_hand():
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.tensor(
        [6.0, 0.25, 0.75, 1.25, 1.75, -2.5, -5.0, 3.4]
    )  # ties but the last
    weight[0, 16:18] = torch.tensor([2688.0, -448.0])
    quantized = one(weight)
    assert quantized.parts["global"].item() == 1.0  # 2688 = 6 * 448
    assert quantized.parts["scales"].float().tolist() == [[1.0, 448.0]]
    codes = unpack_codes(quantized.parts["codes"])[0]
    assert codes[:8].tolist() == [7, 0, 2, 2, 4, 12, 14, 5]  # ties go to the even code
    assert quantized.decode()[0, 16:18].tolist() == [2688.0, -448.0]
    assert {part: tuple(t.shape) for part, t in quantized.parts.items()} == {
        "codes": (1, 16),
        "scales": (1, 2),
        "global": (),
    }


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2**16),
    st.sampled_from([1.0, 1e30, 1e-30, 1e-3]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_no_other_code_of_the_same_scale_is_nearer(rows, blocks, seed, scale, dtype):
    if dtype is torch.float16:
        scale = min(max(scale, 1e-3), 1.0)
    weight = random_weight(rows, 16 * blocks, seed, scale)
    weight *= torch.exp2(
        torch.randint(-9, 1, (rows, 1), generator=torch.Generator().manual_seed(1))
    )
    weight = weight.to(dtype)
    quantized = one(weight)
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64)
    values = torch.cat([magnitudes, -magnitudes]) * steps(quantized).unsqueeze(-1)
    distances = (values - weight.double().unsqueeze(-1)).abs()
    chosen = (quantized.decode().double() - weight.double()).abs()
    # The quotient by the scale is rounded in float32: 2^-24 of a weight decides a tie, no more.
    slack = weight.double().abs() * 2.0**-22
    assert bool((chosen <= distances.amin(-1) + slack).all())


@given(st.integers(0, 2**16), st.floats(-30, 30))
def test_a_block_scale_is_the_nearest_e4m3_to_a_sixth_of_its_largest(seed, exponent):
    weight = random_weight(3, 64, seed, 2.0**exponent)
    quantized = one(weight)
    amax = weight.double().view(3, 4, 16).abs().amax(-1)
    wanted = amax / 6 / quantized.parts["global"].double()
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (table - wanted.unsqueeze(-1)).abs().amin(-1)
    found = (quantized.parts["scales"].double() - wanted).abs()
    assert bool((found <= nearest + wanted * 2.0**-22).all())
    top = weight.abs().max().item() / 2688
    assert top <= quantized.parts["global"].item() <= top * (1 + 2.0**-17)


@given(st.integers(0, 2**16))
def test_weights_of_a_set_share_a_scale_and_are_else_independent(seed):
    gate, up = random_weight(3, 32, seed), random_weight(5, 32, seed + 1, 0.125)
    pair = quantize_nvfp4({"gate": gate, "up": up})
    scale = pair["gate"].parts["global"]
    assert torch.equal(scale, pair["up"].parts["global"])
    assert torch.equal(scale, one(torch.cat([gate, up])).parts["global"])
    joined = one(torch.cat([gate, up])).decode()
    assert torch.equal(pair["gate"].decode(), joined[:3])
    assert torch.equal(pair["up"].decode(), joined[3:])
    assert (pair["gate"].shape, pair["up"].shape) == ((3, 32), (5, 32))
    larger = pair["gate" if gate.abs().max() > up.abs().max() else "up"]
    alone = one(gate if gate.abs().max() > up.abs().max() else up)
    assert torch.equal(larger.decode(), alone.decode())


def test_parts_own_their_memory():
    full = torch.full((2, 16), 2688.0)  # 6 * 448 * 1, exact
    pair = quantize_nvfp4({"a": full, "b": full})
    assert pair["a"].parts["codes"].untyped_storage().nbytes() == 16
    pair["a"].parts["codes"].zero_()
    assert torch.equal(pair["b"].decode(), full)


@pytest.mark.parametrize("value", [0.0, TINY, -TINY])
def test_zero_and_what_is_as_good_as_zero_become_zero(value):
    quantized = one(torch.full((2, 32), value))
    assert quantized.decode().abs().sum() == 0
    assert quantized.parts["global"].item() == 2.0**-100  # a scale that can be divided by


def test_a_zero_block_beside_others_is_zero():
    weight = random_weight(2, 48, 1)
    weight[1, 16:32] = 0
    decoded = one(weight).decode()
    assert decoded[1, 16:32].tolist() == [0.0] * 16
    assert bool((decoded[0] != 0).any())


def test_huge_weights_are_finite_again_or_refused():
    weight = torch.full((1, 16), torch.finfo(torch.bfloat16).max)
    weight[0, ::2] *= -1
    decoded = one(weight).decode()
    assert bool(decoded.isfinite().all())
    assert torch.allclose(decoded, weight, rtol=2e-5)
    with pytest.raises(OpError, match=r"^w: nvfp4: the largest value decodes to infinity$"):
        one(torch.full((1, 16), torch.finfo(torch.float32).max))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(bad):
    weight = torch.ones(2, 16)
    weight[1, 3] = bad
    with pytest.raises(OpError, match=r"^layers\.3\.up: holds NaN or infinity$"):
        quantize_nvfp4({"layers.3.gate": torch.ones(2, 16), "layers.3.up": weight})


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(2, 24), "w: nvfp4: width 24 is not a multiple of 16"),
        (torch.ones(2, 8), "w: nvfp4: width 8 is not a multiple of 16"),
        (
            torch.ones(16),
            "w: expected a floating-point [out, in] weight, got torch.float32 [16]",
        ),
        (
            torch.ones(2, 2, 16),
            "w: expected a floating-point [out, in] weight, got torch.float32 [2, 2, 16]",
        ),
        (
            torch.ones(2, 16, dtype=torch.int32),
            "w: expected a floating-point [out, in] weight, got torch.int32 [2, 16]",
        ),
        (
            torch.ones(0, 16),
            "w: expected a floating-point [out, in] weight, got torch.float32 [0, 16]",
        ),
    ],
    ids=str,
)
def test_what_is_no_weight_is_refused_by_name(weight, said):
    with pytest.raises(OpError) as caught:
        quantize_nvfp4({"w": weight})
    assert caught.value.message == said


def test_weights_of_two_widths_are_no_set():
    with pytest.raises(OpError, match=r"^a: nvfp4: width 16 is not that of the others$"):
        quantize_nvfp4({"a": torch.ones(2, 16), "b": torch.ones(2, 32)})
