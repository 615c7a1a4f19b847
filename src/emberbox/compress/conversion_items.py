"""From pieces of the source to what is written: names, dtypes, shapes, one item after the other.

Two layouts. "released" keeps the names and dtypes of the release. "exllamav3" is what that program
writes and reads: q, k, v of a KDA layer fused into one trellis with the convolution fused beside
it, q, k, v of the vision tower split, F32 and F16 for a few tensors that the release has in BF16.
Reads no weights.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from emberbox.compress.recipe import Recipe, Target
from emberbox.formats.base import Format
from emberbox.formats.dtypes import DTYPE_TAGS
from emberbox.formats.exl3 import codebook_of
from emberbox.formats.table import FORMATS
from emberbox.model.parameters import TEXT, Kind, Parameter, Part
from emberbox.model.weights import WEIGHT, Piece
from emberbox.store.safetensors_header import TensorInfo, num_data_bytes

FORMAT_BY_NAME: Mapping[str, Format] = {known.name: known for known in FORMATS}
# Dtypes of the exllamav3 layout where it differs from the release; by the end of the name.
WRITTEN_AS = {
    "hc_attn_fn": "F32",
    "hc_ffn_fn": "F32",
    "index_kpool_compress_ape": "F32",
    "kv_b_proj.weight": "F16",
}
# Projections that other programs join into one product.
JOINED = {"gate_proj": "gate_up", "up_proj": "gate_up"} | {
    f"{x}_proj": "qkv" for x in ("q", "k", "v", "qkv")
}
_KDA = re.compile(r"(.*\.self_attn\.)([qkv])_(proj|conv1d)\.weight")
_VISION_QKV = re.compile(r"(.*\.attn\.)qkv\.(weight|bias)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(re.escape(TEXT) + r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write; `dtype` is the safetensors tag."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return num_data_bytes(self.dtype, self.shape) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One weight of the result and how it comes about.

    name: of the module for a matrix that a format may store, else of the tensor.
    target: what to do. "keep": the tensors `reads` become `outputs` one by one, byte for byte.
        Anything else: the weights `sources` are decoded, joined along the first axis, cut to
        `rows`, and encoded; as "bf16" they are cast to the dtype of the one output.
    stored: the format, rate and codebook of the result, also where target is "keep".
    shape: (out, in), or that of the tensor.
    sources: modules or tensors of the source; reads: every stored tensor of them.
    part, layer: where it belongs; the MTP layer has the number after the last, what lies outside
        the layers has None.
    """

    name: str
    target: Target
    stored: Target
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    rows: Sequence[int] | None
    is_linear: bool
    part: Part
    layer: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the outputs."""
        return sum(spec.num_bytes for spec in self.outputs)

    @property
    def num_weights(self) -> int:
        """Elements of the decoded weight."""
        return prod(self.shape)

    @property
    def unit(self) -> str:
        """What is computed and written together: a layer, the tower, or an end of the stack."""
        if self.part is not Part.TRUNK:
            return str(self.part.value)
        if self.layer is not None:
            return f"layer-{self.layer:03d}"
        return "embedding" if self.name.startswith(TEXT + "embed_tokens") else "head"

    @property
    def projection(self) -> str:
        """The name inside its layer without the expert's number: "mlp.experts.gate_proj"."""
        return projection_of(self.name)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A piece of the source, what the rules make of it, its name in the result, the rows kept.

    is_budgeted: the byte budget may raise the bits of `target`.
    """

    piece: Piece
    target: Target
    name: str
    rows: tuple[int, ...] | None = None
    is_budgeted: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether a format may store it."""
        return self.piece.parameter.kind is Kind.LINEAR

    @property
    def dtype(self) -> str:
        """Tag of a plain piece."""
        return next(iter(self.piece.infos.values())).dtype


def layer_of(name: str) -> int | None:
    """The number of the layer that a weight belongs to, if it is inside one."""
    number = _LAYER.match(name)
    return int(number[1]) if number else None


def projection_of(module: str) -> str:
    """A module's name inside its layer without an expert's number: "mlp.experts.gate_proj"."""
    return _EXPERT.sub(".experts.", _LAYER.sub("", module))


def joined(module: str) -> str:
    """`module` under the name of the product that it is computed in: "mlp.gate_up"."""
    prefix, dot, leaf = module.rpartition(".")
    return prefix + dot + JOINED.get(leaf, leaf)


def computed_together(items: Iterable[Item]) -> list[tuple[Item, ...]]:
    """The same items, those next to each other that are computed in one product: gate and up."""
    sets: dict[str, list[Item]] = {}
    for item in items:
        sets.setdefault(joined(item.name), []).append(item)
    return [tuple(found) for found in sets.values()]


def stored_as(piece: Piece) -> Target:
    """How the source stores `piece`."""
    if piece.format is None or piece.format.is_plain:
        return Target("bf16")
    if piece.format.name != "exl3":
        return Target(piece.format.name)
    bits = piece.infos["trellis"].shape[-1] / 16
    return Target("exl3", bits, codebook_of(piece.infos).name)


def make_items(chosen: Sequence[Chosen], spare: Sequence[TensorInfo], recipe: Recipe) -> list[Item]:
    """All items in the order of `chosen`; `spare`: tensors of the source that fill no parameter."""
    if recipe.layout == "released":
        return [_item([one]) for one in chosen]
    by_name = {one.name: one for one in chosen}
    items: list[Item] = []
    for one in chosen:
        if match := _KDA.fullmatch(one.name):
            items += _kda(match, one, by_name)
        elif match := _VISION_QKV.fullmatch(one.name):
            items += _vision_qkv(match, one, by_name, recipe.keep_fused_vision)
        else:
            items.append(_item([one], dtype=_written_as(one)))
    if recipe.keep_fused_vision:
        items += map(_spare, spare)
    return items


