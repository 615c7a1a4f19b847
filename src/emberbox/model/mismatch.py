"""Why tensors and config do not belong together, in words. Decides nothing: `weights.py` does."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import TEXT, VISUAL, mtp_prefix

_LAYER = re.compile(re.escape(TEXT) + r"layers\.(\d{1,6})\.(?:mlp\.experts\.(\d{1,6})\.)?")
_BLOCK = re.compile(re.escape(VISUAL) + r"blocks\.(\d{1,6})\.")

# A part of an EXL3 weight with something between it and the weight's name, or behind it.
_PART = r"(?:trellis|suh|svh|su|sv|mcg|mul1)"
_SLICE = re.compile(rf"(?:_proj|lm_head)\.(?:.+\.{_PART}|{_PART}[._].+)")


def shown(name: str) -> str:
    """A tensor name from a file as it may be printed."""
    return name if name.isprintable() else ascii(name)


def not_known(name: str, config: Glm5NextConfig) -> str:
    """Why nothing consumes the tensor `name`."""
    if name.startswith(VISUAL) and config.vision is None:
        return "unknown, the config has no vision_config"
    if name.startswith(mtp_prefix(config)) and not config.text.num_mtp_layers:
        return "unknown, the config has num_nextn_predict_layers 0"
    if _SLICE.search(name):
        return "a slice, cut in advance for tensor parallel; only whole matrices are read"
    return "unknown to this network"


def both_values(config: Glm5NextConfig, names: Mapping[str, object]) -> list[str]:
    """Counts in the config that the tensor names contradict, each with both values."""
    experts: dict[int, int] = defaultdict(int)  # layer -> experts it holds; 0 where it is dense
    num_blocks = 0
    for name in names:
        if match := _LAYER.match(name):
            layer, expert = int(match[1]), -1 if match[2] is None else int(match[2])
            experts[layer] = max(experts[layer], expert + 1)
        elif match := _BLOCK.match(name):
            num_blocks = max(num_blocks, int(match[1]) + 1)
    found = [*_layer_counts(config, experts), *_expert_counts(config, experts)]
    if config.vision is not None and num_blocks not in (0, config.vision.depth):
        found.append(
            f"vision_config.depth is {config.vision.depth}, the tensors are of {num_blocks} blocks"
        )
    return found


def _layer_counts(config: Glm5NextConfig, experts: Mapping[int, int]) -> Iterator[str]:
    num_layers, num_mtp = config.text.num_hidden_layers, config.text.num_mtp_layers
    num_stored = max(experts, default=-1) + 1
    if not num_layers <= num_stored <= num_layers + num_mtp:
        yield (
            f"text_config.num_hidden_layers is {num_layers} (and {num_mtp} for MTP),"
            f" the tensors are of {num_stored} layers"
        )


def _expert_counts(config: Glm5NextConfig, experts: Mapping[int, int]) -> Iterator[str]:
    text = config.text
    layers_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for layer, num_stored in experts.items():
        wanted = text.mtp_experts
        if layer < text.num_hidden_layers:
            wanted = text.n_routed_experts if text.mlp_is_moe[layer] else 0
        if num_stored != wanted:
            layers_of[wanted, num_stored].append(layer)
    for (wanted, num_stored), layers in layers_of.items():
        where = ", ".join(map(str, sorted(layers)))
        yield f"the config has {wanted} routed experts, the tensors {num_stored}, in layer {where}"
