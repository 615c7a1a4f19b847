"""The fields of config.json: which are read, checked or unused, and why.

Every function returns plain values under the field names of the records in `config.py`, and notes
problems in the section it reads. Field list and released values: architecture.md 2.
"""

from collections.abc import Mapping
from typing import Any

from emberbox.model.config_section import MAX_INTEGER, Section

SPARSE_NAMES = ("deepseek_sparse_attention", "indexed_attention")
LINEAR_NAME = "linear_attention"

# Keys we know and do not use, and why not.
UNUSED_TOP = {
    "architectures": "names a class of another program",
    "transformers_version": "who wrote the file",
    "quantization_config": "the tensors themselves say how they are stored (architecture.md 2)",
}
UNUSED_TEXT = {
    "dtype": "the top-level dtype decides",
    "quantization_config": "the tensors themselves say how they are stored (architecture.md 2)",
    "bos_token_id": "the chat template writes every token of a prompt",
    "indexer_rope_interleave": "the rotary width is 0",
    "initializer_range": "training only",
    "router_aux_loss_coef": "training only",
    "output_router_logits": "training only",
    "use_cache": "the engine always caches",
}
UNUSED_VISION = {
    "dtype": "the top-level dtype decides",
    "image_size": "pictures have any size (architecture.md 5)",
    "initializer_range": "training only",
}

# What the network computes in one way only; any other value is refused. Such a key may be absent:
# transformers leaves most of them out when it saves, and computes the same one thing.
FIXED_TOP: dict[str, object] = {"model_type": "glm5_next", "tie_word_embeddings": False}
FIXED_TEXT: dict[str, object] = {
    "model_type": "glm5_next_text",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "moe_layer_freq": 1,
    "head_dim": 0,
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "mhc": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
}
FIXED_VISION: dict[str, object] = {
    "model_type": "glm5_next_vision",
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0,
}
DTYPES = ("bfloat16", "float16", "float32")

TOKEN_IDS = (
    "image_token_id",
    "video_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
)
# Required, integers of at least 1; index_kpool too: the default that others use, 16, is wrong.
TEXT_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "index_kpool",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
)
# Of these the network makes one object, or one loop, each.
MAX_COUNTS = {
    "num_hidden_layers": 1024,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "depth": 1024,
}
TEXT_NUMBERS = ("routed_scaling_factor", "hc_eps", "swiglu_limit", "rms_norm_eps")
VISION_INTEGERS = (
    "depth",
    "hidden_size",
    "num_heads",
    "intermediate_size",
    "out_hidden_size",
    "projection_intermediate_size",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "in_channels",
)
# The two spellings of the KDA fields: in linear_attn_config (released), beside it (transformers).
KDA_KEYS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}

# A folder of its own for the MTP layer may differ from the trunk in these text keys only.
MTP_MAY_DIFFER = frozenset(
    {
        *UNUSED_TEXT,
        "n_routed_experts",
        "num_hidden_layers",
        "layer_types",
        "mlp_layer_types",
        "indexer_types",
        "first_k_dense_replace",
        "linear_attn_config",
        "max_position_embeddings",
    }
)


def read_dtype(top: Section) -> str:
    """The activation type; bfloat16, the type of the release, where the file does not say."""
    found = {key: top.data[key] for key in ("dtype", "torch_dtype") if top.has(key)}
    names = [value for value in found.values() if value in DTYPES]
    if len(names) < len(found) or len(set(names)) > 1:
        top.problems.append(f"{found} is not one dtype out of {', '.join(DTYPES)}")
    return str(names[0]) if names else "bfloat16"


def read_text(text: Section, mtp: Mapping[str, object] | None) -> dict[str, Any]:
    """The fields of TextConfig. `mtp` is the config.json of a separate MTP folder."""
    text.fixed(FIXED_TEXT)
    values: dict[str, Any] = {
        key: text.integer(key, maximum=MAX_COUNTS.get(key, MAX_INTEGER)) for key in TEXT_INTEGERS
    }
    values |= {key: text.number(key) for key in TEXT_NUMBERS}
    values |= _read_kda(text)
    values["layer_is_sparse"] = _read_schedule(text, "layer_types", SPARSE_NAMES, LINEAR_NAME)
    values["mlp_is_moe"] = _read_mlp_schedule(text, values["num_hidden_layers"])
    values["qk_head_dim"] = text.integer("qk_nope_head_dim")
    text.integer("qk_head_dim", default=values["qk_head_dim"])
    text.integer("num_key_value_heads", default=values["num_attention_heads"])
    # 0 where absent is harmless: an MTP layer among the tensors is then refused by name.
    values["num_mtp_layers"] = text.integer("num_nextn_predict_layers", default=0, minimum=0)
    # Only a draft chain asks for it, so only a config with an MTP layer has to say.
    values["index_share_for_mtp_iteration"] = text.flag(
        "index_share_for_mtp_iteration", default=None if values["num_mtp_layers"] else False
    )
    values["eos_token_ids"] = _read_eos(text)
    pad = text.has("pad_token_id") and text.data["pad_token_id"] is not None
    values["pad_token_id"] = text.integer("pad_token_id", minimum=0) if pad else None
    if text.has("indexer_types"):
        _read_schedule(text, "indexer_types", ("full",), None)
    text.close(UNUSED_TEXT)
    values["mtp_experts"] = values["n_routed_experts"] if mtp is None else _read_mtp(mtp, text)
    return values


