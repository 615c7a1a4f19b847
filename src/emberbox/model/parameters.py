"""Every tensor the network reads: released name, shape, kind (architecture.md 4, 5 and 6).

Knows no file and no format: `weights.py` matches what a checkpoint really holds to this table.
Widths in this file: H hidden, C = KDA heads x head width, D head width, V vision hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from emberbox.model.config import Glm5NextConfig, TextConfig, VisionConfig

TEXT = "model.language_model."
VISUAL = "model.visual."


class Kind(Enum):
    """How a parameter may be stored, and what it is in memory.

    LINEAR: a matrix [out, in] in any format; in memory as stored, if plain in the activation type.
    PLAIN: BF16, F16 or F32; in memory in the activation type.
    FP32: F32 and nothing else, kept so. One that was rounded is a broken checkpoint, and wrong on
        every layer (architecture.md 10 items 4 and 8).
    WIDENED: BF16, F16 or F32; in memory F32. Released short, computed wide.
    """

    LINEAR = "linear"
    PLAIN = "plain"
    FP32 = "fp32"
    WIDENED = "widened"


class Part(Enum):
    """What a parameter belongs to. The trunk is always there; the others are there whole or not."""

    TRUNK = "trunk"
    MTP = "mtp"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One stored tensor. For LINEAR, `name` without `.weight` is the prefix of a format's parts."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.LINEAR
    part: Part = Part.TRUNK


@dataclass(frozen=True, slots=True)
class Target:
    """One entry `name` of the loaded parameters: its pieces, joined along the first axis."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """What the network needs, in the forms in which a checkpoint may hold it, the released first.

    A checkpoint holds one form. If a piece of it is quantised, nothing is joined: each piece is
    then a target under its own name.
    """

    forms: tuple[tuple[Target, ...], ...]

    @property
    def part(self) -> Part:
        """The part all pieces belong to."""
        return self.forms[0][0].pieces[0].part


def parameter_table(config: Glm5NextConfig) -> tuple[Parameter, ...]:
    """Every parameter as released: of the trunk, then of vision tower and MTP layer, if any."""
    return tuple(p for slot in parameter_slots(config) for t in slot.forms[0] for p in t.pieces)


def parameter_slots(config: Glm5NextConfig) -> tuple[Slot, ...]:
    """The same with the other forms: q, k, v and the convolution, split or fused."""
    slots = list(_trunk(config.text))
    if config.vision is not None:
        slots += _vision(config.vision)
    if config.text.num_mtp_layers:
        slots += _mtp(config)
    return tuple(slots)


def mtp_prefix(config: Glm5NextConfig) -> str:
    """Where the MTP layer is stored: as the layer after the last (architecture.md 6)."""
    return f"{TEXT}layers.{config.text.num_hidden_layers}."


def _alone(piece: Parameter) -> Target:
    return Target(piece.name, piece.shape, (piece,))


def _one(name: str, *shape: int, kind: Kind = Kind.LINEAR, part: Part = Part.TRUNK) -> Slot:
    return Slot(forms=((_alone(Parameter(name, shape, kind, part)),),))


def _plain(name: str, *shape: int, part: Part = Part.TRUNK) -> Slot:
    return _one(name, *shape, kind=Kind.PLAIN, part=part)


def _trunk(text: TextConfig) -> Iterator[Slot]:
    H, streams = text.hidden_size, text.hc_mult
    yield _plain(TEXT + "embed_tokens.weight", text.vocab_size, H)
    yield _plain(TEXT + "norm.weight", H)
    yield _one("lm_head.weight", text.vocab_size, H)
    num_mixes = streams * (2 + streams)  # pre, post and the mixing matrix (architecture.md 3.1)
    for index in range(text.num_hidden_layers):
        layer = f"{TEXT}layers.{index}."
        yield from _layer_norms(layer, H, Part.TRUNK)
        for half in ("attn", "ffn"):
            yield _plain(f"{layer}hc_{half}_fn", num_mixes, streams * H)
            yield _one(f"{layer}hc_{half}_base", num_mixes, kind=Kind.FP32)
            yield _one(f"{layer}hc_{half}_scale", 3, kind=Kind.FP32)
        if text.layer_is_sparse[index]:
            yield from _sparse_attention(layer + "self_attn.", text, Part.TRUNK)
        else:
            yield from _kda(layer + "self_attn.", text)
        if text.mlp_is_moe[index]:
            yield from _experts(layer + "mlp.", text, text.n_routed_experts, Part.TRUNK)
        else:
            yield from _swiglu(layer + "mlp.", H, text.intermediate_size, Part.TRUNK)


def _mtp(config: Glm5NextConfig) -> Iterator[Slot]:
    """No streams, no embedding and no head of its own (architecture.md 6)."""
    layer, text, part = mtp_prefix(config), config.text, Part.MTP
    H = text.hidden_size
    yield _one(layer + "eh_proj.weight", H, 2 * H, part=part)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield _plain(f"{layer}{name}.weight", H, part=part)
    yield from _layer_norms(layer, H, part)
    yield from _sparse_attention(layer + "self_attn.", text, part)
    yield from _experts(layer + "mlp.", text, text.mtp_experts, part)


def _layer_norms(layer: str, H: int, part: Part) -> Iterator[Slot]:
    yield _plain(layer + "input_layernorm.weight", H, part=part)
    yield _plain(layer + "post_attention_layernorm.weight", H, part=part)


def _kda(at: str, text: TextConfig) -> Iterator[Slot]:
    H, D, width = text.hidden_size, text.kda_head_dim, text.conv_width
    C = text.kda_heads * D
    split = tuple(_alone(Parameter(f"{at}{x}_proj.weight", (C, H))) for x in "qkv")
    fused = Parameter(at + "qkv_proj.weight", (3 * C, H))
    yield Slot(forms=(split, (_alone(fused),)))
    conv, wide = at + "conv1d.weight", Kind.WIDENED
    taps = tuple(Parameter(f"{at}{x}_conv1d.weight", (C, 1, width), wide) for x in "qkv")
    stack = Parameter(conv, (3 * C, 1, width), wide)
    forms = tuple((Target(conv, (3 * C, width), pieces),) for pieces in (taps, (stack,)))
    yield Slot(forms=forms)
    for gate in "fg":
        yield _one(f"{at}{gate}_a_proj.weight", D, H)
        yield _one(f"{at}{gate}_b_proj.weight", C, D)
    yield _one(at + "b_proj.weight", text.kda_heads, H)
    yield _one(at + "A_log", text.kda_heads, kind=Kind.FP32)
    yield _one(at + "dt_bias", C, kind=Kind.FP32)
    yield _plain(at + "o_norm.weight", D)
    yield _one(at + "o_proj.weight", H, C)


def _sparse_attention(at: str, text: TextConfig, part: Part) -> Iterator[Slot]:
    H, heads, D = text.hidden_size, text.num_attention_heads, text.index_head_dim
    q_rank, kv_rank, index_heads = text.q_lora_rank, text.kv_lora_rank, text.index_n_heads
    yield _one(at + "q_a_proj.weight", q_rank, H, part=part)
    yield _plain(at + "q_a_layernorm.weight", q_rank, part=part)
    yield _one(at + "q_b_proj.weight", heads * text.qk_head_dim, q_rank, part=part)
    yield _one(at + "kv_a_proj_with_mqa.weight", kv_rank, H, part=part)
    yield _plain(at + "kv_a_layernorm.weight", kv_rank, part=part)
    kv_width = heads * (text.qk_head_dim + text.v_head_dim)
    yield _one(at + "kv_b_proj.weight", kv_width, kv_rank, part=part)
    yield _one(at + "o_proj.weight", H, heads * text.v_head_dim, part=part)
    yield _one(at + "indexer.wq_b.weight", index_heads * D, q_rank, part=part)
    yield _one(at + "indexer.wk.weight", D, H, part=part)
    yield _plain(at + "indexer.k_norm.weight", D, part=part)
    yield _plain(at + "indexer.k_norm.bias", D, part=part)
    yield _one(at + "indexer.weights_proj.weight", index_heads, H, part=part)
    yield _plain(at + "indexer.index_kpool_compress_gate", D, H, part=part)
    yield _plain(at + "indexer.index_kpool_compress_ape", text.index_kpool, D, part=part)


def _swiglu(at: str, H: int, width: int, part: Part) -> Iterator[Slot]:
    yield _one(at + "gate_proj.weight", width, H, part=part)
    yield _one(at + "up_proj.weight", width, H, part=part)
    yield _one(at + "down_proj.weight", H, width, part=part)


def _experts(at: str, text: TextConfig, num_experts: int, part: Part) -> Iterator[Slot]:
    H, width = text.hidden_size, text.moe_intermediate_size
    yield _one(at + "gate.weight", num_experts, H, kind=Kind.WIDENED, part=part)
    yield _one(at + "gate.e_score_correction_bias", num_experts, kind=Kind.FP32, part=part)
    yield from _swiglu(at + "shared_experts.", H, text.n_shared_experts * width, part)
    for expert in range(num_experts):
        yield from _swiglu(f"{at}experts.{expert}.", H, width, part)


def _vision(vision: VisionConfig) -> Iterator[Slot]:
    part, V, out = Part.VISION, vision.hidden_size, vision.out_hidden_size
    patch, merge, wide = (
        vision.patch_size,
        vision.spatial_merge_size,
        vision.projection_intermediate_size,
    )
    taps = (vision.in_channels, vision.temporal_patch_size, patch, patch)
    yield _plain(VISUAL + "patch_embed.proj.weight", V, *taps, part=part)
    yield _plain(VISUAL + "patch_embed.proj.bias", V, part=part)
    for block in range(vision.depth):
        yield from _vision_block(f"{VISUAL}blocks.{block}.", vision)
    yield _plain(VISUAL + "post_layernorm.weight", V, part=part)
    yield _plain(VISUAL + "downsample.weight", out, V, merge, merge, part=part)
    yield _plain(VISUAL + "downsample.bias", out, part=part)
    yield _one(VISUAL + "merger.proj.weight", out, out, part=part)
    yield _plain(VISUAL + "merger.post_projection_norm.weight", out, part=part)
    yield _plain(VISUAL + "merger.post_projection_norm.bias", out, part=part)
    yield from _swiglu(VISUAL + "merger.", out, wide, part)


def _vision_block(at: str, vision: VisionConfig) -> Iterator[Slot]:
    part, V, width = Part.VISION, vision.hidden_size, vision.intermediate_size
    yield _plain(at + "norm1.weight", V, part=part)
    yield _plain(at + "norm2.weight", V, part=part)
    whole, split = [], []
    for leaf, shape, kind in (("weight", (V, V), Kind.LINEAR), ("bias", (V,), Kind.PLAIN)):
        name, fused = f"{at}attn.qkv.{leaf}", (3 * V, *shape[1:])
        pieces = tuple(Parameter(f"{at}attn.{x}_proj.{leaf}", shape, kind, part) for x in "qkv")
        whole.append(_alone(Parameter(name, fused, kind, part)))
        split.append(Target(name, fused, pieces))
    yield Slot(forms=(tuple(whole), tuple(split)))
    for name in ("q_norm", "k_norm"):
        yield _plain(f"{at}attn.{name}.weight", V // vision.num_heads, part=part)
    yield _one(at + "attn.proj.weight", V, V, part=part)
    yield _plain(at + "attn.proj.bias", V, part=part)
    yield from _swiglu(at + "mlp.", V, width, part)
    for name, size in (("gate_proj", width), ("up_proj", width), ("down_proj", V)):
        yield _plain(f"{at}mlp.{name}.bias", size, part=part)
