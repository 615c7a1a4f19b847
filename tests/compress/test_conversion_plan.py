"""What a recipe makes of a model, from headers: items, quantised sources, keep-maps, refusals."""

from dataclasses import replace
from math import prod

import pytest
import torch

from emberbox.compress.conversion_items import TensorSpec, computed_together
from emberbox.compress.quantize_fp8 import quantize_fp8
from emberbox.compress.quantize_nvfp4 import quantize_nvfp4
from emberbox.compress.recipe import Target, load_recipe
from emberbox.errors import LoadRefused
from emberbox.formats.dtypes import DTYPE_TAGS
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Part
from emberbox.model.weights import assign
from tests.helpers.plans import (
    CHECKPOINT,
    CONFIG,
    EXPERTS,
    INFOS,
    LAYER,
    as_infos,
    by_name,
    plan_of,
    reasons,
    written,
)
from tests.helpers.published import num_bytes

KEEP = "[keep.layers]\n" + "".join(f"{n} = [0, 3, 5, 8, 15]\n" for n in range(1, 9))


# -- items -----------------------------------------------------------------------------------------


def test_items_say_what_to_read_and_what_to_do():
    items = by_name(plan_of("base2-published"))
    at = f"{LAYER}0.self_attn."
    qkv = items[at + "qkv_proj"]
    assert (qkv.target, qkv.shape, qkv.rows) == (Target("exl3", 4.0, "mul1"), (768, 128), None)
    assert qkv.sources == (at + "q_proj", at + "k_proj", at + "v_proj")
    assert qkv.reads == (at + "q_proj.weight", at + "k_proj.weight", at + "v_proj.weight")
    assert qkv.outputs == (
        TensorSpec(at + "qkv_proj.trellis", "I16", (8, 48, 64)),
        TensorSpec(at + "qkv_proj.suh", "F16", (128,)),
        TensorSpec(at + "qkv_proj.svh", "F16", (768,)),
        TensorSpec(at + "qkv_proj.mul1", "I32", ()),
    )
    assert qkv.num_bytes == 768 * 128 * 4 // 8 + 2 * (768 + 128) + 4
    conv = items[at + "conv1d.weight"]
    assert (conv.target, conv.sources) == (
        Target("bf16"),
        tuple(f"{at}{x}_conv1d.weight" for x in "qkv"),
    )
    assert conv.outputs == (TensorSpec(at + "conv1d.weight", "BF16", (768, 1, 4)),)
    block = "model.visual.blocks.1.attn."
    for index, letter in enumerate("qkv"):
        for leaf, name in (("weight", f"{letter}_proj"), ("bias", f"{letter}_proj.bias")):
            third = items[block + name]
            assert list(third.rows) == list(range(128 * index, 128 * index + 128))
            assert third.reads == (f"{block}qkv.{leaf}",)
            assert third.shape[0] == 128
    assert items[block + "qkv"].target == items[block + "qkv.bias"].target == Target("keep")
    kv_b = items[f"{LAYER}3.self_attn.kv_b_proj"]
    assert (kv_b.target, kv_b.outputs[0].dtype) == (Target("bf16"), "F16")
    assert items[f"{LAYER}3.hc_attn_fn"].outputs[0].dtype == "F32"
    assert items[f"{LAYER}3.hc_attn_base"].target == Target("keep")


@pytest.mark.parametrize("name", ["nvfp4", "fp8-block"])
def test_the_rounding_formats_make_what_the_plan_announces(name):
    item = by_name(plan_of(name))[f"{LAYER}0.mlp.down_proj"]
    weight = torch.ones(item.shape)
    if name == "nvfp4":
        made = quantize_nvfp4({item.name: weight})[item.name]
    else:
        made = quantize_fp8(item.name, weight)
    names = made.format.part_names(item.name)
    specs = {
        TensorSpec(names[k], DTYPE_TAGS[t.dtype], tuple(t.shape)) for k, t in made.parts.items()
    }
    assert set(item.outputs) == specs
    assert made.num_bytes == item.num_bytes


