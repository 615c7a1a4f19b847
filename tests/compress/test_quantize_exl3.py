"""Matrices to EXL3: parts, reported errors, error feedback, scales, and what is refused."""

from functools import cache

import numpy as np
import pytest
import torch

from emberbox.compress import exl3_scales, trellis_search_cpu
from emberbox.compress.exl3_scales import TARGET_RMS, Scales, global_scales, refit, take_scales
from emberbox.compress.hessian import Hessian, HessianSum, unit_lower
from emberbox.compress.quantize_exl3 import (
    proxy_error,
    round_with_feedback,
)
from emberbox.compress.trellis_plan import Coder, TrellisPlan, from_tiles, to_tiles
from emberbox.errors import OpError, SettingsError
from emberbox.formats import exl3
from emberbox.formats.codebooks import CODEBOOKS
from tests.helpers.quantising import (
    PLAN,
    assert_same,
    correlated,
    normal,
    quantize_one,
    unknown,
    weight,
)
from tests.helpers.quick_search import quick_search


@cache
def quick(bits, codebook="mul1", seed=0):
    """By a search that finds closed paths, but poor ones."""
    plan = TrellisPlan(bits=bits, codebook=codebook, seed=seed)
    return quantize_one(weight(), correlated(), plan)


@cache
def searched(bits, has_feedback=True):
    """By the real search, seconds each."""
    hessian = correlated() if has_feedback else unknown()
    return quantize_one(weight(), hessian, TrellisPlan(bits=bits), trellis_search_cpu.search)


def independent_proxy(source, decoded, hessian):
    """Relative error of the outputs, straight from a square root of the Hessian."""
    values, vectors = np.linalg.eigh(hessian.matrix.numpy())
    root = vectors * np.sqrt(values.clip(0))
    error = (source.double() - decoded.double()).numpy() @ root
    whole = source.double().numpy() @ root
    return np.square(error).sum() / np.square(whole).sum()


# -- the result ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "codebook"), [(2, "mul1"), (3, "mcg"), (4, "3inst"), (2.5, "mul1")]
)
def test_what_is_stored_decodes_with_the_reported_error(bits, codebook):
    made = quick(bits, codebook)
    parts = made.tensor.parts
    assert made.tensor.format is exl3.FORMAT
    assert parts["trellis"].shape == (8, 8, 16 * bits)
    assert {part: tensor.dtype for part, tensor in parts.items() if part[:2] in ("su", "sv")} == {
        "suh": torch.float16,
        "svh": torch.float16,
    }
    assert exl3.codebook_of(parts).name == codebook
    for marker in set(parts) & set(exl3.MARKERS):
        assert int(parts[marker]) & 0xFFFF_FFFF == CODEBOOKS[marker].multiplier
    decoded, report = made.tensor.decode(), made.report
    mse = float((decoded.double() - weight().double()).square().mean())
    assert report.mse == pytest.approx(mse, rel=1e-12)
    assert report.relative_mse == pytest.approx(mse / float(weight().double().square().mean()))
    expected = independent_proxy(weight(), decoded, correlated())
    assert report.proxy_error == pytest.approx(expected, rel=1e-6)
    assert report.num_rows == 512


def test_a_seed_gives_one_result_and_another_seed_another():
    again = quantize_one(weight(), correlated())
    assert_same(again, quick(2))
    other = quick(2, seed=1)
    assert not torch.equal(other.tensor.parts["trellis"], again.tensor.parts["trellis"])
    assert other.report.proxy_error == pytest.approx(again.report.proxy_error, rel=0.1)


@pytest.mark.slow
def test_a_bit_divides_the_error_by_four_and_more():
    errors = [searched(bits).report.proxy_error for bits in (2, 3)]
    # Of a Gaussian by 3.95; at two bits feedback passes on part of what it saves.
    assert errors[0] / errors[1] == pytest.approx(4.7, rel=0.1)


