"""What config.json and quantization_config.json of a result say, in the words of other programs.

Written for readers that believe lists; ours looks at the tensors. Everything is computed from what
is stored, never from what was asked for.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from emberbox.compress.conversion_items import FORMAT_BY_NAME, Item
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.dtypes import TORCH_DTYPES
from emberbox.formats.trellis import is_half_rate
from emberbox.model.parameters import Part

# The oldest exllamav3 that reads the architecture, and the oldest that reads half rates.
EXL3_VERSION, EXL3_HALF_RATES = "1.4.4", "1.5.3"
PLAIN_BITS = 16


def average_bits(items: Sequence[Item]) -> float:
    """Mean bits of a quantised weight of the trunk without its head; 16 if there is none."""
    counted = [item for item in _quantised(items, Part.TRUNK) if item.layer is not None]
    num_weights = sum(item.num_weights for item in counted)
    if not num_weights:
        return float(PLAIN_BITS)
    return sum(_bits(item) * item.num_weights for item in counted) / num_weights


def config_json(
    items: Sequence[Item],
    source: Mapping[str, object],
    num_experts: int,
    calibration: Mapping[str, int] | None,
) -> dict[str, object]:
    """`source`, a config.json, as the result needs it; it is not changed.

    calibration: {"rows", "cols"} of the text that a trellis was searched with.
    """
    config = copy.deepcopy(dict(source))
    original = config.pop("quantization_config", None)
    text = config.get("text_config")
    if isinstance(text, dict):
        text["n_routed_experts"] = num_experts
        inner = text.pop("quantization_config", None)
        original = inner if original is None else original
    if all(item.target.format == "keep" or not item.is_linear for item in items):
        found = original  # nothing was encoded: what the source said of itself still holds
    else:
        found = quantization_config(items, original, calibration)
    if found is not None:
        config["quantization_config"] = found
    config["tie_word_embeddings"] = False
    return config


def quantization_config(
    items: Sequence[Item], original: object, calibration: Mapping[str, int] | None
) -> object:
    """`quantization_config` for what `items` store; `original`: that of the source, if any."""
    formats = {item.stored.format for item in items}
    if "exl3" in formats:
        return _exl3(items, original, calibration)
    if formats & {"nvfp4", "nvfp4_reciprocal"}:
        return _modelopt(items, "fp8_block" in formats)
    if "fp8_block" in formats:
        return _block_fp8(items)
    return None


def tensor_storage(items: Sequence[Item]) -> dict[str, object]:
    """Module -> its stored tensors, and for a trellis its rate and the multiplier of its codebook.

    A vector such as a norm's weight or a projection's bias is listed with its module.
    """
    modules: dict[str, dict[str, Any]] = {}
    for item in items:
        name = item.name if item.is_linear else _module(item.name)
        entry = modules.setdefault(name, {})
        stored = {
            spec.name: {
                "shape": list(spec.shape),
                "n_bytes": spec.num_bytes,
                "dtype": str(TORCH_DTYPES[spec.dtype]),
            }
            for spec in item.outputs
        }
        entry["stored_tensors"] = {**entry.get("stored_tensors", {}), **stored}
        if item.stored.format == "exl3":
            book = str(item.stored.codebook)
            entry |= {"quant_format": "exl3", "bits_per_weight": _usual_bits([item])}
            if book in FORMAT_BY_NAME["exl3"].parts:
                entry[f"{book}_multiplier"] = CODEBOOKS[book].multiplier
    return dict(modules)


def _exl3(
    items: Sequence[Item], original: object, calibration: Mapping[str, int] | None
) -> dict[str, object]:
    trellises = [item for item in items if item.stored.format == "exl3"]
    has_half = any(is_half_rate(int(16 * _bits(item))) for item in trellises)
    books = {str(item.stored.codebook): item.num_weights for item in trellises}
    config: dict[str, object] = {
        "quant_method": "exl3",
        "version": EXL3_HALF_RATES if has_half else EXL3_VERSION,
        "bits": round(average_bits(trellises), 2),
        "head_bits": _usual_bits(item for item in items if item.name == "lm_head"),
    }
    if calibration is not None:
        config["calibration"] = dict(calibration)
    # Not "auto", which drops some: every matrix here is divided by the sizes of its outputs.
    config |= {"out_scales": "always", "codebook": max(books, key=lambda book: books[book])}
    for key, part in (("mtp_bits", Part.MTP), ("vision_bits", Part.VISION)):
        bits = _usual_bits(_quantised(items, part))
        if bits != PLAIN_BITS:
            config[key] = bits
    if original is not None:
        config["original_quantization_config"] = original
    return config


def _modelopt(items: Sequence[Item], has_fp8: bool) -> dict[str, object]:
    """ModelOpt's NVFP4 of weights alone: nothing is calibrated, so there are no `input_scale`."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION" if has_fp8 else "NVFP4",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": _plain_modules(items),
    }


def _block_fp8(items: Sequence[Item]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": _plain_modules(items),
    }


def _plain_modules(items: Sequence[Item]) -> list[str]:
    """Modules that are not quantised; "a.b.*" where that is everything under a.b."""
    linear = [item for item in items if item.is_linear]
    around = {
        above
        for item in linear
        if item.stored.format != "bf16"
        for above in (item.name, *_ancestors(item.name))
    }
    found = {}
    for item in linear:
        if item.stored.format == "bf16":
            free = [above for above in _ancestors(item.name) if above not in around]
            found[f"{free[0]}.*" if free else item.name] = True
    return list(found)


def _ancestors(name: str) -> Iterator[str]:
    """ "a.b.c" -> "a", "a.b"."""
    pieces = name.split(".")
    return (".".join(pieces[:length]) for length in range(1, len(pieces)))


def _module(tensor: str) -> str:
    """The module a vector or a plain tensor belongs to."""
    owner, _, leaf = tensor.rpartition(".")
    return owner if leaf in ("weight", "bias") else tensor


def _quantised(items: Iterable[Item], part: Part) -> Iterator[Item]:
    return (i for i in items if i.part is part and i.stored.format != "bf16")


def _usual_bits(items: Iterable[Item]) -> float | int:
    """The rate that most weights have, 16 if there are none; 2, not 2.0."""
    num_weights: dict[float, int] = {}
    for item in items:
        bits = _bits(item)
        num_weights[bits] = num_weights.get(bits, 0) + item.num_weights
    bits = max(num_weights, key=lambda rate: num_weights[rate], default=float(PLAIN_BITS))
    return int(bits) if bits == int(bits) else bits


def _bits(item: Item) -> float:
    """Nominal bits of a weight of `item`."""
    return item.stored.bits or FORMAT_BY_NAME[item.stored.format].bits or PLAIN_BITS