def _read_schedule(
    text: Section, key: str, yes: tuple[str, ...], no: str | None
) -> tuple[bool, ...]:
    """One entry per layer: true for a name in `yes`, false for `no`; any other name is noted."""
    names = text.array(key)
    allowed = (*yes, no) if no else yes
    for index, name in enumerate(names):
        if name not in allowed:
            expected = ", ".join(map(repr, allowed))
            text.problems.append(
                f"{text.path(key)}[{index}] is {name!r}; this network has {expected}"
            )
    return tuple(name in yes for name in names)


def _read_mlp_schedule(text: Section, num_layers: int) -> tuple[bool, ...]:
    """`mlp_layer_types`, or `first_k_dense_replace` where that is all there is."""
    num_dense = None
    if text.has("first_k_dense_replace"):
        num_dense = text.integer("first_k_dense_replace", minimum=0)
    if num_dense is None or text.has("mlp_layer_types"):
        return _read_schedule(text, "mlp_layer_types", ("sparse",), "dense")
    return tuple(index >= num_dense for index in range(num_layers))


def _read_kda(text: Section) -> dict[str, Any]:
    """Heads, width, taps and gate bound of the KDA layers; two spellings, which must agree."""
    nested = text.has("linear_attn_config")
    inner = text.child("linear_attn_config") if nested else Section("", {}, text.problems)
    source = inner if nested else text
    names = {name: name if nested else flat for name, flat in KDA_KEYS.items()}
    values = {
        "kda_heads": source.integer(names["num_heads"]),
        "kda_head_dim": source.integer(names["head_dim"]),
        "conv_width": source.integer(names["short_conv_kernel_size"]),
        # null would select the unbounded gate (architecture.md 3.2), which is not computed here
        "gate_lower_bound": source.number(names["gate_lower_bound"], sign=-1),
    }
    for name, flat in KDA_KEYS.items():
        found = inner.data.get(name)
        if text.has(flat) and name in inner.data and found != text.data[flat]:
            other = f"{text.path(flat)} is {text.data[flat]!r}"
            text.problems.append(f"{inner.path(name)} is {found!r}, {other}")
    inner.fixed({"safe_gate": True})
    inner.known |= {"kda_layers", "full_attn_layers"}
    inner.close({})
    return values


def _read_eos(text: Section) -> tuple[int, ...]:
    """The end tokens, from one integer or a list (architecture.md 10 item 16)."""
    found = text.value("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if "eos_token_id" in text.data:
        bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]
        if bad or not ids:
            text.mistyped("eos_token_id", found, "a token id or a list of them")
    return tuple(ids)


def _read_mtp(mtp: Mapping[str, object], text: Section) -> int:
    """The number of experts of an MTP layer with a config of its own; all else must agree.

    The file is a config.json like the trunk's, or the text fields alone.
    """
    outer = Section("mtp", mtp, text.problems)
    section = outer.child("text_config") if outer.has("text_config") else outer
    experts = section.integer("n_routed_experts", maximum=MAX_COUNTS["n_routed_experts"])
    section.known |= text.known
    for key, value in section.data.items():
        ours = text.data.get(key, value)
        if key not in MTP_MAY_DIFFER and value != ours:
            text.problems.append(f"{section.path(key)} is {value!r}, {text.path(key)} is {ours!r}")
    section.close(UNUSED_TEXT | UNUSED_TOP)
    outer.known |= {*FIXED_TOP, "vision_config", "dtype", "torch_dtype", *TOKEN_IDS}
    if section is not outer:
        outer.close(UNUSED_TOP)
    return experts


def read_vision(vision: Section) -> dict[str, Any]:
    """The fields of VisionConfig."""
    vision.fixed(FIXED_VISION)
    values: dict[str, Any] = {
        key: vision.integer(key, maximum=MAX_COUNTS.get(key, MAX_INTEGER))
        for key in VISION_INTEGERS
    }
    values["rms_norm_eps"] = values["block_norm_eps"] = vision.number("rms_norm_eps")
    values["swiglu_limit"] = vision.number("swiglu_limit")
    # The release has no rope_parameters; that means axial with theta 10000 (architecture.md 2).
    rope = Section("", {}, vision.problems)
    if vision.has("rope_parameters") and vision.data["rope_parameters"] is not None:
        rope = vision.child("rope_parameters")
    rope.fixed({"rope_type": "axial"})
    values["rope_theta"] = rope.number("rope_theta", default=10000.0)
    rope.close({})
    vision.close(UNUSED_VISION)
    return values
