"""Scales of a matrix around its trellis: signs and sizes of channels, one global scale, the refit.

Matrices are [in, out] as in formats/exl3: W = diag(suh) H Q H diag(svh). What is computed stays on
the device and in the dtype of the matrix that is handed in. Knows no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberbox.compress.trellis_plan import Coder, to_tiles
from emberbox.formats.exl3 import rotate

# I input channels, O output channels, N tiles
TARGET_RMS = 1.24371088  # of every rotated row, before the global scale
# Error feedback adds to the targets: (bits, factor), the first that reaches the bits.
INFLATION = ((1, 1.08), (1.5, 1.035), (2, 1.018), (2.5, 1.009), (8, 1.004))
# The best global scale is 0.65 to 1.2 for every codebook and rate as long as a rotated matrix looks
# Gaussian; where it lies at an end of COARSE, the rest of 0.1 to 1.9 is tried too.
COARSE = (0.5, 0.7, 0.9, 1.1, 1.3)
REST = (0.1, 0.3, 1.5, 1.7, 1.9)
FINE = (-0.1, -0.05, 0.0, 0.05, 0.1)
# 24 tiles are 6,144 weights: the place of the minimum is then found to about 0.01, which costs
# less than 0.1 % of the error. Of a small matrix an eighth is enough to bear its share of the time.
SAMPLE_TILES = 24
SAMPLE_FRACTION = 8
SAMPLE_EXTREMES = 2  # tiles of largest and of smallest rms, of each
DIAGONALS = 3
REFIT_ROUNDS = 2
RIDGE = 1e-9  # of the mean diagonal, for rows that are zero


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Of the channels around a matrix between the rotations."""

    suh: Tensor  # [I]
    svh: Tensor  # [O]


def take_scales(weight: Tensor, seed: int) -> tuple[Tensor, Scales]:
    """weight [I, O] -> rotated, with rows of one size, and the scales that were taken out.

    A channel that is all zero gets scale zero.
    """
    generator = torch.Generator().manual_seed(seed)
    column_rms = weight.square().mean(0).sqrt()
    svh = _signs(column_rms, generator) * _ratio(column_rms, column_rms.mean())
    columns_even = rotate(_ratio(weight, svh))
    row_rms = columns_even.square().mean(1).sqrt()
    suh = _signs(row_rms, generator) * row_rms / TARGET_RMS
    inner = rotate(_ratio(columns_even, suh[:, None]).T).T.contiguous()
    return inner, Scales(suh, svh)


def global_scales(inners: Sequence[Tensor], coder: Coder) -> list[float]:
    """For each matrix the factor at which a sample of its tiles is rounded with the least error."""
    inflation = next(factor for reach, factor in INFLATION if coder.plan.bits <= reach)
    samples = [_sample(to_tiles(inner)) * inflation for inner in inners]
    near = _coarse([tiles[::3] for tiles in samples], coder)
    brackets = [[scale + step for step in FINE if scale + step > 0] for scale in near]
    errors = _errors(samples, brackets, coder)
    best = [_lowest(*both) for both in zip(brackets, errors, strict=True)]
    return [scale if tiles.any() else 1.0 for scale, tiles in zip(best, samples, strict=True)]


def refit(weight: Tensor, between: Tensor, metric: Tensor, scales: Scales) -> Scales:
    """Scales that bring diag(suh) `between` diag(svh) nearest to `weight` in `metric` [I, I].

    between: H Q H [I, O]. Channels without a scale stay zero.
    """
    suh, svh = scales.suh, scales.svh
    between = between * (suh != 0)[:, None]
    weighted = metric @ weight
    for _ in range(REFIT_ROUNDS):
        rows = suh[:, None] * between
        svh = _ratio((rows * weighted).sum(0), (rows * (metric @ rows)).sum(0))
        columns = between * svh
        system = ((columns @ columns.T) * metric).double()
        ridge = RIDGE * system.diagonal().mean()
        if float(ridge) > 0:
            system.diagonal().add_(ridge)
            wanted = (columns * weighted).sum(1).double()
            suh = torch.linalg.solve(system, wanted).to(suh.dtype)
    return Scales(suh, svh)


def _coarse(samples: Sequence[Tensor], coder: Coder) -> list[float]:
    """The best of COARSE for each sample, or of the whole range where that is at an end."""
    errors = _errors(samples, [COARSE] * len(samples), coder)
    best = [COARSE[found.index(min(found))] for found in errors]
    at_end = [i for i, scale in enumerate(best) if scale in (COARSE[0], COARSE[-1])]
    further = _errors([samples[i] for i in at_end], [REST] * len(at_end), coder) if at_end else []
    for i, found in zip(at_end, further, strict=True):
        if min(found) < min(errors[i]):
            best[i] = REST[found.index(min(found))]
    return best


def _lowest(scales: Sequence[float], errors: Sequence[float]) -> float:
    """Where a parabola through the lowest of the errors and its neighbours has its minimum."""
    best = errors.index(min(errors))
    if best in (0, len(scales) - 1):
        return scales[best]
    before, at, after = errors[best - 1 : best + 2]
    step = scales[best] - scales[best - 1]
    return scales[best] + 0.5 * step * (before - after) / (before - 2 * at + after)


def _errors(
    samples: Sequence[Tensor], scales: Sequence[Sequence[float]], coder: Coder
) -> list[list[float]]:
    """Mean squared error of each sample [N, 16, 16] rounded at each of its scales; one search."""
    factors = [
        torch.tensor(list(row), dtype=tiles.dtype, device=tiles.device).view(-1, 1, 1, 1)
        for tiles, row in zip(samples, scales, strict=True)
    ]
    scaled = [tiles * factor for tiles, factor in zip(samples, factors, strict=True)]
    values, _ = coder.values(torch.cat([tiles.flatten(0, 1) for tiles in scaled]))
    parts = torch.split(values, [tiles.shape[0] * tiles.shape[1] for tiles in scaled])
    errors = []
    for tiles, factor, part in zip(samples, factors, parts, strict=True):
        lost = part.view(len(factor), *tiles.shape) / factor - tiles
        errors.append(lost.square().mean((1, 2, 3), dtype=torch.float64).tolist())
    return errors


def _sample(tiles: Tensor) -> Tensor:
    """[A, B, 16, 16] -> [N, 16, 16]: a wrapped diagonal, three wide, and tiles of extreme rms."""
    num_rows, num_columns = tiles.shape[:2]
    length = max(num_rows, num_columns)
    places = [
        (step % num_rows) * num_columns + (step + offset) % num_columns
        for step in range(length)
        for offset in range(DIAGONALS)
    ]
    wanted = min(SAMPLE_TILES, -(-num_rows * num_columns // SAMPLE_FRACTION))
    by_rms = tiles.square().mean((2, 3)).flatten().argsort(stable=True).tolist()
    extremes = {*by_rms[:SAMPLE_EXTREMES], *by_rms[-SAMPLE_EXTREMES:]}
    chosen = sorted({*places[:: -(-len(places) // wanted)], *extremes})
    row, column = (
        torch.tensor(index, device=tiles.device)
        for index in zip(*(divmod(place, num_columns) for place in chosen), strict=True)
    )
    return tiles[row, column]


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random, +1 or -1; drawn on the CPU, so that a seed means the same on every device."""
    bits = torch.randint(0, 2, like.shape, generator=generator)
    return (bits * 2 - 1).to(like.device, like.dtype)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, zero where b is zero."""
    return torch.where(b == 0, 0, a / torch.where(b == 0, 1, b))
