"""Every layout that a shipped recipe or a user's makes, to the tensor, and what its config says.

The published layouts of tests/helpers/published.py were written without the package: they are what
the plans are compared with.
"""

import json

import pytest

from emberbox.compress.recipe import load_recipe
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Part
from emberbox.model.weights import assign
from tests.helpers.plans import (
    CHECKPOINT,
    EXPERTS,
    LAYER,
    as_infos,
    layout_headers,
    plan_of,
    reasons,
    written,
)
from tests.helpers.published import LAYOUTS, entries
from tests.helpers.quantised_folder import nano_entries
from tests.helpers.released import MTP, released_config, released_infos

# -- released size ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published_plan():
    """base2-published from the FP8 release."""
    config = Glm5NextConfig.from_dict(released_config())
    return plan_of("base2-published", released_infos(fp8=True), config)


def test_the_published_file_comes_out_to_the_tensor_and_byte(published_plan):
    plain = {name: (info.dtype, info.shape) for name, info in released_infos(fp8=False).items()}
    assert (published_plan.num_tensors, published_plan.num_bytes) == (151_554, 85_128_745_176)
    expected = layout_headers(entries(LAYOUTS["whole-2.05"], plain, MTP))
    assert written(published_plan) == expected
    assert round(published_plan.average_bits, 4) == 2.0451
    assert published_plan.notes == ()


def test_its_config_says_what_the_published_one_says_but_for_what_is_always_done(published_plan):
    source = released_config()
    config = published_plan.config_json(source, {"rows": 250, "cols": 2048})
    assert source == released_config()
    assert config["quantization_config"] == {
        "quant_method": "exl3",
        "version": "1.4.4",
        "bits": 2.05,
        "head_bits": 5,
        "calibration": {"rows": 250, "cols": 2048},
        "out_scales": "always",
        "codebook": "mul1",
        "mtp_bits": 2,
        "vision_bits": 5,
        "original_quantization_config": source["quantization_config"],
    }
    assert config == source | {"quantization_config": config["quantization_config"]}


def test_the_fp8_recipe_makes_the_fp8_release():
    config = Glm5NextConfig.from_dict(released_config(fp8=False))
    plan = plan_of("fp8-block", released_infos(fp8=False), config)
    release = released_infos(fp8=True).values()
    assert written(plan) == {(info.name, info.dtype, info.shape) for info in release}
    found = plan.config_json(released_config(fp8=False))["quantization_config"]
    kept = found.pop("modules_to_not_convert")
    assert found == {
        k: v for k, v in released_config()["quantization_config"].items() if k in found
    }
    assert found.keys() == {"quant_method", "fmt", "weight_block_size", "activation_scheme"}
    assert {"lm_head", "model.visual.*", f"{LAYER}0.self_attn.*"} <= set(kept)
    assert {f"{LAYER}3.self_attn.kv_b_proj", f"{LAYER}3.self_attn.indexer.*"} <= set(kept)
    assert not any("experts" in name or ".mlp." in name for name in kept)


# -- every layout, from ember-nano -----------------------------------------------------------------


def test_the_whole_layout_of_nano_is_that_of_the_published_file():
    plan = plan_of("base2-published")
    assert written(plan) == layout_headers(nano_entries(LAYOUTS["whole-2.05"]))


@pytest.mark.parametrize("name", ["experts-2", "experts-2-3", "experts-4"])
def test_experts_alone_leave_the_rest_as_it_is(name):
    layout = LAYOUTS[name]
    text = f'{EXPERTS}format = "exl3"\ncodebook = "mcg"\nbits = {layout.rates["routed"]}\n'
    if layout.layer_rates:
        rule = text.replace("**.mlp.experts.**", "**.layers.[368].mlp.experts.**")
        text += rule.replace("bits = 2", "bits = 3")
    assert written(plan_of(text)) == layout_headers(nano_entries(layout), "mcg")


def test_nvfp4_is_the_published_one_without_scales_of_activations():
    plan = plan_of("nvfp4")
    headers = layout_headers(nano_entries(LAYOUTS["nvfp4"]))
    assert written(plan) == {header for header in headers if "input_scale" not in header[0]}
    found = plan.config_json(CHECKPOINT.config)["quantization_config"]
    assert (found["quant_method"], found["quant_algo"]) == ("modelopt", "NVFP4")
    assert f"{LAYER}8.*" in found["ignore"]  # the MTP layer
    assert f"{LAYER}2.mlp.shared_experts.*" in found["ignore"]
    assert not any(".mlp.experts" in name for name in found["ignore"])
    assert f"{LAYER}0.mlp.*" not in found["ignore"]
    assert plan.average_bits == 4.5


