"""Comparisons shared by contract tests, benchmarks and `emberbox doctor`."""

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; infinite when `actual` is not finite.

    Two zero tensors differ by 0; a shape mismatch is infinite.
    """
    if actual.shape != expected.shape:
        return float("inf")
    a, e = actual.double(), expected.double()
    if not bool(torch.isfinite(a).all()):
        return float("inf")
    difference, size = float((a - e).norm()), float(e.norm())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else float("inf")


def first_mismatch(actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Name the first element further off than `tolerance` x the largest expected value, or ''."""
    a, e = actual.double(), expected.double()
    bad = ~((a - e).abs() <= tolerance * e.abs().max())
    if not bool(bad.any()):
        return ""
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"at {index}: got {float(a[index])!r}, expected {float(e[index])!r}"