def test_units_come_in_the_order_of_the_network_with_all_items():
    plan = plan_of("base2")
    groups = plan.groups()
    layers = [f"layer-{n:03d}" for n in range(8)]
    assert list(groups) == ["embedding", "vision", *layers, "head", "mtp"]
    assert [item for items in groups.values() for item in items] == list(plan.items)
    assert [item.name for item in groups["embedding"]] == [
        "model.language_model.embed_tokens.weight"
    ]
    assert {item.name for item in groups["head"]} == {
        "model.language_model.norm.weight",
        "lm_head",
    }
    assert {(item.part, item.layer) for item in groups["mtp"]} == {(Part.MTP, 8)}
    assert {(item.part, item.layer) for item in groups["vision"]} == {(Part.VISION, None)}
    assert {item.layer for item in groups["layer-003"]} == {3}


def test_gate_and_up_are_computed_together():
    plan = plan_of("nvfp4")
    sets = computed_together(plan.groups()["layer-002"])
    names = {tuple(item.projection for item in found) for found in sets if len(found) > 1}
    assert names == {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    }
    assert sum(len(found) for found in sets) == len(plan.groups()["layer-002"])
    assert all(
        len({item.name.split(".experts.")[-1][:2] for item in found}) == 1 for found in sets[-32:]
    )


def test_without_all_three_as_one_trellis_q_k_v_stay_split():
    text = load_recipe("base2").text
    text += f'[[rule]]\nmatch = "{LAYER}0.self_attn.k_proj"\nformat = "exl3"\nbits = 5\n'
    text += f'[[rule]]\nmatch = "{LAYER}1.self_attn.[qkv]_proj"\nformat = "keep"\n'
    names = by_name(plan_of(text))
    for layer in (0, 1):
        assert f"{LAYER}{layer}.self_attn.q_proj" in names
        assert f"{LAYER}{layer}.self_attn.q_conv1d.weight" in names
        assert f"{LAYER}{layer}.self_attn.qkv_proj" not in names
    assert f"{LAYER}2.self_attn.qkv_proj" in names


def test_the_digest_tells_plans_apart():
    texts = ["base2", "base3", "nvfp4", EXPERTS + 'format = "exl3"\nbits = 2\n']
    digests = [plan_of(text).digest for text in texts]
    assert len(set(digests)) == 4
    assert plan_of("base2").digest == digests[0]
    infos = dict(INFOS)
    name = f"{LAYER}0.input_layernorm.weight"
    infos[name] = replace(infos[name], dtype="F32")
    assert plan_of("base2", infos).digest != digests[0]


# -- sources that are quantised --------------------------------------------------------------------


def test_what_is_stored_as_asked_for_only_moves():
    made = written(plan_of("base2"))
    again = plan_of("base2", as_infos(made))
    assert written(again) == made
    assert {item.target.format for item in again.items} == {"keep"}
    assert all(item.reads == tuple(s.name for s in item.outputs) for item in again.items)
    config = {**CHECKPOINT.config, "quantization_config": {"quant_method": "exl3", "bits": 2.05}}
    assert again.config_json(config) == config


def test_another_rate_cannot_be_had_from_a_trellis():
    infos = as_infos(written(plan_of("base2")))
    assert reasons(EXPERTS + 'format = "exl3"\nbits = 3\n', infos) == [
        "rule 1 (line 1): 384 weights are stored as exl3 mul1 at 2 bits already and can only move, "
        f"the first {LAYER}1.mlp.experts.0.gate_proj; asked for was exl3 mul1 at 3 bits"
    ]


def test_the_fused_vision_weights_of_a_published_file_move_if_asked():
    made = written(plan_of("base2-published"))
    assert written(plan_of("base2-published", as_infos(made))) == made
    text = EXPERTS + 'format = "exl3"\nbits = 2\n'
    plan = plan_of(text, as_infos(made))
    assert plan.notes == ("6 tensors of the source fill no parameter and are left out",)
    assert {header[0] for header in made - written(plan)} == {
        f"model.visual.blocks.{n}.attn.qkv.{leaf}" for n in range(3) for leaf in ("weight", "bias")
    }