def _kda(match: re.Match[str], one: Chosen, by_name: Mapping[str, Chosen]) -> Iterator[Item]:
    """q, k, v and their convolutions: fused where the three become one kind of trellis."""
    at, letter, leaf = match.groups()
    names = [f"{at}{x}_proj.weight" for x in "qkv"]
    targets = {by_name[name].target if name in by_name else None for name in names}
    trellis = targets.pop()
    if targets or trellis is None or trellis.format != "exl3":
        yield _item([one])
    elif letter == "q":
        pieces = [by_name[f"{at}{x}_{leaf}.weight"] for x in "qkv"]
        yield _item(pieces, at + ("qkv_proj.weight" if leaf == "proj" else "conv1d.weight"))


def _vision_qkv(
    match: re.Match[str], one: Chosen, by_name: Mapping[str, Chosen], keep_fused: bool
) -> Iterator[Item]:
    """The three thirds where the matrix becomes a trellis, and the whole beside them if asked."""
    at, leaf = match.groups()
    if by_name[at + "qkv.weight"].target.format != "exl3":
        yield _item([one])
        return
    third = one.piece.parameter.shape[0] // 3
    for index, letter in enumerate("qkv"):
        rows = range(index * third, (index + 1) * third)
        yield _item([one], f"{at}{letter}_proj.{leaf}", rows)
    if keep_fused:
        yield _item([Chosen(one.piece, Target("keep"), one.name)])


def _item(
    pieces: Sequence[Chosen],
    name: str | None = None,
    rows: Sequence[int] | None = None,
    dtype: str | None = None,
) -> Item:
    """One item from one piece or several, stored under `name`; plain as `dtype`, if given."""
    first = pieces[0]
    name, rows = name or first.name, rows if rows is not None else first.rows
    joined = sum(one.piece.parameter.shape[0] for one in pieces)
    shape = (joined if rows is None else len(rows), *first.piece.parameter.shape[1:])
    module = name.removesuffix(WEIGHT) if first.is_linear else name
    target, stored = first.target, first.target
    outputs: tuple[TensorSpec, ...]
    if target.format == "keep" and (len(pieces) > 1 or rows is not None or dtype):
        target = stored = Target("bf16")
        outputs = (TensorSpec(name, dtype or first.dtype, shape),)
    elif target.format == "keep":
        stored = stored_as(first.piece)
        outputs = tuple(_moved(first, name))
    elif target.format == "bf16":
        outputs = (TensorSpec(name, dtype or "BF16", shape),)
    else:
        outputs = tuple(_encoded(module, target, (shape[0], shape[1])))
    sources = tuple(_source(one) for one in pieces)
    reads = tuple(info.name for one in pieces for info in one.piece.infos.values())
    return Item(
        name=module,
        target=target,
        stored=stored,
        shape=shape,
        sources=sources,
        reads=reads,
        outputs=outputs,
        rows=rows,
        is_linear=first.is_linear,
        part=first.piece.parameter.part,
        layer=layer_of(name),
    )


def _source(one: Chosen) -> str:
    name = one.piece.parameter.name
    return name.removesuffix(WEIGHT) if one.is_linear else name


def _moved(one: Chosen, name: str) -> Iterator[TensorSpec]:
    """The stored tensors of a piece under their names in the result."""
    old, new = _source(one), name.removesuffix(WEIGHT) if one.is_linear else name
    for info in one.piece.infos.values():
        yield TensorSpec(new + info.name.removeprefix(old), info.dtype, info.shape)


def _encoded(module: str, target: Target, shape: tuple[int, int]) -> Iterator[TensorSpec]:
    """The tensors that hold a matrix of `shape` in the format of `target`."""
    known = FORMAT_BY_NAME[target.format]
    shapes = known.part_shapes(shape)
    written = {part for part, spec in known.parts.items() if not spec.optional}
    if target.format == "exl3":
        written |= {"suh", "svh", str(target.codebook)}
    for part, spec in known.parts.items():
        if part in written:
            # The one open size: 16 words of a tile for each bit of a weight.
            size = tuple(int(16 * (target.bits or 0)) if n is None else n for n in shapes[part])
            yield TensorSpec(module + spec.suffix, DTYPE_TAGS[spec.dtypes[0]], size)


def _written_as(one: Chosen) -> str | None:
    """The dtype in which the exllamav3 layout has a plain tensor, if not in that of the source."""
    dtype = next((tag for end, tag in WRITTEN_AS.items() if one.name.endswith(end)), None)
    becomes_plain = one.target.format == "bf16" or (
        one.target.format == "keep" and stored_as(one.piece).format in ("bf16", "fp8_block")
    )
    moves = len(one.piece.infos) == 1 and one.dtype == dtype
    return dtype if becomes_plain and not moves else None


def _spare(info: TensorInfo) -> Item:
    """A tensor that only a fused vision tower needs, moved."""
    kind = Kind.LINEAR if info.name.endswith(WEIGHT) else Kind.PLAIN
    piece = Piece(Parameter(info.name, info.shape, kind, Part.VISION), {"weight": info})
    return _item([Chosen(piece, Target("keep"), info.name)])
