"""Second moments of what a matrix is multiplied with, and their factor for error feedback.

Knows no weights and no codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.exl3 import rotate

# I input channels, R rows of activations
DAMPING = 0.025  # of the mean diagonal
RETRY_DAMPING = 0.05
MAX_RETRIES = 10
MIN_MEAN_DIAGONAL = 1e-20  # below, nothing was seen
MIN_PIVOT = 1e-5  # of the largest pivot: below, a Cholesky factor in float64 is noise


def working_dtype(device: torch.device | str) -> torch.dtype:
    """Of sums and matrices on a device: float64 on a CPU, float32 elsewhere.

    float32 is enough where float64 would cost twice the memory and, on many GPUs, 64 times the
    time: targets are rounded to float16 before a search and scales after it (2^-11 against 2^-24),
    and the relative error of a sum of 500,000 rows, 1e-5 at the most, is small beside DAMPING.
    What loses digits, the factor of a Hessian and the equations of a refit, is float64 everywhere.
    torch must not have been told to use TF32.
    """
    return torch.float64 if torch.device(device).type == "cpu" else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Hessian:
    """Mean of x x^T over `num_rows` rows of activations, float64 or float32 [I, I]."""

    matrix: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        matrix = self.matrix
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise OpError(f"Hessian: shape {list(matrix.shape)} is not square")
        if not matrix.isfinite().all():
            raise OpError("Hessian: holds values that are not finite")

    @property
    def is_informative(self) -> bool:
        """Whether error feedback can rest on it."""
        return self.num_rows > 0 and float(self.matrix.diagonal().mean()) >= MIN_MEAN_DIAGONAL

    def damped(self, device: torch.device | str = "cpu") -> Tensor:
        """float64 [I, I] on `device`, part of the mean diagonal added.

        The unit matrix if nothing is known.
        """
        eye = torch.eye(self.matrix.shape[0], dtype=torch.float64, device=device)
        if not self.is_informative:
            return eye
        matrix = self.matrix.to(device, torch.float64)
        return matrix + eye.mul_(DAMPING * matrix.diagonal().mean())


class HessianSum:
    """Adds up x x^T over batches of rows on one device, in its working_dtype.

    Rows with a value that is not finite are left out and counted.
    """

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype = working_dtype(device)
        self.total = torch.zeros(num_inputs, num_inputs, dtype=dtype, device=device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # rows kept, rows dropped

    @property
    def num_rows(self) -> int:
        """Rows that were added."""
        return int(self._counts[0])

    @property
    def num_dropped(self) -> int:
        """Rows that were left out."""
        return int(self._counts[1])

    def add(self, x: Tensor) -> None:
        """x [..., I] of any float type, on any device."""
        if x.shape[-1] != self.total.shape[0]:
            raise OpError(f"Hessian: rows of {x.shape[-1]}, expected {self.total.shape[0]}")
        rows = x.reshape(-1, x.shape[-1]).to(self.total.device, self.total.dtype)
        # Dropped rows become zeros: to cut them out, a GPU would have to be waited for.
        is_kept = rows.isfinite().all(-1)
        rows = torch.where(is_kept[:, None], rows, 0)
        self.total.addmm_(rows.T, rows)
        self._counts += torch.stack([is_kept.sum(), (~is_kept).sum()])

    def mean(self) -> Hessian:
        """The Hessian of all rows so far, on the sum's device."""
        return Hessian(self.total / max(self.num_rows, 1), self.num_rows)


def rotated(damped: Tensor, suh: Tensor) -> Tensor:
    """H diag(suh) C diag(suh) H: what an error of the matrix between the rotations costs."""
    scaled = suh[:, None] * damped * suh
    return rotate(rotate(scaled).T)


def unit_lower(metric: Tensor, block: int) -> Tensor:
    """L of metric = L D L^T, unit lower in blocks: the blocks on its diagonal are unit matrices.

    float64 [I, I]. A metric that is not positive definite, as where channels are zero and with them
    their scales, gets more damping, up to ten times; then OpError.
    """
    extra = RETRY_DAMPING * metric.diagonal().mean()
    for retry in range(MAX_RETRIES + 1):
        damped = metric.clone()
        damped.diagonal().add_(retry * extra)
        factor, info = torch.linalg.cholesky_ex(damped)
        pivots = factor.diagonal()
        if not info and pivots.min() > MIN_PIVOT * pivots.max():
            return _without_diagonal_blocks(factor, block)
    raise OpError("Hessian: not positive definite, even damped")


def _without_diagonal_blocks(factor: Tensor, block: int) -> Tensor:
    """Cholesky factor G -> G diag(G_11, G_22, ...)^-1."""
    count = factor.shape[0] // block
    # [count, block, block]: the blocks on the diagonal
    on_diagonal = factor.reshape(count, block, count, block).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    columns = factor.reshape(-1, count, block).transpose(0, 1)  # [count, I, block]
    solved: Tensor = torch.linalg.solve_triangular(on_diagonal, columns, upper=False, left=False)
    product: Tensor = solved.transpose(0, 1).reshape(factor.shape)
    return product
