"""What a config.json may say, what it must say, and that everything else is refused by name."""

import json
import time
from copy import deepcopy
from dataclasses import replace

import pytest

from emberbox.errors import ConfigError
from emberbox.model.config import Glm5NextConfig
from tests.helpers.released import released_config
from tests.helpers.tiny import tiny_config

parse = Glm5NextConfig.from_dict


def edited(path, value, config=None):
    """The released config with the value at "a.b.c" replaced; `...` removes the key."""
    config = deepcopy(released_config() if config is None else config)
    *outer, key = path.split(".")
    place = config
    for name in outer:
        place = place[name]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return config


def problems(config, mtp=None):
    with pytest.raises(ConfigError) as caught:
        parse(config, mtp)
    _, *lines = caught.value.message.splitlines()
    return [line.removeprefix("  - ") for line in lines]


def test_released_config_gives_the_published_values():
    config = parse(released_config())
    text, vision = config.text, config.vision
    assert [i for i, sparse in enumerate(text.layer_is_sparse) if sparse] == list(range(3, 45, 4))
    assert [i for i, moe in enumerate(text.mlp_is_moe) if not moe] == [0, 1, 2]
    assert text.index_kpool == 4
    assert (text.kda_heads, text.kda_head_dim, text.conv_width) == (64, 128, 4)
    assert text.gate_lower_bound == -5.0
    assert (text.hc_eps, text.rms_norm_eps) == (1e-6, 1e-5)
    assert (text.n_routed_experts, text.mtp_experts, text.num_mtp_layers) == (288, 288, 1)
    assert text.eos_token_ids == (154820, 154827, 154829)
    assert text.pad_token_id == 154820
    assert config.image_token_id == 154854
    assert config.dtype == "bfloat16"
    assert (vision.depth, vision.out_hidden_size, vision.rope_theta) == (24, 4096, 10000.0)
    assert vision.block_norm_eps == vision.rms_norm_eps == 1e-5


def test_nothing_is_read_from_quantization_config():
    plain = parse(released_config(fp8=False))
    assert parse(released_config(fp8=True)) == plain
    assert parse(edited("text_config.quantization_config", {"bits": 2.05})) == plain


# What transformers leaves out when it saves, or what nobody computes with.
MAY_BE_ABSENT = {
    "architectures",
    "model_type",
    "dtype",
    "tie_word_embeddings",
    "vision_config",
    "text_config.model_type",
    "text_config.n_group",
    "text_config.topk_group",
    "text_config.norm_topk_prob",
    "text_config.scoring_func",
    "text_config.topk_method",
    "text_config.moe_router_dtype",
    "text_config.first_k_dense_replace",
    "text_config.mlp_layer_types",
    "text_config.num_key_value_heads",
    "text_config.qk_rope_head_dim",
    "text_config.qk_head_dim",
    "text_config.head_dim",
    "text_config.mla_use_nope",
    "text_config.index_kpool_compress",
    "text_config.index_kpool_always_select_tail",
    "text_config.indexer_types",
    "text_config.indexer_rope_interleave",
    "text_config.mhc",
    "text_config.hidden_act",
    "text_config.attention_bias",
    "text_config.attention_dropout",
    "text_config.num_nextn_predict_layers",
    "text_config.pad_token_id",
    "text_config.tie_word_embeddings",
    "text_config.initializer_range",
    "text_config.router_aux_loss_coef",
    "text_config.dtype",
    "text_config.linear_attn_config.kda_layers",
    "text_config.linear_attn_config.full_attn_layers",
    "vision_config.model_type",
    "vision_config.image_size",
    "vision_config.attention_bias",
    "vision_config.hidden_act",
}


def released_paths():
    config = released_config(fp8=False)
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            for inner, deeper in value.items():
                yield f"{key}.{inner}"
                if isinstance(deeper, dict):
                    yield from (f"{key}.{inner}.{name}" for name in deeper)


@pytest.mark.parametrize("path", list(released_paths()))
def test_a_missing_key_is_named_unless_absence_is_harmless(path):
    config = edited(path, ...)
    if path in MAY_BE_ABSENT:
        parse(config)
    elif path == "text_config.linear_attn_config":
        assert problems(config) == [
            "text_config.linear_num_heads is missing",
            "text_config.linear_head_dim is missing",
            "text_config.linear_conv_kernel_dim is missing",
            "text_config.linear_lower_bound is missing",
        ]
    else:
        assert problems(config) == [f"{path} is missing"]