def test_error_feedback_beats_plain_rounding_on_correlated_inputs():
    plain, fed = searched(2, has_feedback=False), searched(2)
    assert not plain.report.has_feedback
    assert fed.report.has_feedback
    plain_error = proxy_error(weight(), plain.tensor.decode(), correlated())
    assert fed.report.proxy_error < 0.55 * plain_error  # measured: 0.43
    assert fed.report.mse > plain.report.mse  # the price of it


def test_a_gaussian_matrix_is_rounded_as_well_as_the_format_allows():
    """16,384 weights: a bound of 3 %, three deviations. test_trellis_search.py has more."""
    report = searched(2, has_feedback=False).report
    # The refit of 256 scales takes 1.6 % of the 16,384 degrees of freedom with it.
    assert report.relative_mse == pytest.approx(0.0683 * (1 - 256 / 16384), rel=0.03)
    assert report.proxy_error == pytest.approx(report.relative_mse)


def test_sides_are_padded_as_the_reader_expects():
    made = quantize_one(weight(72, 200), unknown(200), TrellisPlan(bits=8))
    assert made.tensor.parts["trellis"].shape == (16, 8, 128)
    assert (made.tensor.parts["suh"][200:] == 0).all()
    assert (made.tensor.parts["svh"][72:] == 0).all()
    assert made.tensor.decode().shape == (72, 200)
    assert made.report.relative_mse < 0.06


def test_padded_inputs_with_feedback():
    total = HessianSum(72)
    total.add(normal(500, 72, seed=4) @ normal(72, 72, seed=5))
    made = quantize_one(weight(128, 72), total.mean(), TrellisPlan(bits=8))
    plain = quantize_one(weight(128, 72), unknown(72), TrellisPlan(bits=8))
    plain_error = proxy_error(weight(128, 72), plain.tensor.decode(), total.mean())
    assert made.report.has_feedback
    assert made.report.proxy_error < 0.8 * plain_error


def test_channels_that_are_zero_stay_zero():
    holed = weight()
    holed[5], holed[:, 9] = 0, 0
    made = quantize_one(holed, correlated(), TrellisPlan(bits=8))
    decoded = made.tensor.decode()
    assert float(decoded[5].abs().max()) == 0
    assert float(decoded[:, 9].abs().max()) == 0
    assert made.report.proxy_error < 0.02


def test_a_matrix_of_zeros_is_kept():
    made = quantize_one(torch.zeros(128, 128), correlated())
    assert not made.tensor.decode().any()
    assert made.report.proxy_error == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_float_types_are_taken(dtype):
    made = quantize_one(weight().to(dtype), unknown(), TrellisPlan(bits=8))
    assert made.report.relative_mse < 0.06


def test_an_outlier_does_not_spoil_the_rest():
    spiked = weight()
    spiked[3, 4] = 5.0  # 250 deviations
    made = quantize_one(spiked, unknown(), TrellisPlan(bits=8))
    assert made.report.relative_mse < 0.06


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_is_not_finite_is_refused(bad):
    holed = weight()
    holed[1, 2] = bad
    with pytest.raises(OpError, match="a weight holds values that are not finite"):
        quantize_one(holed, unknown())


def test_other_weights_and_hessians_are_refused():
    with pytest.raises(OpError, match=r"\[out, in\] weights of one shape, got torch.int64"):
        quantize_one(torch.zeros(128, 128, dtype=torch.int64), unknown())
    with pytest.raises(OpError, match=r"float32 \[2, 128, 128\]"):
        quantize_one(torch.zeros(2, 128, 128), unknown())
    with pytest.raises(OpError, match="Hessian of 256 inputs for weights of 128"):
        quantize_one(weight(), unknown(256))
    with pytest.raises(OpError, match="not square"):
        Hessian(torch.zeros(3, 4), 1)
    with pytest.raises(OpError, match="not finite"):
        Hessian(torch.full((2, 2), torch.nan), 1)
    with pytest.raises(OpError, match="beyond float16"):
        quantize_one(1e9 * weight(), unknown())


