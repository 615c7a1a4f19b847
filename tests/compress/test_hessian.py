"""Second moments: sums, damping, and the factor for error feedback."""

import pytest
import torch

from emberbox.compress.hessian import Hessian, HessianSum, rotated, unit_lower
from emberbox.errors import OpError
from emberbox.formats import exl3
from tests.helpers.quantising import correlated, normal, unknown


def test_rows_that_are_not_finite_are_left_out_of_the_hessian():
    rows = normal(10, 4)
    total = HessianSum(4)
    total.add(rows[:6].view(2, 3, 4))
    spoiled = rows[6:].clone()
    spoiled[1, 2] = torch.nan
    total.add(spoiled)
    kept = rows[[0, 1, 2, 3, 4, 5, 6, 8, 9]].double()
    assert (total.num_rows, total.num_dropped) == (9, 1)
    torch.testing.assert_close(total.mean().matrix, kept.T @ kept / 9)
    with pytest.raises(OpError, match="rows of 5, expected 4"):
        total.add(normal(3, 5))


def test_damping_adds_to_the_mean_diagonal():
    hessian = correlated()
    added = hessian.damped() - hessian.matrix
    mean = float(hessian.matrix.diagonal().mean())
    torch.testing.assert_close(added, 0.025 * mean * torch.eye(128, dtype=torch.float64))
    assert torch.equal(unknown(4).damped(), torch.eye(4, dtype=torch.float64))
    assert not Hessian(torch.full((2, 2), 1e-21), 5).is_informative


def test_the_factor_is_unit_lower_in_blocks_and_gives_the_metric_back():
    metric = correlated().damped()
    lower = unit_lower(metric, 16)
    blocks = lower.view(8, 16, 8, 16)
    for i in range(8):
        torch.testing.assert_close(blocks[i, :, i], torch.eye(16, dtype=torch.float64))
        assert i == 7 or float(blocks[i, :, i + 1 :].abs().max()) == 0
    inverse = torch.linalg.inv(lower)
    middle = (inverse @ metric @ inverse.T).view(8, 16, 8, 16)
    off = [middle[i, :, j].abs().max() for i in range(8) for j in range(8) if i != j]
    assert float(max(off)) < 1e-9 * float(metric.abs().max())


def test_a_metric_without_full_rank_is_damped_until_it_factors():
    column = normal(32, 1).double()
    lower = unit_lower(column @ column.T, 16)
    assert lower.isfinite().all()
    with pytest.raises(OpError, match="not positive definite"):
        unit_lower(-torch.eye(32, dtype=torch.float64), 16)


def test_the_metric_prices_errors_of_the_matrix_between_the_rotations():
    damped, suh = correlated().damped(), normal(128, seed=9).double()
    error = normal(128, 32, seed=10).double()
    outside = suh[:, None] * exl3.rotate(error.T).T
    expected = float((outside * (damped @ outside)).sum())
    metric = rotated(damped, suh)
    assert float((error * (metric @ error)).sum()) == pytest.approx(expected, rel=1e-10)