def test_missing_unknown_and_mistyped_keys_come_in_one_error():
    config = edited("text_config.index_kpool", ...)
    config["text_config"]["hidden_size"] = "4096"
    config["text_config"]["index_kpools"] = 4
    config["vision_config"]["depths"] = 24
    del config["vision_config"]["depth"]
    config["text_config"]["linear_attn_config"]["num_head"] = 64
    config["vision_config"]["rope_parameters"] = {"theta": 1.0}
    config["speculators"] = {}
    del config["image_token_id"]
    assert sorted(problems(config)) == [
        "image_token_id is missing",
        "speculators is unknown",
        "text_config.hidden_size is '4096', expected an integer of at least 1",
        "text_config.index_kpool is missing",
        "text_config.index_kpools is unknown",
        "text_config.linear_attn_config.num_head is unknown",
        "vision_config.depth is missing",
        "vision_config.depths is unknown",
        "vision_config.rope_parameters.theta is unknown",
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("tie_word_embeddings", True),
        ("text_config.tie_word_embeddings", True),
        ("text_config.model_type", "glm5_moe"),
        ("text_config.hidden_act", "gelu"),
        ("text_config.attention_bias", True),
        ("text_config.attention_dropout", 0.1),
        ("text_config.n_group", 8),
        ("text_config.topk_group", 4),
        ("text_config.norm_topk_prob", False),
        ("text_config.scoring_func", "softmax"),
        ("text_config.topk_method", "greedy"),
        ("text_config.moe_router_dtype", "bfloat16"),
        ("text_config.moe_layer_freq", 2),
        ("text_config.head_dim", 64),
        ("text_config.qk_rope_head_dim", 64),
        ("text_config.mla_use_nope", False),
        ("text_config.mhc", False),
        ("text_config.mhc", 1),
        ("text_config.index_kpool_compress", False),
        ("text_config.index_kpool_always_select_tail", False),
        ("text_config.linear_attn_config.safe_gate", False),
        ("vision_config.hidden_act", "gelu"),
        ("vision_config.attention_bias", False),
        ("vision_config.rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_what_the_network_does_not_compute_is_refused_by_name(path, value):
    [problem] = problems(edited(path, value))
    shown = value["rope_type"] if isinstance(value, dict) else value
    where = f"{path}.rope_type" if isinstance(value, dict) else path
    assert problem.startswith(f"{where} is {shown!r}; this network computes only ")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.hidden_size", 0),
        ("text_config.hidden_size", True),
        ("text_config.hidden_size", 4096.0),
        ("text_config.rms_norm_eps", float("nan")),
        ("text_config.rms_norm_eps", float("inf")),
        ("text_config.rms_norm_eps", 0),
        ("text_config.linear_attn_config.gate_lower_bound", None),
        ("text_config.linear_attn_config.gate_lower_bound", 5.0),
        ("text_config.eos_token_id", None),
        ("text_config.eos_token_id", []),
        ("text_config.eos_token_id", [154820, "user"]),
        ("text_config.eos_token_id", -1),
        ("text_config.eos_token_id", True),
        ("text_config.layer_types", "linear_attention"),
        ("text_config.linear_attn_config", [1]),
        ("text_config.index_share_for_mtp_iteration", "yes"),
        ("text_config.num_nextn_predict_layers", -1),
        ("text_config", 3),
        ("vision_config", "none"),
        ("image_token_id", -5),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_was_expected(path, value):
    [problem] = problems(edited(path, value))
    assert problem.startswith(f"{path} is {value!r}, expected ")


def test_dtype_is_one_of_three_and_is_said_once():
    assert parse(edited("dtype", "float32")).dtype == "float32"
    assert parse(edited("torch_dtype", "bfloat16")).dtype == "bfloat16"
    assert "is not one dtype out of" in problems(edited("dtype", "int8"))[0]
    assert "is not one dtype out of" in problems(edited("torch_dtype", "float16"))[0]


def test_eos_may_be_one_integer():
    assert parse(edited("text_config.eos_token_id", 154827)).text.eos_token_ids == (154827,)


def test_both_names_of_the_sparse_layer_mean_the_same():
    config = released_config()
    renamed = [
        name.replace("deepseek_sparse", "indexed") for name in config["text_config"]["layer_types"]
    ]
    assert "indexed_attention" in renamed
    assert parse(edited("text_config.layer_types", renamed)) == parse(config)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("layer_types", "sliding_attention"),
        ("mlp_layer_types", "moe"),
        ("indexer_types", "shared"),
    ],
)
def test_a_layer_kind_we_do_not_have_is_refused_with_its_place(key, name):
    entries = list(released_config()["text_config"][key])
    entries[7] = name
    [problem] = problems(edited(f"text_config.{key}", entries))
    assert problem.startswith(f"text_config.{key}[7] is {name!r}; this network has ")