@pytest.mark.parametrize(
    ("bits", "codebook", "message"),
    [(9, "mul1", "bits: 9, expected"), (2.25, "mul1", "bits: 2.25"), (4.5, "mul1", "bits: 4.5"),
     (0, "mul1", "bits: 0"), (2.5, "mcg", "mul1 only"), (2, "x", "codebook: 'x'")],
)  # fmt: skip
def test_other_plans_are_refused(bits, codebook, message):
    with pytest.raises(SettingsError, match=message):
        TrellisPlan(bits=bits, codebook=codebook)


def test_a_matrix_that_is_not_whole_tiles_is_refused():
    with pytest.raises(OpError, match="24 x 32, expected multiples of 16"):
        to_tiles(torch.zeros(24, 32))


# -- the pieces ----------------------------------------------------------------------------------


def test_without_correlation_feedback_changes_nothing():
    coder = Coder(PLAN, quick_search)
    matrix = normal(64, 48).double()
    lower = unit_lower(torch.eye(64, dtype=torch.float64) * 3, 16)
    values, plain = coder.round(matrix[None])
    lost = [matrix.clone(), matrix.clone()]
    for trellis in round_with_feedback(lost, [lower, None], coder):
        assert torch.equal(trellis, plain[0])
    for error in lost:
        assert torch.equal(error, matrix - values[0])


def test_scales_leave_rows_of_one_size_and_lose_nothing():
    source = weight(64 * 2, 256).double().T * torch.linspace(0.1, 3, 256).double()[:, None]
    inner, scales = take_scales(source, seed=7)
    # The rotation over the inputs mixes rows of one size, so each keeps it on the average.
    assert float(inner.square().mean().sqrt()) == pytest.approx(TARGET_RMS, rel=1e-12)
    back = exl3.rotate(exl3.rotate(inner).T).T * scales.suh[:, None] * scales.svh
    torch.testing.assert_close(back, source, rtol=1e-9, atol=1e-12)
    assert 40 < int((scales.svh < 0).sum()) < 88
    assert 90 < int((scales.suh < 0).sum()) < 166


@pytest.mark.parametrize("best", [0.17, 0.55, 0.8, 1.24, 1.63], ids=str)
def test_the_global_scale_is_found_wherever_it_lies(best, monkeypatch):
    """A parabola with its minimum anywhere in the range stands for the error."""

    def errors(samples, scales, coder):
        return [[(scale - best) ** 2 + 1 for scale in row] for row in scales]

    monkeypatch.setattr(exl3_scales, "_errors", errors)
    found = global_scales([normal(128, 128), torch.zeros(128, 128)], Coder(PLAN, quick_search))
    assert found == pytest.approx([best, 1.0], abs=0.031)


@pytest.mark.slow
def test_the_global_scale_of_a_gaussian_is_that_of_its_codebook():
    inner = [TARGET_RMS * normal(128, 128, seed=4).double()]
    found = global_scales(inner, Coder(PLAN, trellis_search_cpu.search))
    assert found == pytest.approx([0.80], abs=0.03)


def test_the_refit_lowers_the_error_it_is_made_for():
    metric = correlated().damped()
    source = weight().double().T
    inner, scales = take_scales(source, seed=1)
    rounded, _ = Coder(TrellisPlan(bits=4), quick_search).round(inner[None])
    between = exl3.rotate(exl3.rotate(rounded[0]).T).T

    def error(scales):
        lost = source - scales.suh[:, None] * between * scales.svh
        return float((lost * (metric @ lost)).sum())

    fitted = refit(source, between, metric, scales)
    assert error(fitted) < 0.97 * error(scales)
    # At the least: a change of one scale, up or down, makes it no better.
    for factor in (0.99, 1.01):
        moved = Scales(fitted.suh.clone(), fitted.svh)
        moved.suh[17] *= factor
        assert error(moved) > error(fitted)


def test_tiles_are_blocks_of_the_matrix():
    matrices = torch.arange(2 * 32 * 48).view(2, 32, 48)
    tiles = to_tiles(matrices)
    assert torch.equal(tiles[1, 1, 2], matrices[1, 16:32, 32:48])
    assert torch.equal(from_tiles(tiles), matrices)
    assert torch.equal(to_tiles(matrices[0]), tiles[0])
