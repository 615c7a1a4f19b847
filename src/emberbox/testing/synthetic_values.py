"""Random values for weights of which only names, dtypes and shapes are known.

Chosen so that activations stay near 1 through every layer and tokens are routed evenly. Knows no
file, no recipe and no network.
"""

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emberbox.errors import SettingsError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor, Shape
from emberbox.ops.prepared import PREPARED

# E matrices, I input and O output channels, n words of a stored tile

CODEBOOK = "mul1"
WORDS_OF_16_BITS = 4  # in one drawn number
# The convolution's result goes through silu; 0.3 wide it is nearly odd there. Wider, keys and
# values would share a direction, and what a state holds of it would send all tokens one way.
CONV_SCALE = 0.15
ROUTER_BIAS = 10.0  # around which the released biases lie, in a band of about 0.01
MAX_SEED = 2**64 - 1  # of torch's generators
OWN_STREAM = 3.0  # logit by which a stream keeps to itself: 0.87 of it


class Values:
    """Draws on one device; equal seeds give equal values there."""

    def __init__(self, device: torch.device, seed: int) -> None:
        """Raises SettingsError for a seed that is not from 0 to MAX_SEED."""
        if not 0 <= seed <= MAX_SEED:
            raise SettingsError(f"seed: {seed}", hint=f"a number from 0 to {MAX_SEED}")
        self.device = device
        # Tensors on "meta" have shapes and no values: nothing is drawn.
        self.generator = (
            None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        )

    def normal(self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Made in place, so that a large one needs no second copy."""
        out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return out.normal_(0.0, scale, generator=self.generator)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, low: float, high: float) -> Tensor:
        """Evenly in low..high."""
        out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return out.uniform_(low, high, generator=self.generator)

    def channels(self, shape: Sequence[int], scale: float) -> Tensor:
        """float16 of random sign, 0.5 to 1.5 times `scale`."""
        size = self.uniform(shape, torch.float16, 0.5 * scale, 1.5 * scale)
        sign = torch.empty_like(size).random_(0, 2, generator=self.generator)
        return size * (1 - 2 * sign)

    def words(self, shape: Sequence[int]) -> Tensor:
        """int16, every bit drawn; the last size a multiple of 4."""
        drawn = torch.empty(
            *shape[:-1], shape[-1] // WORDS_OF_16_BITS, dtype=torch.int64, device=self.device
        )
        return drawn.random_(-(2**63), None, generator=self.generator).view(torch.int16)

    def plain(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor called `name`."""
        for pattern, make in RULES:
            if pattern.search(name):
                return make(self, shape, dtype)
        return self.normal(shape, dtype, math.prod(shape[1:]) ** -0.5)

    def trellis(
        self,
        num_matrices: int,
        shape: Shape,
        num_words: int,
        ready: Callable[[QuantTensor], QuantTensor],
    ) -> list[QuantTensor]:
        """`num_matrices` weights (out, in) whose products with unit inputs are about as large.

        They are drawn and made `ready` at once, side by side along the outputs; each then has a
        part of that memory to itself.
        """
        E, (O, I) = num_matrices, shape  # noqa: E741
        tiles = exl3.part_shapes((E * O, I))["trellis"]
        parts = {
            "trellis": self.words((tiles[0] or 0, tiles[1] or 0, num_words)),
            "suh": self.channels((E, I), I**-0.5),
            "svh": self.channels((E * O,), 1.0),
            CODEBOOK: torch.ones(E, dtype=torch.int32, device=self.device),
        }
        whole = {**parts, "suh": parts["suh"][0], CODEBOOK: parts[CODEBOOK][0]}
        made = ready(QuantTensor(exl3.FORMAT, whole, (E * O, I)))
        return _apart(made, parts, shape)


def _apart(made: QuantTensor, parts: dict[str, Tensor], shape: Shape) -> list[QuantTensor]:
    """The matrices that lie side by side in `made`; suh, svh and marker from `parts`."""
    E = parts["suh"].shape[0]
    if made.format is PREPARED:
        name, pieces = "words", made.parts["words"].chunk(E)
    else:
        name, pieces = "trellis", made.parts["trellis"].chunk(E, 1)
    return [
        QuantTensor(
            made.format,
            {name: piece.contiguous(), "suh": suh, "svh": svh, CODEBOOK: marker},
            shape,
        )
        for piece, suh, svh, marker in zip(
            pieces, parts["suh"], parts["svh"].chunk(E), parts[CODEBOOK], strict=True
        )
    ]


Make = Callable[[Values, Sequence[int], torch.dtype], Tensor]


def _ones(values: Values, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.ones(tuple(shape), dtype=dtype, device=values.device)


def _zeros(values: Values, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=values.device)


def _stream_base(values: Values, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[S (S + 2)]: the sublayer reads the mean of S streams, each gets its result once."""
    S = math.isqrt(shape[0] + 1) - 1
    read = torch.full((S,), -math.log(S - 1))  # whose sigmoid is 1 / S
    mix = OWN_STREAM * torch.eye(S)
    return torch.cat([read, torch.zeros(S), mix.flatten()]).to(values.device, dtype)


# The first pattern that is found in a name decides; any other tensor is a matrix of unit products.
RULES: tuple[tuple[re.Pattern[str], Make], ...] = tuple(
    (re.compile(pattern), make)
    for pattern, make in (
        (r"norm\d?\.weight$", _ones),
        (r"e_score_correction_bias$", lambda v, s, d: v.normal(s, d, 0.01) + ROUTER_BIAS),
        (r"dt_bias$", lambda v, s, d: v.uniform(s, d, -7.0, -2.0)),
        (r"A_log$", lambda v, s, d: v.uniform(s, d, -0.5, 0.5)),
        (r"\.bias$", _zeros),
        (r"hc_(attn|ffn)_base$", _stream_base),
        (r"hc_(attn|ffn)_scale$", lambda v, s, d: _ones(v, s, d) * 0.3),
        (r"conv1d\.weight$", lambda v, s, d: v.normal(s, d, CONV_SCALE)),
        (r"embed_tokens\.weight$", lambda v, s, d: v.normal(s, d)),
    )
)
