"""Parameters of the training graph: released names, but for experts, which are stacked per layer.

`<mlp>.experts.gate_up` [E, 2I, hidden] and `<mlp>.experts.down` [E, hidden, I] stand for the
released gate_proj, up_proj and down_proj of each expert. Router biases are held where the release
holds them, around ROUTER_BIAS_CENTRE: what is trained is what is exported.
"""

import math
import re
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import parameter_table

ROUTER_BIAS_CENTRE = 10.0  # the released biases lie in a narrow band around it
ROUTER_BIAS = "gate.e_score_correction_bias"
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")

# Where AdamW trains a matrix: rows that are looked up, small projections that decide, and taps.
ADAM_MATRICES = re.compile(
    r"embed_tokens|lm_head|mlp\.gate\.weight|conv1d|hc_(attn|ffn)_fn|weights_proj|index_kpool"
)

Fill = Callable[[Tensor], Tensor]  # standard normal noise -> the starting value


def _linear(gain: float = 1.0) -> Fill:
    return lambda noise: noise * (gain / math.sqrt(noise[0].numel()))


def _normal(scale: float) -> Fill:
    return lambda noise: noise * scale


def _constant(value: float) -> Fill:
    return lambda noise: torch.full_like(noise, value)


def _taps(noise: Tensor) -> Tensor:
    """A convolution that begins as nearly the identity: the last tap is the current token."""
    taps = noise * 0.2
    taps[..., -1] += 0.7
    return taps


def _streams_apart(noise: Tensor) -> Tensor:
    """Mixing logits that keep the four streams nearly separate at the start."""
    base = torch.zeros_like(noise)
    streams = math.isqrt(noise.numel() + 1) - 1  # n = S (S + 2)
    base[2 * streams :] = (torch.eye(streams) * 3.0).flatten()
    return base


def _decays(noise: Tensor) -> Tensor:
    """Decays per head from 5 sigmoid(-8) to 5 sigmoid(-1): one token to hundreds of tokens."""
    return torch.linspace(-8.0, -1.0, noise.numel())


# The first match wins.
STARTS: tuple[tuple[str, Fill], ...] = (
    (r"embed_tokens\.weight", _normal(0.5)),
    (r"lm_head\.weight|hc_(attn|ffn)_fn|mlp\.gate\.weight|kpool_compress_gate", _normal(0.02)),
    (r"hc_(attn|ffn)_base", _streams_apart),
    (r"hc_(attn|ffn)_scale", _constant(1.0)),
    (r"e_score_correction_bias", _constant(ROUTER_BIAS_CENTRE)),
    (r"A_log|kpool_compress_ape", _constant(0.0)),
    (r"conv1d", _taps),
    (r"norm\d?\.weight", _constant(1.0)),
    (r"bias", _constant(0.0)),
    (r"f_b_proj|g_b_proj|\.o_proj|attn\.proj\.weight|down_proj", _linear(0.5)),
)


def is_state(name: str) -> bool:
    """Whether balance, and no gradient, moves it."""
    return name.endswith(ROUTER_BIAS)


def initial(config: Glm5NextConfig, seed: int) -> dict[str, Tensor]:
    """Starting values, float32 on the CPU. A name's value depends on the seed and itself alone."""
    values = {}
    for parameter in parameter_table(config):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {parameter.name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.name.endswith("dt_bias"):
            heads = noise.view(config.text.kda_heads, -1)
            values[parameter.name] = torch.cat([_decays(head) for head in heads])
        else:
            values[parameter.name] = _start(parameter.name)(noise)
    return stacked(values)


def _start(name: str) -> Fill:
    matches = (fill for pattern, fill in STARTS if re.search(pattern, name))
    return next(matches, _linear())


def stacked(released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Released tensors as the training graph holds them, float32."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in released.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            result[name] = tensor.float()
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor.float()
    for prefix, parts in experts.items():
        count = range(1 + max(index for index, _ in parts))
        result[f"{prefix}gate_up"] = torch.stack(
            [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in count]
        )
        result[f"{prefix}down"] = torch.stack([parts[e, "down"] for e in count])
    return result


def released(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `stacked`: views under released names."""
    result: dict[str, Tensor] = {}
    for name, tensor in params.items():
        if name.endswith("experts.gate_up"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                prefix = f"{name.removesuffix('gate_up')}{e}."
                result[f"{prefix}gate_proj.weight"], result[f"{prefix}up_proj.weight"] = gate, up
        elif name.endswith("experts.down"):
            for e, down in enumerate(tensor):
                result[f"{name.removesuffix('down')}{e}.down_proj.weight"] = down
        else:
            result[name] = tensor
    return result


def matrix_shape(name: str, tensor: Tensor) -> tuple[int, int] | None:
    """(rows, columns) of the matrices Muon trains in this parameter; None where AdamW does."""
    if tensor.dim() < 2 or ADAM_MATRICES.search(name):
        return None
    if ".experts." in name and tensor.dim() == 3:
        return tensor.shape[1], tensor.shape[2]
    return tensor.shape[0], tensor[0].numel()