def test_block_fp8_is_decoded_or_moves():
    infos = as_infos(written(plan_of("fp8-block")))
    assert written(plan_of("base2", infos)) == written(plan_of("base2"))
    expert = by_name(plan_of("base2", infos))[f"{LAYER}1.mlp.experts.0.gate_proj"]
    assert expert.reads == (f"{expert.name}.weight", f"{expert.name}.weight_scale_inv")
    plan = plan_of(EXPERTS + 'format = "exl3"\nbits = 2\ncodebook = "mcg"\n', infos)
    shared = by_name(plan)[f"{LAYER}1.mlp.shared_experts.up_proj"]
    assert (shared.target, shared.stored) == (Target("keep"), Target("fp8_block"))
    original = {"quant_method": "fp8"}
    config = plan.config_json({**CHECKPOINT.config, "quantization_config": original})
    assert config["quantization_config"]["original_quantization_config"] == original
    assert config["quantization_config"]["codebook"] == "mcg"
    back = plan_of('[[rule]]\nmatch = "**"\nformat = "bf16"\n', infos)
    assert written(back) == {(info.name, info.dtype, info.shape) for info in INFOS.values()}
    assert "quantization_config" not in back.config_json({**CHECKPOINT.config})


def test_a_source_that_is_not_this_model_is_refused_first():
    infos = dict(INFOS)
    del infos["lm_head.weight"]
    with pytest.raises(LoadRefused, match=r"lm_head\.weight: missing"):
        plan_of("base2", infos)


# -- rules that do not fit -------------------------------------------------------------------------


def test_a_pattern_without_a_match_is_refused_with_the_nearest_name():
    text = EXPERTS + 'format = "exl3"\nbits = 2\n'
    text += '[[rule]]\nmatch = "**.self_atn.o_proj"\nformat = "nvfp4"\n'
    text += '[[rule]]\nmatch = "**.mlp.gate"\nformat = "nvfp4"\n'
    first, second = reasons(text)
    assert first == (
        "rule 2 (line 5): '**.self_atn.o_proj' matches no weight that can be converted; "
        "there is model.language_model.layers.*.self_attn.o_proj"
    )
    # The router is never quantised.
    assert second.startswith("rule 3 (line 8): '**.mlp.gate' matches no weight that can be")


def test_a_rule_for_a_part_the_model_lacks_is_no_mistake():
    config = {**CHECKPOINT.config, "vision_config": None}
    infos = {n: i for n, i in INFOS.items() if "visual" not in n and f"{LAYER}8." not in n}
    plan = plan_of("base2", infos, Glm5NextConfig.from_dict(config))
    assert {item.part for item in plan.items} == {Part.TRUNK}
    quantised = plan.config_json(config, {"rows": 1, "cols": 1})["quantization_config"]
    assert "mtp_bits" not in quantised
    assert "vision_bits" not in quantised


def test_sides_that_are_no_multiple_of_128_stay_and_are_told():
    text = '[[rule]]\nmatch = "**.self_attn.*_proj"\nattention = "kda"\nformat = "exl3"\nbits = 4\n'
    plan = plan_of(text)
    assert plan.notes == (
        "6 weights stay as they are, their sides do not divide as exl3 needs: "
        f"{LAYER}0.self_attn.b_proj [2, 128], {LAYER}1.self_attn.b_proj [2, 128], "
        f"{LAYER}2.self_attn.b_proj [2, 128], ...",
    )
    item = by_name(plan)[f"{LAYER}0.self_attn.b_proj"]
    assert (item.target, item.stored) == (Target("keep"), Target("bf16"))
    assert by_name(plan)[f"{LAYER}0.self_attn.f_a_proj"].target.format == "exl3"


def test_all_reasons_come_at_once():
    infos = as_infos(written(plan_of("base2")))
    text = EXPERTS + 'format = "nvfp4"\n[[rule]]\nmatch = "x"\nformat = "nvfp4"\n'
    assert len(reasons(text, infos)) == 2