@pytest.mark.parametrize("key", ["layer_types", "mlp_layer_types", "indexer_types"])
def test_a_schedule_of_the_wrong_length_is_refused(key):
    entries = released_config()["text_config"][key]
    config = edited(f"text_config.{key}", entries[:-1])
    assert f"text_config.{key} has 44 entries, num_hidden_layers is 45" in problems(config)
    config = edited(f"text_config.{key}", [*entries, entries[-1]])
    assert f"text_config.{key} has 46 entries, num_hidden_layers is 45" in problems(config)


@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
def test_layer_lists_that_count_from_one_are_refused(key):
    listed = released_config()["text_config"]["linear_attn_config"][key]
    config = edited(f"text_config.linear_attn_config.{key}", [layer + 1 for layer in listed])
    [problem] = problems(config)
    assert problem.startswith(f"text_config.linear_attn_config.{key} is [")
    assert "(both count from 0)" in problem


def test_dense_layers_come_from_either_field_and_both_must_agree():
    expected = parse(released_config())
    assert parse(edited("text_config.mlp_layer_types", ...)) == expected
    assert parse(edited("text_config.first_k_dense_replace", ...)) == expected
    neither = edited("text_config.mlp_layer_types", ...)
    del neither["text_config"]["first_k_dense_replace"]
    assert problems(neither) == ["text_config.mlp_layer_types is missing"]
    [problem] = problems(edited("text_config.first_k_dense_replace", 4))
    assert problem == "text_config.first_k_dense_replace is 4, mlp_layer_types says otherwise"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (
            "text_config.qk_head_dim",
            192,
            "text_config.qk_head_dim is 192, qk_nope_head_dim + qk_rope_head_dim is 256",
        ),
        (
            "text_config.num_key_value_heads",
            8,
            "text_config.num_key_value_heads is 8, num_attention_heads is 64",
        ),
        (
            "text_config.index_kpool",
            5,
            "text_config.index_topk is 2048, no multiple of index_kpool, 5",
        ),
        (
            "text_config.index_kpool",
            128,
            "text_config.index_kpool is 128; it must divide a page of 64 tokens",
        ),
        (
            "text_config.num_nextn_predict_layers",
            2,
            "text_config.num_nextn_predict_layers is 2; this network has at most 1",
        ),
        (
            "text_config.eos_token_id",
            [154880],
            "text_config.eos_token_id[0] is 154880, vocab_size is 154880",
        ),
        (
            "text_config.pad_token_id",
            154880,
            "text_config.pad_token_id is 154880, vocab_size is 154880",
        ),
        ("image_token_id", 154900, "image_token_id is 154900, vocab_size is 154880"),
        (
            "vision_config.out_hidden_size",
            1536,
            "vision_config.out_hidden_size is 1536, text_config.hidden_size is 4096",
        ),
        (
            "vision_config.num_heads",
            15,
            "vision_config.hidden_size 1024 is no multiple of num_heads 15",
        ),
        (
            "vision_config.num_heads",
            512,
            "vision_config: a head is 2 wide, no multiple of 4 to rotate in 2-D",
        ),
    ],
)
def test_contradictions_are_refused_with_both_values(path, value, problem):
    assert problems(edited(path, value)) == [problem]


def test_more_experts_per_token_than_experts_is_refused_for_trunk_and_mtp():
    assert problems(edited("text_config.n_routed_experts", 7)) == [
        "text_config.num_experts_per_tok is 8, the trunk has 7 experts",
        "text_config.num_experts_per_tok is 8, the MTP layer has 7 experts",
    ]


def test_two_media_tokens_with_one_id_are_refused():
    [problem] = problems(edited("video_token_id", 154854))
    assert problem.startswith("two media tokens share an id")


def test_all_contradictions_come_in_one_error():
    config = edited("text_config.qk_head_dim", 1)
    config["text_config"]["index_kpool"] = 3
    config["vision_config"]["out_hidden_size"] = 2
    assert len(problems(config)) == 3


def test_text_only_config_has_no_vision_and_needs_no_media_rows():
    config = edited("vision_config", None)
    config["image_token_id"] = 2**20
    assert parse(config).vision is None


