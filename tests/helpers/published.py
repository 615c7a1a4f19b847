"""The layouts in which quantised files of this model are published: names, dtypes, shapes.

One description serves two sizes: headers of the released size without data, and folders made from
ember-nano. Written from the description of the files, independently of the package's own tables.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

ATTENTION = r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj|indexer\.wq_b)\.weight$"
KINDS = {  # the first pattern that is found
    "routed": r"\.mlp\.experts\.",
    "shared": r"\.mlp\.shared_experts\.",
    "vision": r"visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.\w+_proj)|merger\.\w*proj)\.weight$",
    "dense": r"layers\.\d+\.mlp\.(gate|up|down)_proj\.weight$",
    "mla": ATTENTION,
    "kda": r"self_attn\.[qkv]_proj\.weight$",
    "head": r"^lm_head\.weight$",
    "eh": r"eh_proj\.weight$",
}
FP8_KINDS = ("routed", "shared", "dense", "mla")  # of the release; of mla without wq_b and KDA's o
MARKER_VALUES = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED}


@dataclass(frozen=True)
class Layout:
    """rates: kind -> bits of a weight in EXL3; mtp_rates: the same in the MTP layer.

    layer_rates: bits of routed experts in some layers; projection_rates: of gate, up or down.
    rest: how weights without a rate are stored. nvfp4: kinds in that format, and which form.
    whole_model: written by exllamav3 itself, which fuses q, k, v and the convolution, splits q, k,
    v of the vision tower, keeps the fused ones too, and has dtypes of its own for what stays plain.
    """

    name: str
    rates: Mapping[str, float] = field(default_factory=dict)
    mtp_rates: Mapping[str, float] = field(default_factory=dict)
    layer_rates: Mapping[int, float] = field(default_factory=dict)
    projection_rates: Mapping[str, float] = field(default_factory=dict)
    marker: str | None = "mul1"
    rest: str = "bf16"
    nvfp4: tuple[str, ...] = ()
    nvfp4_form: str = "nvfp4"
    whole_model: bool = False


def _whole(name: str, base: float, head: float, vision: float, **more: object) -> Layout:
    rates = {
        "routed": base,
        "shared": base + 2,
        "kda": base + 2,
        "mla": base + 2,
        "dense": base + 1,
        "head": head,
        "vision": vision,
        "eh": base,
    }
    mtp = {kind: rates[kind] for kind in ("routed", "shared", "mla", "eh")}
    return Layout(name, rates, mtp, whole_model=True, **more)


def _experts(name: str, bits: float, **more: object) -> Layout:
    return Layout(name, {"routed": bits}, {"routed": bits}, marker="mcg", **more)


WHOLE_2 = _whole("whole-2.05", 2, head=5, vision=5)
MOSAIC_LAYERS = (3, 32, 33, *range(36, 45))
MIX_LAYERS = (24, 27, 35, 37, 42, 45)
LAYOUTS = {
    layout.name: layout
    for layout in (
        WHOLE_2,
        _whole("whole-3.05", 3, head=6, vision=5),
        _whole("mosaic", 2, head=5, vision=5, layer_rates=dict.fromkeys(MOSAIC_LAYERS, 3)),
        _whole("tiers", 2, head=6, vision=6, projection_rates={"gate": 2, "up": 2.5, "down": 3}),
        _experts("experts-2", 2),
        _experts("experts-2-3", 2, layer_rates=dict.fromkeys(MIX_LAYERS, 3)),
        _experts("experts-4", 4),
        _experts("experts-2-fp8", 2, rest="fp8"),
        Layout("nvfp4", nvfp4=("routed", "dense")),
        Layout("nvfp4-reciprocal", nvfp4=("routed", "dense"), nvfp4_form="nvfp4_reciprocal"),
    )
}


class Entry(NamedTuple):
    """One weight or vector as stored: how, and from which released tensors.

    sources: names joined along the first axis. third: of the joined, which third, or None for all.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str  # plain, exl3, fp8, nvfp4 or nvfp4_reciprocal
    sources: tuple[str, ...]
    dtype: str = "BF16"
    bits: float = 0
    third: int | None = None
    is_duplicate: bool = False

    def headers(self, marker: str | None) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of every stored tensor."""
        at = self.name.removesuffix(".weight")
        if self.scheme == "plain":
            yield self.name, self.dtype, self.shape
            return
        rows, columns = self.shape
        if self.scheme == "exl3":
            yield f"{at}.trellis", "I16", (columns // 16, rows // 16, int(16 * self.bits))
            yield f"{at}.suh", "F16", (columns,)
            yield f"{at}.svh", "F16", (rows,)
            if marker:
                yield f"{at}.{marker}", "I32", ()
        elif self.scheme == "fp8":
            yield self.name, "F8_E4M3", self.shape
            yield self.name + "_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
        else:
            is_modelopt = self.scheme == "nvfp4"
            yield self.name + ("" if is_modelopt else "_packed"), "U8", (rows, columns // 2)
            yield self.name + "_scale", "F8_E4M3", (rows, columns // 16)
            shape = () if is_modelopt else (1,)
            scale = "weight_scale_2" if is_modelopt else "weight_global_scale"
            yield f"{at}.{scale}", "F32", shape
            yield f"{at}.{'input_scale' if is_modelopt else 'input_global_scale'}", "F32", shape


Plain = Mapping[str, tuple[str, tuple[int, ...]]]


def entries(layout: Layout, plain: Plain, mtp_layer: int) -> Iterator[Entry]:
    """What a file in `layout` holds; `plain`: dtype and shape of each released tensor in BF16."""
    for name, (dtype, shape) in plain.items():
        if layout.whole_model:
            yield from _as_exllamav3(layout, plain, name, mtp_layer)
        else:
            yield _entry(layout, plain, name, shape, (name,), mtp_layer, dtype)


def _as_exllamav3(layout: Layout, plain: Plain, name: str, mtp_layer: int) -> Iterator[Entry]:
    dtype, shape = plain[name]
    joint = re.search(r"self_attn\.([qkv])_(proj|conv1d)\.weight$", name)
    if joint is None:
        if name.endswith(("_fn", "compress_ape")):
            dtype = "F32"
        elif name.endswith("kv_b_proj.weight"):
            dtype = "F16"
        duplicate = re.search(r"visual.*attn\.qkv\.(weight|bias)$", name)
        if duplicate is None:
            yield _entry(layout, plain, name, shape, (name,), mtp_layer, dtype)
            return
        yield Entry(name, shape, "plain", (name,), dtype, is_duplicate=True)
        for third, letter in enumerate("qkv"):
            split = name.replace(".qkv.", f".{letter}_proj.")
            small = (shape[0] // 3, *shape[1:])
            made = _entry(layout, plain, split, small, (name,), mtp_layer, dtype)
            if duplicate[1] == "weight":
                made = made._replace(scheme="exl3", bits=layout.rates["vision"])
            yield made._replace(third=third)
    elif joint[1] == "q":
        sources = tuple(name.replace(".q_", f".{letter}_") for letter in "qkv")
        fused = name.replace("q_proj", "qkv_proj").replace("q_conv1d", "conv1d")
        full = (3 * shape[0], *shape[1:])
        made = _entry(layout, plain, fused, full, sources, mtp_layer, dtype)
        if joint[2] == "proj":
            made = made._replace(scheme="exl3", bits=layout.rates["kda"])
        yield made


def _entry(layout, plain, name, shape, sources, mtp_layer, dtype) -> Entry:
    entry = Entry(name, shape, "plain", sources, dtype)
    kind = next((k for k, pattern in KINDS.items() if re.search(pattern, name)), None)
    number = re.search(r"layers\.(\d+)\.", name)
    layer = int(number[1]) if number else None
    if kind is None:
        return entry
    if bits := (layout.mtp_rates if layer == mtp_layer else layout.rates).get(kind):
        if kind == "routed":
            bits = layout.layer_rates.get(layer, bits)
            projection = re.search(r"(\w+)_proj\.weight$", name)[1]
            bits = layout.projection_rates.get(projection, bits)
        return entry._replace(scheme="exl3", bits=bits)
    if kind in layout.nvfp4 and layer != mtp_layer:
        return entry._replace(scheme=layout.nvfp4_form)
    is_kda = name.endswith("o_proj.weight") and name.replace("o_proj", "q_proj") in plain
    if layout.rest == "fp8" and kind in FP8_KINDS and "wq_b" not in name and not is_kda:
        return entry._replace(scheme="fp8")
    return entry


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    widths = {"BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4, "U8": 1, "F8_E4M3": 1}
    return prod(shape) * widths[dtype]