def test_projections_of_three_rates_need_to_be_allowed():
    layout = LAYOUTS["tiers"]
    text = load_recipe("base2").text.replace("bits = 2\n", "bits = 2.0\n", 1)
    for leaf, bits in (("up", 2.5), ("down", 3)):
        text += f'[[rule]]\nmatch = "**.experts.*.{leaf}_proj"\nformat = "exl3"\nbits = {bits}\n'
    (said,) = reasons(text)
    assert said == (
        "mlp.experts.gate_proj and up_proj: exl3 mul1 at 2 bits, exl3 mul1 at 2.5 bits within a "
        "layer (in 1, 2, 3, 4, 5, 6, 7, 8); other programs need one, allow_mixed_experts"
    )
    plan = plan_of("allow_mixed_experts = true\n" + "keep_fused_vision = true\n" + text)
    assert written(plan) == layout_headers(nano_entries(layout))


def test_one_expert_unlike_the_others_is_refused():
    text = EXPERTS + 'format = "exl3"\nbits = 2\n'
    text += '[[rule]]\nmatch = "**.layers.5.mlp.experts.3.down_proj"\nformat = "keep"\n'
    assert reasons(text) == [
        "mlp.experts.down_proj: exl3 mul1 at 2 bits, bf16 within a layer (in 5); other programs "
        "need one, allow_mixed_experts"
    ]


def test_base2_of_nano_is_what_other_programs_load():
    plan = plan_of("base2")
    assert plan.notes == ()
    rates = {}
    for item in plan.items:
        if item.stored.format == "exl3":
            assert all(size % 128 == 0 for size in item.shape)
            rates.setdefault((item.unit, item.projection), set()).add(item.stored.bits)
    assert all(len(found) == 1 for found in rates.values())
    for (unit, projection), found in rates.items():
        if projection.endswith("gate_proj"):
            assert found == rates[unit, projection.replace("gate", "up")]
    assert rates["layer-002", "mlp.experts.down_proj"] == rates["mtp", "eh_proj"] == {2}
    assert rates["layer-000", "self_attn.qkv_proj"] == rates["mtp", "self_attn.o_proj"] == {4}
    assert rates["layer-000", "mlp.up_proj"] == {3}
    assert rates["head", "lm_head"] == {6}
    assert rates["vision", "model.visual.blocks.0.attn.q_proj"] == {6}
    config = plan.config_json(CHECKPOINT.config, {"rows": 8, "cols": 512})["quantization_config"]
    assert (config["head_bits"], config["mtp_bits"], config["vision_bits"]) == (6, 2, 6)
    assert "original_quantization_config" not in config
    assert config["bits"] == 2.52  # 7.55 M weights in layers of the trunk, 5.51 M of them at 2


@pytest.mark.parametrize("name", ["base2", "base2.5", "base3", "base4", "nvfp4", "fp8-block"])
def test_our_own_loader_takes_every_tensor_of_every_shipped_recipe(name):
    plan = plan_of(name)
    config = Glm5NextConfig.from_dict(plan.config_json(CHECKPOINT.config, {"rows": 1, "cols": 1}))
    assignment = assign(config, as_infos(written(plan)))
    assert assignment.num_bytes == plan.num_bytes
    assert assignment.spare == ()
    assert assignment.parts == {Part.TRUNK, Part.MTP, Part.VISION}


def test_tensor_storage_lists_every_tensor_and_what_a_trellis_is():
    plan = plan_of("base2")
    storage = plan.tensor_storage()
    listed = [name for module in storage.values() for name in module["stored_tensors"]]
    assert sorted(listed) == sorted(name for name, _, _ in written(plan))
    expert = f"{LAYER}2.mlp.experts.7.down_proj"
    assert storage[expert] == {
        "stored_tensors": {
            f"{expert}.trellis": {"shape": [8, 8, 32], "n_bytes": 4096, "dtype": "torch.int16"},
            f"{expert}.suh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
            f"{expert}.svh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
            f"{expert}.mul1": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
        },
        "quant_format": "exl3",
        "bits_per_weight": 2,
        "mul1_multiplier": 0x83DCD12D,
    }
    bias = storage["model.visual.blocks.0.attn.q_proj"]["stored_tensors"]
    assert "model.visual.blocks.0.attn.q_proj.bias" in bias
    assert "quant_format" not in storage[f"{LAYER}0.input_layernorm"]
    json.dumps(storage)