def test_flat_kda_fields_are_read_and_must_agree_with_nested_ones():
    flat = {
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
    }
    config = released_config()
    config["text_config"] |= flat
    assert parse(config) == parse(released_config())
    for key, value in flat.items():
        clash = deepcopy(config)
        clash["text_config"][key] = value * 2
        [problem] = problems(clash)
        assert problem.endswith(f"text_config.{key} is {value * 2!r}")
    del config["text_config"]["linear_attn_config"]
    assert parse(config) == parse(released_config())


def test_mtp_absent_from_config_means_none_and_asks_for_nothing():
    config = edited("text_config.num_nextn_predict_layers", ...)
    del config["text_config"]["index_share_for_mtp_iteration"]
    text = parse(config).text
    assert (text.num_mtp_layers, text.index_share_for_mtp_iteration) == (0, False)


@pytest.mark.parametrize("whole", [True, False], ids=["whole file", "text fields alone"])
def test_mtp_folder_may_have_another_number_of_experts(whole):
    trunk = edited("text_config.n_routed_experts", 224)
    mtp = released_config() if whole else released_config()["text_config"]
    text = parse(trunk, mtp).text
    assert (text.n_routed_experts, text.mtp_experts) == (224, 288)
    assert parse(trunk).text.mtp_experts == 224
    assert parse(trunk, {"n_routed_experts": 288}).text == text


def test_mtp_folder_may_differ_in_nothing_that_shapes_the_layer():
    mtp = edited("text_config.q_lora_rank", 1024)
    mtp["text_config"]["swiglu_limit"] = 7.0
    mtp["text_config"]["index_kpools"] = 4
    mtp["extra"] = 1
    del mtp["text_config"]["n_routed_experts"]
    assert sorted(problems(released_config(), mtp)) == [
        "mtp.extra is unknown",
        "mtp.text_config.index_kpools is unknown",
        "mtp.text_config.n_routed_experts is missing",
        "mtp.text_config.q_lora_rank is 1024, text_config.q_lora_rank is 1536",
        "mtp.text_config.swiglu_limit is 7.0, text_config.swiglu_limit is 10.0",
    ]


def test_vision_rope_base_is_read_where_it_is_given():
    rope = {"rope_type": "axial", "rope_theta": 500.0}
    assert parse(edited("vision_config.rope_parameters", rope)).vision.rope_theta == 500.0


def test_vision_block_epsilon_is_an_option():
    vision = parse(released_config()).vision
    assert replace(vision, block_norm_eps=1e-6).rms_norm_eps == 1e-5


def test_records_are_frozen():
    with pytest.raises(AttributeError):
        parse(tiny_config()).text.hidden_size = 1


def test_every_key_that_transformers_saves_is_accepted(tmp_path):
    pytest.importorskip("transformers", minversion="5.24", reason="the oracle is transformers 5.24")
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig as Theirs

    tiny = tiny_config()
    Theirs(**deepcopy(tiny)).save_pretrained(tmp_path / "released")
    saved = json.loads((tmp_path / "released" / "config.json").read_text())
    assert "indexed_attention" in saved["text_config"]["layer_types"]
    assert parse(saved) == parse(tiny)

    ids = {key: value for key, value in tiny.items() if key.endswith("token_id")}
    text = {"eos_token_id": 5, "index_kpool": 4}
    vision = {"out_hidden_size": 4096}
    Theirs(text_config=text, vision_config=vision, **ids).save_pretrained(tmp_path / "own")
    saved = json.loads((tmp_path / "own" / "config.json").read_text())
    assert "linear_attn_config" not in saved["text_config"]
    config = parse(saved)
    released = parse(released_config())
    assert config.text == replace(
        released.text,
        num_mtp_layers=0,
        index_share_for_mtp_iteration=False,
        eos_token_ids=(5,),
    )
    assert config.vision == released.vision


@pytest.mark.parametrize(
    "path",
    [
        "text_config.max_position_embeddings",
        "text_config.n_routed_experts",
        "text_config.num_hidden_layers",
        "text_config.hc_sinkhorn_iters",
        "text_config.swiglu_limit",
        "text_config.rms_norm_eps",
        "vision_config.depth",
    ],
)
@pytest.mark.parametrize("value", [2**40, 10**30])
def test_sizes_beyond_any_model_are_refused_before_they_cost_anything(path, value):
    started = time.monotonic()
    assert any(
        problem.startswith(f"{path} is {value}") for problem in problems(edited(path, value))
    )
    assert time.monotonic() - started < 2