# -- experts that go -------------------------------------------------------------------------------


def test_a_keep_map_cuts_experts_router_and_config():
    plan = plan_of(KEEP)
    config = Glm5NextConfig.from_dict(plan.config_json(CHECKPOINT.config))
    assert config.text.n_routed_experts == config.text.mtp_experts == 5
    assert CHECKPOINT.config["text_config"]["n_routed_experts"] == 16  # the source's is not changed
    assignment = assign(config, as_infos(written(plan)))
    assert assignment.num_bytes == plan.num_bytes
    gone = 8 * 11 * (3 * 128 * 128 * 2 + 128 * 2 + 4)  # layers, experts, matrices + router + bias
    assert plan.num_bytes == CHECKPOINT.num_bytes - gone
    items = by_name(plan)
    for layer in (1, 8):
        at = f"{LAYER}{layer}.mlp."
        for place, expert in enumerate((0, 3, 5, 8, 15)):
            item = items[f"{at}experts.{place}.up_proj"]
            assert item.reads == (f"{at}experts.{expert}.up_proj.weight",)
            assert item.outputs == (TensorSpec(f"{item.name}.weight", "BF16", (128, 128)),)
        router, bias = items[f"{at}gate.weight"], items[f"{at}gate.e_score_correction_bias"]
        assert router.rows == bias.rows == (0, 3, 5, 8, 15)
        assert (router.outputs[0].dtype, router.shape) == (INFOS[router.name].dtype, (5, 128))
        assert (bias.outputs[0].dtype, bias.shape) == ("F32", (5,))
        assert router.target == bias.target == Target("bf16")
    assert items[f"{LAYER}0.mlp.up_proj"].target == Target("keep")


def test_a_keep_map_goes_with_rates_and_with_trellises_that_move():
    cut = plan_of(load_recipe("base2").text + KEEP)
    moved = plan_of(KEEP, as_infos(written(plan_of("base2"))))
    assert written(cut) == written(moved)
    expert = by_name(moved)[f"{LAYER}4.mlp.experts.4.gate_proj"]
    assert expert.sources == (f"{LAYER}4.mlp.experts.15.gate_proj",)
    assert expert.target == Target("keep")
    assert [
        (read.rpartition(".")[2], spec.name.rpartition(".")[2])
        for read, spec in zip(expert.reads, expert.outputs, strict=True)
    ] == [(part, part) for part in ("trellis", "suh", "svh", "mul1")]


def test_a_map_of_all_experts_moves_everything():
    everyone = KEEP.replace("[0, 3, 5, 8, 15]", str(list(range(16))))
    plan = plan_of(everyone)
    assert {item.target for item in plan.items} == {Target("keep")}
    assert plan.num_bytes == CHECKPOINT.num_bytes


def test_a_map_that_does_not_fit_is_refused():
    assert reasons(KEEP.replace("8 = [0, 3, 5, 8, 15]\n", "8 = [0, 3, 5, 8]\n")) == [
        "keep: all layers must keep equally many experts, "
        "found 5 in layers 1, 2, 3, 4, 5, 6, 7; 4 in layers 8"
    ]


def test_one_config_cannot_speak_of_two_numbers_of_experts():
    text = replace(CONFIG.text, n_routed_experts=5)
    infos = as_infos(written(plan_of(KEEP)))
    whole = as_infos((i.name, i.dtype, i.shape) for i in INFOS.values() if f"{LAYER}8." in i.name)
    (said,) = reasons(EXPERTS + 'format = "nvfp4"\n', infos | whole, replace(CONFIG, text=text))
    assert said.startswith("the MTP layer has 16 experts, the others 5; ")


def test_sizes_are_the_sums_of_what_is_written():
    plan = plan_of("base3")
    assert plan.num_bytes == sum(num_bytes(dtype, shape) for _, dtype, shape in written(plan))
    assert all(item.num_weights == prod(item.shape) for item in plan.items)
