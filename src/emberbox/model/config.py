"""The config of one checkpoint as frozen records, parsed once and strictly.

Promises: every key of config.json is read, checked, or known to be unused for a stated reason; all
missing keys, unknown keys, mistyped values and refused choices come in one ConfigError, and so do
all contradictions. `quantization_config` is accepted and never looked at: how a weight is stored is
read off the tensors. Knows nothing of files, tensors or torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from emberbox.errors import ConfigError
from emberbox.model.config_reader import (
    FIXED_TOP,
    TOKEN_IDS,
    UNUSED_TOP,
    read_dtype,
    read_text,
    read_vision,
)
from emberbox.model.config_section import Section

# Tokens of a cache page. A page holds whole pools, so index_kpool has to divide it.
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The text stack. Widths in elements, `max_position_embeddings` in tokens.

    `layer_is_sparse[i]`: layer i is sparse MLA (else KDA); `mlp_is_moe[i]`: it has experts (else it
    is dense). `gate_lower_bound` is a factor, not a clamp (architecture.md 3.2). `mtp_experts`: the
    routed experts of the MTP layer, whose number need not be that of an expert-pruned trunk.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    layer_is_sparse: tuple[bool, ...]
    mlp_is_moe: tuple[bool, ...]
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    index_kpool: int
    index_share_for_mtp_iteration: bool
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    gate_lower_bound: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    num_mtp_layers: int
    mtp_experts: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower. Patch sizes in pixels and frames.

    `block_norm_eps` is disputed (architecture.md 10 item 12): it is `rms_norm_eps`, unless the
    caller puts another value there with `dataclasses.replace`.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    rms_norm_eps: float
    block_norm_eps: float
    swiglu_limit: float
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm5NextConfig:
    """A whole config. `vision` is None for a text-only model; `dtype` is the activation type."""

    image_token_id: int
    video_token_id: int
    image_start_token_id: int
    image_end_token_id: int
    video_start_token_id: int
    video_end_token_id: int
    dtype: str
    text: TextConfig
    vision: VisionConfig | None

    @staticmethod
    def from_dict(
        data: Mapping[str, object], mtp: Mapping[str, object] | None = None
    ) -> "Glm5NextConfig":
        """The config in `data`, a parsed config.json; `mtp` is that of a separate MTP folder.

        Raises ConfigError: first with every missing, unknown, mistyped or unimplemented key, then,
        once each key is sound by itself, with every contradiction between them.
        """
        problems: list[str] = []
        top = Section("", data, problems)
        top.fixed(FIXED_TOP)
        ids = {key: top.integer(key, minimum=0) for key in TOKEN_IDS}
        text = top.child("text_config")
        text_values = read_text(text, mtp)
        has_vision = top.has("vision_config") and top.data["vision_config"] is not None
        vision_values = read_vision(top.child("vision_config")) if has_vision else None
        dtype = read_dtype(top)
        top.close(UNUSED_TOP)
        _refuse(problems)
        config = Glm5NextConfig(
            **ids,
            dtype=dtype,
            text=TextConfig(**text_values),
            vision=None if vision_values is None else VisionConfig(**vision_values),
        )
        _refuse(list(_contradictions(text.data, config)))
        return config


def _contradictions(raw: Mapping[str, object], config: Glm5NextConfig) -> Iterator[str]:
    """Values that are sound alone and disagree with another. `raw` is text_config as written."""
    yield from _schedule_problems(raw, config.text)
    yield from _width_problems(raw, config.text)
    yield from _token_problems(config)
    if config.vision is not None:
        yield from _vision_problems(config.vision, config.text.hidden_size)


def _schedule_problems(raw: Mapping[str, object], text: TextConfig) -> Iterator[str]:
    layers = text.num_hidden_layers
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        entries = raw.get(key)
        if isinstance(entries, list) and len(entries) != layers:
            yield f"text_config.{key} has {len(entries)} entries, num_hidden_layers is {layers}"
    dense = raw.get("first_k_dense_replace")
    by_count = [isinstance(dense, int) and i >= dense for i in range(len(text.mlp_is_moe))]
    if dense is not None and by_count != list(text.mlp_is_moe):
        yield f"text_config.first_k_dense_replace is {dense}, mlp_layer_types says otherwise"
    lists = raw.get("linear_attn_config")
    for key, sparse in (("kda_layers", False), ("full_attn_layers", True)):
        listed = lists.get(key) if isinstance(lists, Mapping) else None
        expected = [i for i, is_sparse in enumerate(text.layer_is_sparse) if is_sparse is sparse]
        if listed is not None and listed != expected:
            yield (
                f"text_config.linear_attn_config.{key} is {listed}, layer_types says {expected}"
                " (both count from 0)"
            )
    if text.num_mtp_layers > 1:
        mtp = text.num_mtp_layers
        yield f"text_config.num_nextn_predict_layers is {mtp}; this network has at most 1"


def _width_problems(raw: Mapping[str, object], text: TextConfig) -> Iterator[str]:
    for key, value, of in (
        ("qk_head_dim", text.qk_head_dim, "qk_nope_head_dim + qk_rope_head_dim is"),
        ("num_key_value_heads", text.num_attention_heads, "num_attention_heads is"),
    ):
        if raw.get(key, value) != value:
            yield f"text_config.{key} is {raw[key]}, {of} {value}"
    if text.index_topk % text.index_kpool:
        topk, pool = text.index_topk, text.index_kpool
        yield f"text_config.index_topk is {topk}, no multiple of index_kpool, {pool}"
    elif PAGE_TOKENS % text.index_kpool:
        pool = text.index_kpool
        yield f"text_config.index_kpool is {pool}; it must divide a page of {PAGE_TOKENS} tokens"
    chosen = text.num_experts_per_tok
    for where, experts in (
        ("the trunk", text.n_routed_experts),
        ("the MTP layer", text.mtp_experts),
    ):
        if chosen > experts:
            yield f"text_config.num_experts_per_tok is {chosen}, {where} has {experts} experts"


def _token_problems(config: Glm5NextConfig) -> Iterator[str]:
    """Token ids that the embedding has no row for, or that two marks share."""
    size = config.text.vocab_size
    marks = {"text_config.pad_token_id": config.text.pad_token_id}
    marks |= {f"text_config.eos_token_id[{i}]": t for i, t in enumerate(config.text.eos_token_ids)}
    media = {key: int(getattr(config, key)) for key in TOKEN_IDS} if config.vision else {}
    for key, token in (marks | media).items():
        if token is not None and token >= size:
            yield f"{key} is {token}, vocab_size is {size}"
    if len(set(media.values())) < len(media):
        yield f"two media tokens share an id: {media}"


def _vision_problems(vision: VisionConfig, hidden_size: int) -> Iterator[str]:
    width, heads = vision.hidden_size, vision.num_heads
    if vision.out_hidden_size != hidden_size:
        yield (
            f"vision_config.out_hidden_size is {vision.out_hidden_size},"
            f" text_config.hidden_size is {hidden_size}"
        )
    if width % heads:
        yield f"vision_config.hidden_size {width} is no multiple of num_heads {heads}"
    elif width // heads % 4:
        yield f"vision_config: a head is {width // heads} wide, no multiple of 4 to rotate in 2-D"


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(
            f"config.json: {len(problems)} problem(s)\n{lines}",
            hint="compare with the config.json of the release these weights come from",
        )
