"""What the JSON files beside published weights say of how they are stored. No reader needs it.

Written from the description of the files, for the layouts of tests/helpers/published.py, at either
size. Lists that are published are kept in their published contradictions.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tests.helpers.published import MARKER_VALUES, Entry, Layout, num_bytes
from tests.helpers.released import TEXT, released_config

DTYPES = {
    "BF16": "torch.bfloat16",
    "F16": "torch.float16",
    "F32": "torch.float32",
    "I16": "torch.int16",
    "I32": "torch.int32",
    "F8_E4M3": "torch.float8_e4m3fn",
}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
GROUP = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


def json_files(
    layout: Layout, made: Sequence[Entry], config: dict[str, Any], mtp_layer: int
) -> dict[str, dict[str, Any]]:
    """File name -> content: config.json from that of the source model, and what lies beside it."""
    found = quantization_config(layout, made, mtp_layer)
    files = {"config.json": config | {"quantization_config": found}}
    if layout.rates:
        storage = tensor_storage(layout, made)
        files["quantization_config.json"] = found | {"tensor_storage": storage}
    elif layout.nvfp4_form == "nvfp4":
        files["hf_quant_config.json"] = hf_quant_config(made)
    return files


def quantization_config(layout: Layout, made: Sequence[Entry], mtp_layer: int) -> dict[str, Any]:
    """What config.json says under `quantization_config`."""
    if layout.rates:
        return _exl3(layout, made, mtp_layer)
    ignore = ignored(made, mtp_layer)
    if layout.nvfp4_form == "nvfp4_reciprocal":
        groups = {"group_0": {"format": "nvfp4-pack-quantized", "weights": GROUP}}
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": groups,
            "ignore": ignore,
        }
    groups = {"group_0": {"input_activations": GROUP, "weights": GROUP, "targets": ["Linear"]}}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "config_groups": groups,
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "ignore": ignore,
        "producer": PRODUCER,
    }


def ignored(made: Sequence[Entry], mtp_layer: int) -> list[str]:
    """What stays BF16 of the main layers and outside them, and nothing of the MTP layer.

    132 modules at the released size, as published: 45 attentions, 42 routers, 42 shared experts,
    head, embedding, vision tower.
    """
    names = {entry.name for entry in made}
    found = ["lm_head", f"{TEXT}embed_tokens", "model.visual*"]
    for layer in range(mtp_layer):
        at = f"{TEXT}layers.{layer}."
        found.append(f"{at}self_attn*")
        if f"{at}mlp.gate.weight" in names:
            found += [f"{at}mlp.gate", f"{at}mlp.shared_experts*"]
    return found


def hf_quant_config(made: Sequence[Entry]) -> dict[str, Any]:
    """ModelOpt's own file: mixed precision, module by module; layer 45 is not spoken of."""
    layers = {
        entry.name.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": 16}
        for entry in made
        if entry.scheme == "nvfp4"
    }
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": layers,
    }
    return {"producer": PRODUCER, "quantization": quantization}


def tensor_storage(layout: Layout, made: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Module -> its stored tensors, and of a trellis its rate and its codebook's multiplier."""
    modules: dict[str, dict[str, Any]] = {}
    for entry in made:
        owner = re.sub(r"\.(weight|bias)$", "", entry.name)
        module = modules.setdefault(owner, {"stored_tensors": {}})
        for name, dtype, shape in entry.headers(layout.marker):
            size = num_bytes(dtype, shape)
            described = {"shape": list(shape), "n_bytes": size, "dtype": DTYPES[dtype]}
            module["stored_tensors"][name] = described
        if entry.scheme == "exl3":
            module |= {"quant_format": "exl3", "bits_per_weight": entry.bits}
            if layout.marker:
                module[f"{layout.marker}_multiplier"] = MARKER_VALUES[layout.marker]
    return modules


def _exl3(layout: Layout, made: Sequence[Entry], mtp_layer: int) -> dict[str, Any]:
    """All published files were made from the FP8 release, and say so."""
    config: dict[str, Any] = {
        "quant_method": "exl3",
        "version": "1.4.4",
        "bits": round(_average_bits(layout, made, mtp_layer), 2),
        "head_bits": layout.rates.get("head", 16),
        "calibration": {"rows": 250, "cols": 2048},
        "out_scales": "auto",
        "codebook": layout.marker,
    }
    if layout.whole_model:
        config |= {"mtp_bits": layout.mtp_rates["routed"], "vision_bits": layout.rates["vision"]}
    return config | {"original_quantization_config": released_config()["quantization_config"]}


def _average_bits(layout: Layout, made: Sequence[Entry], mtp_layer: int) -> float:
    """Of quantised weights in layers; not of the MTP layer where that has a field of its own."""
    counted = list(_in_layers(made, mtp_layer if layout.whole_model else None))
    weights = [entry.shape[0] * entry.shape[1] for entry in counted]
    return sum(e.bits * n for e, n in zip(counted, weights, strict=True)) / sum(weights)


def _in_layers(made: Sequence[Entry], without: int | None) -> Iterator[Entry]:
    for entry in made:
        layer = re.search(r"language_model\.layers\.(\d+)\.", entry.name)
        if entry.scheme == "exl3" and layer is not None and int(layer[1]) != without:
            yield entry
