"""Compress matrices to EXL3: rotate, scale, round with error feedback, refit.

For `emberbox compress`, and for whoever has a weight and activations. Needs the second moments of
what a matrix is multiplied with; knows no files, no model and no search (one is handed in).

Matrices of one shape go through in lock-step: what a GPU needs is thousands of tiles in one search.
All else is done matrix by matrix, so that each comes out the same alone and in a group, to the bit
on a CPU with the same number of threads; a matrix of 2,048 channels fills a device by itself.

Where this differs from exllamav3 1.6, which made the published files:
- Output scales are always taken; it drops them for gate and up where a measured sensitivity says
  so. That, and feedback along the outputs, need a Hessian of the outputs, which nothing here makes.
- The signs of the inputs come from each plan's seed, there from one vector per Hessian. The metric
  of feedback is always the tensor's own, with its scales in it (there an option): one factor each.
- The sample for the global scale is smaller (exl3_scales.py).
- The reported proxy error is against the Hessian without damping.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from emberbox.compress.exl3_scales import Scales, global_scales, refit, take_scales
from emberbox.compress.hessian import Hessian, rotated, unit_lower, working_dtype
from emberbox.compress.trellis_plan import Coder, TrellisPlan
from emberbox.compress.trellis_steps import Search
from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.trellis import TILE

# E matrices of a group; I input channels, O output channels, both padded to multiples of 128
MAX_HALF = 65504.0
# Copies and bytes that one step needs for a moment, counted by the allocator over seven shapes and
# rates of 2 and 8 bits: at most 4 float64 copies of a factor, 7 of one matrix, and 113 bytes for
# each weight of the strips that go through a search together.
ONE_FACTOR = 5
ONE_MATRIX = 8
ONE_STRIP = 130


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What was lost. proxy_error: tr(E C E^T) / tr(W C W^T), C the undamped Hessian."""

    proxy_error: float
    mse: float
    relative_mse: float
    num_rows: int
    has_feedback: bool


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A compressed matrix, its parts on the CPU, and how near it came."""

    tensor: QuantTensor
    report: QuantReport


@dataclass(frozen=True, slots=True)
class _Metrics:
    """The damped Hessian of each matrix of a group, padded; a shared one is made once."""

    hessians: Sequence[Hessian]
    device: torch.device
    padding: int
    shared: Tensor | None = None

    def hessian(self, index: int) -> Hessian:
        return self.hessians[index if len(self.hessians) > 1 else 0]

    def damped(self, index: int) -> Tensor:
        """float64 [I, I]."""
        if self.shared is not None:
            return self.shared
        return _padded(self.hessian(index).damped(self.device), self.padding)


def quantize(
    weights: Sequence[Tensor],
    hessians: Sequence[Hessian],
    plans: Sequence[TrellisPlan],
    search: Search,
    *,
    device: torch.device | str,
) -> list[Quantized]:
    """A group of weights [out, in] of one shape and any float type, wherever they are.

    hessians: one for all, or one each. plans: one each, of one rate and codebook. Sides are padded
    to multiples of 128 with zeros. Takes group_bytes() on `device`.

    Raises OpError for weights that differ in shape or are not finite, Hessians of another width,
    plans that differ in more than the seed, and scales that float16 cannot hold.
    """
    _check(weights, hessians, plans)
    device = torch.device(device)
    coder = Coder(plans[0], search)
    metrics = _metrics(hessians, device, -weights[0].shape[1] % exl3.BLOCK)
    inners, scales = _scaled(weights, plans, coder, device)
    lowers = [_lower(metrics, index, one) for index, one in enumerate(scales)]
    trellises = round_with_feedback(inners, lowers, coder)
    del inners, lowers
    made = []
    for index, weight in enumerate(weights):
        parts = {"trellis": trellises[index], **_marker(coder.plan.codebook, device)}
        between = exl3.rotate(exl3.rotate(exl3.inner(parts).to(scales[index].suh.dtype)).T).T
        metric = metrics.damped(index).to(between.dtype)
        fitted = refit(_source(weight, device), between, metric, scales[index])
        parts |= {"suh": _half(fitted.suh), "svh": _half(fitted.svh)}
        tensor = QuantTensor(exl3.FORMAT, parts, (weight.shape[0], weight.shape[1]))
        report = _report(weight, tensor, metrics.hessian(index))
        made.append(Quantized(tensor.to("cpu"), report))
    return made


def round_with_feedback(
    matrices: Sequence[Tensor], lowers: Sequence[Tensor | None], coder: Coder
) -> list[Tensor]:
    """[I, O] each -> trellises, int16 [I/16, O/16, n]. Leaves in `matrices` what was lost.

    From the last strip of 16 input channels to the first: what the strips already rounded have
    lost is made up for in the next, as `lower` (unit lower in blocks of 16) tells; without one
    nothing is. The strips of all matrices go through one search.
    """
    num_inputs = matrices[0].shape[0]
    trellises = []
    for start in reversed(range(0, num_inputs, TILE)):
        strip, done = slice(start, start + TILE), slice(start + TILE, None)
        targets = torch.stack([matrix[strip] for matrix in matrices])
        for target, matrix, lower in zip(targets, matrices, lowers, strict=True):
            if lower is not None:
                target += lower[done, strip].T @ matrix[done]
        values, trellis = coder.round(targets)
        for matrix, value in zip(matrices, values, strict=True):
            matrix[strip] -= value
        trellises.append(trellis)
    # Copies: the trellis of one matrix must not keep those of its group in memory.
    return [trellis.clone() for trellis in torch.cat(trellises[::-1], 1)]


def group_bytes(
    num: int, in_features: int, out_features: int, device: torch.device | str = "cpu"
) -> int:
    """Most memory that `quantize` takes on `device` for `num` matrices at a time.

    Besides what it is handed (weights, Hessians) and what the search needs for itself. A bound, not
    an estimate.
    """
    inputs, outputs = (-(-size // exl3.BLOCK) * exl3.BLOCK for size in (in_features, out_features))
    width = working_dtype(device).itemsize
    factor, matrix, strip = inputs * inputs, inputs * outputs, TILE * outputs
    # Held for every matrix: itself, its factor, its trellis (8 bits at the most).
    held = num * ((matrix + factor) * width + matrix)
    return held + ONE_FACTOR * factor * 8 + ONE_MATRIX * matrix * width + ONE_STRIP * num * strip


def proxy_error(weight: Tensor, decoded: Tensor, hessian: Hessian) -> float:
    """tr(E C E^T) / tr(W C W^T), E = weight - decoded, all [out, in]; C = I if none is known."""
    dtype = working_dtype(decoded.device)
    source = weight.to(decoded.device, dtype)
    error = source - decoded.to(dtype)
    if not hessian.is_informative:
        return _fraction(_sum_of_products(error, error), _sum_of_products(source, source))
    metric = hessian.matrix.to(decoded.device, dtype)
    return _fraction(
        _sum_of_products(error @ metric, error), _sum_of_products(source @ metric, source)
    )


def _scaled(
    weights: Sequence[Tensor], plans: Sequence[TrellisPlan], coder: Coder, device: torch.device
) -> tuple[list[Tensor], list[Scales]]:
    """Matrices [I, O] between the rotations as they are to be rounded, and their scales."""
    inners, scales = [], []
    for weight, plan in zip(weights, plans, strict=True):
        inner, taken = take_scales(_source(weight, device), plan.seed)
        inners.append(inner)
        scales.append(taken)
    for index, scale in enumerate(global_scales(inners, coder)):
        inners[index] *= scale
        scales[index] = Scales(scales[index].suh / scale, scales[index].svh)
    return inners, scales


def _lower(metrics: _Metrics, index: int, scales: Scales) -> Tensor | None:
    """The factor for error feedback; None where nothing is known or there is nothing to round."""
    if not metrics.hessian(index).is_informative or not scales.suh.any():
        return None
    metric = rotated(metrics.damped(index), scales.suh.double())
    return unit_lower(metric, TILE).to(scales.suh.dtype)


def _source(weight: Tensor, device: torch.device) -> Tensor:
    """[out, in] -> [I, O] in the working dtype."""
    padding = [-size % exl3.BLOCK for size in weight.shape]
    return pad(weight.to(device, working_dtype(device)).T, (0, padding[0], 0, padding[1]))


def _report(weight: Tensor, tensor: QuantTensor, hessian: Hessian) -> QuantReport:
    decoded = tensor.decode()
    source = weight.to(decoded.device, working_dtype(decoded.device))
    error = source - decoded
    mse = _sum_of_products(error, error) / error.numel()
    if not decoded.isfinite().all():
        raise OpError("exl3: the compressed matrix decodes to values that are not finite")
    return QuantReport(
        proxy_error=proxy_error(source, decoded, hessian),
        mse=mse,
        relative_mse=_fraction(mse, _sum_of_products(source, source) / source.numel()),
        num_rows=hessian.num_rows,
        has_feedback=hessian.is_informative,
    )


def _check(
    weights: Sequence[Tensor], hessians: Sequence[Hessian], plans: Sequence[TrellisPlan]
) -> None:
    if not weights or len(plans) != len(weights) or len(hessians) not in (1, len(weights)):
        raise OpError(
            f"exl3: {len(weights)} weights with {len(plans)} plans and {len(hessians)} Hessians, "
            f"expected a plan each and one Hessian or one each"
        )
    if len({(plan.bits, plan.codebook) for plan in plans}) > 1:
        raise OpError("exl3: the plans of a group differ in bits or codebook")
    shape = weights[0].shape
    for weight in weights:
        if weight.dim() != 2 or not weight.is_floating_point() or weight.shape != shape:
            raise OpError(
                f"exl3: expected floating-point [out, in] weights of one shape, got "
                f"{weight.dtype} {list(weight.shape)} in a group of {list(shape)}"
            )
        if not weight.isfinite().all():
            raise OpError("exl3: a weight holds values that are not finite")
    for hessian in hessians:
        if hessian.matrix.shape[0] != shape[1]:
            raise OpError(
                f"exl3: a Hessian of {hessian.matrix.shape[0]} inputs for weights of {shape[1]}"
            )


def _metrics(hessians: Sequence[Hessian], device: torch.device, padding: int) -> _Metrics:
    shared = _padded(hessians[0].damped(device), padding) if len(hessians) == 1 else None
    return _Metrics(hessians, device, padding, shared)


def _padded(damped: Tensor, more: int) -> Tensor:
    """Padding inputs are never seen; a diagonal keeps the matrix positive definite."""
    if not more:
        return damped
    matrix = pad(damped, (0, more, 0, more))
    matrix.diagonal()[damped.shape[0] :] = damped.diagonal().mean()
    return matrix


def _half(scales: Tensor) -> Tensor:
    if not bool((scales.abs() <= MAX_HALF).all()):
        raise OpError("exl3: a weight needs channel scales beyond float16")
    return scales.half()


def _marker(codebook: str, device: torch.device) -> dict[str, Tensor]:
    """The scalar that names the codebook: its multiplier, as int32."""
    if codebook not in exl3.MARKERS:
        return {}
    multiplier = torch.tensor([CODEBOOKS[codebook].multiplier], dtype=torch.int64)
    return {codebook: multiplier.to(torch.int32).reshape(()).to(device)}


def _sum_of_products(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
