"""Strict loading: each way in which a checkpoint can be wrong is refused, and all at once."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from emberbox.errors import LoadRefused
from emberbox.formats import fp8_block
from emberbox.formats.base import QuantTensor
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Part, parameter_table
from emberbox.model.weights import assign, is_finite, load_parameters, parameters_from_dict
from emberbox.store.checkpoint import Checkpoint, open_checkpoint
from tests.helpers.tiny import tiny_config, tiny_tensors, write_folder

LAYERS = "model.language_model.layers."
KDA, SPARSE, MTP = LAYERS + "2.", LAYERS + "3.", LAYERS + "5."
BLOCK = "model.visual.blocks.1."
CONFIG = Glm5NextConfig.from_dict(tiny_config())
TENSORS = tiny_tensors(CONFIG)
MAIN = SPARSE + "mlp.experts.4.up_proj.weight"


def reasons(tensors, config=CONFIG):
    with pytest.raises(LoadRefused) as caught:
        parameters_from_dict(config, tensors, dtype=torch.bfloat16)
    return list(caught.value.reasons)


def changed(**tensors):
    """TENSORS with some replaced or added; None removes."""
    return {name: t for name, t in (TENSORS | tensors).items() if t is not None}


def load_folder(folder, dtype=torch.bfloat16):
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    return load_parameters(checkpoint, assignment, device="cpu", dtype=dtype)


def quantised(tensors, *names):
    """The same with these weights in block FP8."""
    tensors = dict(tensors)
    for name in names:
        parts = fp8_block.FORMAT.quantize(tensors.pop(name).float()).parts
        tensors[name], tensors[name + "_scale_inv"] = parts["weight"], parts["scale"]
    return tensors


def split_vision():
    at = BLOCK + "attn."
    tensors = dict(TENSORS)
    for leaf in ("weight", "bias"):
        thirds = tensors.pop(f"{at}qkv.{leaf}").chunk(3)
        tensors |= {f"{at}{x}_proj.{leaf}": t.clone() for x, t in zip("qkv", thirds, strict=True)}
    return at, tensors


# -- what is wrong is refused --------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_any_missing_tensor_is_named(name):
    assert reasons(changed(**{name: None})) == [f"{name}: missing"]


def test_unknown_tensors_are_named():
    extra = torch.zeros(2)
    names = ["lm_head.bias", KDA + "self_attn.rotary.inv_freq", MTP + "shared_head.head.weight"]
    assert reasons(changed(**dict.fromkeys(names, extra))) == [
        f"{name}: unknown to this network" for name in names
    ]


def test_a_name_that_could_write_to_a_terminal_is_escaped():
    assert reasons(changed(**{"\x1b[2Jx": torch.zeros(1)})) == [
        "'\\x1b[2Jx': unknown to this network"
    ]


@pytest.mark.parametrize(
    "name",
    [
        MAIN,
        KDA + "self_attn.q_conv1d.weight",
        KDA + "self_attn.A_log",
        KDA + "input_layernorm.weight",
        SPARSE + "mlp.gate.weight",
        SPARSE + "self_attn.indexer.index_kpool_compress_gate",
        "model.visual.patch_embed.proj.weight",
        BLOCK + "attn.qkv.bias",
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(name):
    right = TENSORS[name]
    wrong = torch.cat([right, right[:1]])
    assert reasons(changed(**{name: wrong})) == [
        f"{name}: shape {list(wrong.shape)}, expected {list(right.shape)}"
    ]


def test_a_transposed_matrix_is_refused():
    assert len(reasons(changed(**{MAIN: TENSORS[MAIN].T.contiguous()}))) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    "name",
    [
        KDA + "self_attn.A_log",
        KDA + "self_attn.dt_bias",
        KDA + "hc_attn_base",
        KDA + "hc_ffn_scale",
        SPARSE + "mlp.gate.e_score_correction_bias",
        MTP + "mlp.gate.e_score_correction_bias",
    ],
)
def test_what_must_stay_f32_is_refused_in_any_other_dtype(name, dtype):
    tag = {"bfloat16": "BF16", "float16": "F16", "float64": "F64"}[dtype]
    wrong = TENSORS[name].to(getattr(torch, dtype))
    assert reasons(changed(**{name: wrong})) == [f"{name}: dtype {tag}, expected F32"]


@pytest.mark.parametrize(
    "name",
    [
        MAIN,
        KDA + "hc_attn_fn",
        KDA + "self_attn.v_conv1d.weight",
        SPARSE + "mlp.gate.weight",
        "model.visual.downsample.bias",
    ],
)
def test_integers_are_not_weights(name):
    wrong = torch.zeros(TENSORS[name].shape, dtype=torch.int32)
    assert reasons(changed(**{name: wrong})) == [f"{name}: dtype I32, expected BF16 or F16 or F32"]


def test_an_fp8_weight_without_its_scale_is_refused_and_the_scale_named():
    tensors = quantised(TENSORS, MAIN)
    del tensors[MAIN + "_scale_inv"]
    assert reasons(tensors) == [
        f"{MAIN}: dtype F8_E4M3, expected BF16 or F16 or F32",
        f"{MAIN}_scale_inv: missing (part of fp8_block)",
    ]


def test_a_scale_beside_a_plain_weight_or_none_is_refused():
    scale = {MAIN + "_scale_inv": torch.ones(1, 1)}
    assert reasons(changed(**scale)) == [f"{MAIN}_scale_inv: unknown to this network"]
    assert reasons(changed(**scale, **{MAIN: None})) == [
        f"{MAIN}: missing",
        f"{MAIN}_scale_inv: unknown to this network",
    ]


def test_a_scale_of_the_wrong_shape_or_dtype_is_refused():
    tensors = quantised(TENSORS, MAIN)
    tensors[MAIN + "_scale_inv"] = torch.ones(2, 1, dtype=torch.bfloat16)
    assert reasons(tensors) == [
        f"{MAIN}_scale_inv: dtype BF16, expected F32",
        f"{MAIN}_scale_inv: shape [2, 1], expected [1, 1]",
    ]


@pytest.mark.parametrize(
    ("at", "fused", "split"),
    [
        (KDA + "self_attn.", "qkv_proj.weight", "{}_proj.weight"),
        (KDA + "self_attn.", "conv1d.weight", "{}_conv1d.weight"),
        (BLOCK + "attn.", "qkv.weight", "{}_proj.weight"),
        (BLOCK + "attn.", "qkv.bias", "{}_proj.bias"),
    ],
)
def test_fused_and_split_at_once_are_refused(at, fused, split):
    whole = TENSORS.get(at + fused)
    if whole is None:
        whole = torch.cat([TENSORS[at + split.format(x)] for x in "qkv"])
    pieces = {at + split.format(x): t for x, t in zip("qkv", whole.chunk(3), strict=True)}
    found = reasons(changed(**pieces, **{at + fused: whole}))
    assert found
    assert all(": stored beside " + at in reason for reason in found)
    one = at + split.format("k")
    assert any(
        one in reason for reason in reasons(changed(**{at + fused: whole, one: pieces[one]}))
    )


def test_a_split_form_with_a_piece_missing_is_refused():
    at, tensors = split_vision()
    del tensors[at + "k_proj.bias"]
    assert reasons(tensors) == [f"{at}k_proj.bias: missing"]


def test_all_reasons_of_one_folder_come_together():
    wrong = {
        MAIN: None,
        "lm_head.weight": TENSORS["lm_head.weight"][:90],
        KDA + "self_attn.A_log": TENSORS[KDA + "self_attn.A_log"].bfloat16(),
        "visual.extra": torch.zeros(1),
    }
    assert sorted(reason.split(": ")[1] for reason in reasons(changed(**wrong))) == [
        "dtype BF16, expected F32",
        "missing",
        "shape [90, 40], expected [96, 40]",
        "unknown to this network",
    ]


def test_no_tensors_at_all_is_refused():
    with pytest.raises(LoadRefused) as caught:
        assign(CONFIG, {})
    assert len(caught.value.reasons) == 1 + len(
        [name for name in TENSORS if not name.startswith(MTP)]
    )


# -- config and tensors contradict each other ----------------------------------------------------


def test_another_number_of_experts_is_refused_with_both_numbers():
    text = replace(CONFIG.text, n_routed_experts=8, mtp_experts=8)
    found = reasons(TENSORS, replace(CONFIG, text=text))
    assert found[0] == "the config has 8 routed experts, the tensors 6, in layer 1, 2, 3, 4, 5"
    assert f"{SPARSE}mlp.gate.weight: shape [6, 40], expected [8, 40]" in found
    assert f"{SPARSE}mlp.experts.7.down_proj.weight: missing" in found
    fewer = replace(CONFIG.text, n_routed_experts=5)
    found = reasons(TENSORS, replace(CONFIG, text=fewer))
    assert found[0] == "the config has 5 routed experts, the tensors 6, in layer 1, 2, 3, 4"
    assert f"{SPARSE}mlp.experts.5.up_proj.weight: unknown to this network" in found


def test_another_number_of_layers_is_refused_with_both_numbers():
    more = replace(
        CONFIG.text,
        num_hidden_layers=7,
        layer_is_sparse=(*CONFIG.text.layer_is_sparse, False, False),
        mlp_is_moe=(*CONFIG.text.mlp_is_moe, True, True),
    )
    found = reasons(TENSORS, replace(CONFIG, text=more))
    assert found[0] == (
        "text_config.num_hidden_layers is 7 (and 1 for MTP), the tensors are of 6 layers"
    )


def test_a_dense_layer_where_experts_are_stored_is_refused():
    text = replace(CONFIG.text, mlp_is_moe=(False, False, True, True, True))
    found = reasons(TENSORS, replace(CONFIG, text=text))
    assert found[0] == "the config has 0 routed experts, the tensors 6, in layer 1"


def test_another_vision_depth_is_refused_with_both_numbers():
    config = replace(CONFIG, vision=replace(CONFIG.vision, depth=3))
    found = reasons(TENSORS, config)
    assert found[0] == "vision_config.depth is 3, the tensors are of 2 blocks"


def test_vision_tensors_without_a_vision_config_are_refused_not_ignored():
    found = reasons(TENSORS, replace(CONFIG, vision=None))
    assert len(found) == sum(name.startswith("model.visual.") for name in TENSORS)
    why = {reason.split(": ")[1] for reason in found}
    assert why == {"unknown, the config has no vision_config"}


def test_an_mtp_layer_that_the_config_does_not_announce_is_refused_not_ignored():
    text = replace(CONFIG.text, num_mtp_layers=0)
    found = reasons(TENSORS, replace(CONFIG, text=text))
    mtp = [name for name in TENSORS if name.startswith(MTP)]
    for name in mtp:
        assert f"{name}: unknown, the config has num_nextn_predict_layers 0" in found


# -- the parts of the model ----------------------------------------------------------------------


def test_mtp_layer_may_be_absent_as_a_whole():
    trunk = {name: t for name, t in TENSORS.items() if not name.startswith(MTP)}
    loaded = parameters_from_dict(CONFIG, trunk, dtype=torch.bfloat16)
    assert not any(name.startswith(MTP) for name in loaded)
    assert loaded.keys() == {
        name
        for name in parameters_from_dict(CONFIG, TENSORS, dtype=torch.bfloat16)
        if not name.startswith(MTP)
    }


def test_mtp_layer_present_in_part_is_refused_by_every_missing_name():
    mtp = [name for name in TENSORS if name.startswith(MTP)]
    kept = MTP + "enorm.weight"
    found = reasons(changed(**{name: None for name in mtp if name != kept}))
    assert set(found) >= {f"{name}: missing" for name in mtp if name != kept}


def test_text_only_model_loads():
    text = {name: t for name, t in TENSORS.items() if not name.startswith("model.visual.")}
    loaded = parameters_from_dict(replace(CONFIG, vision=None), text, dtype=torch.bfloat16)
    assert "lm_head.weight" in loaded


def test_a_part_left_on_disk_is_accounted_for_as_spare(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_config(), TENSORS))
    whole = assign(CONFIG, checkpoint.tensors)
    assert whole.parts == frozenset(Part)
    assert whole.num_bytes == checkpoint.num_bytes
    assignment = whole.without(Part.MTP).without(Part.VISION)
    spare = {info.name for info in assignment.spare}
    assert spare == {n for n in TENSORS if n.startswith((MTP, "model.visual."))}
    assert assignment.num_bytes + sum(info.num_bytes for info in assignment.spare) == (
        checkpoint.num_bytes
    )
    loaded = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.bfloat16)
    assert assignment.parts == {Part.TRUNK}
    assert not any(name.startswith((MTP, "model.visual.")) for name in loaded)


def test_mtp_in_a_folder_of_its_own_may_have_another_number_of_experts(tmp_path):
    config = tiny_config()
    big = deepcopy(config)
    big["text_config"]["n_routed_experts"] = 9
    joint = Glm5NextConfig.from_dict(config, big)
    assert (joint.text.n_routed_experts, joint.text.mtp_experts) == (6, 9)
    tensors = tiny_tensors(joint)
    mtp = {name: t for name, t in tensors.items() if name.startswith(MTP)}
    trunk = {name: t for name, t in tensors.items() if not name.startswith(MTP)}
    write_folder(tmp_path, config, trunk)
    write_folder(tmp_path / "mtp", big, mtp)
    loaded = load_folder(tmp_path)
    assert loaded[MTP + "mlp.gate.weight"].shape == (9, 40)
    assert loaded[SPARSE + "mlp.gate.weight"].shape == (6, 40)
    assert MTP + "mlp.experts.8.up_proj.weight" in loaded
    (tmp_path / "mtp" / "config.json").unlink()
    with pytest.raises(LoadRefused) as caught:
        load_folder(tmp_path)
    expected = "the config has 6 routed experts, the tensors 9, in layer 5"
    assert caught.value.reasons[0] == expected


# -- what arrives in memory ----------------------------------------------------------------------


def test_values_and_dtypes_arrive_as_promised(tmp_path, poison_empty):
    loaded = load_folder(write_folder(tmp_path, tiny_config(), TENSORS))
    wide = (
        "A_log",
        "dt_bias",
        "correction_bias",
        "_base",
        "_scale",
        "gate.weight",
        "conv1d.weight",
    )
    for name, tensor in loaded.items():
        assert tensor.dtype is (torch.float32 if name.endswith(wide) else torch.bfloat16), name
        if name.endswith("conv1d.weight"):
            parts = [TENSORS[name.replace("conv1d", f"{x}_conv1d")][:, 0] for x in "qkv"]
            assert tensor.shape == (60, 4)
            assert torch.equal(tensor, torch.cat(parts).float())
        else:
            assert torch.equal(tensor, TENSORS[name].to(tensor.dtype)), name
    released = {p.name for p in parameter_table(CONFIG)}
    convs = {n for n in released if "_conv1d" in n}
    fused = {KDA.replace("2.", f"{i}.") + "self_attn.conv1d.weight" for i in (0, 2, 4)}
    assert loaded.keys() == released - convs | fused


def test_no_two_parameters_share_memory_with_the_read_buffer(tmp_path):
    loaded = load_folder(write_folder(tmp_path, tiny_config(), TENSORS))
    starts = [t.untyped_storage().data_ptr() for t in loaded.values()]
    assert len(set(starts)) == len(starts)


def test_activation_dtype_is_the_callers_and_what_is_wide_stays_wide(tmp_path):
    folder = write_folder(tmp_path, tiny_config(), TENSORS)
    for dtype, wide in ((torch.float32, torch.float32), (torch.float64, torch.float64)):
        loaded = load_folder(folder, dtype)
        assert loaded[MAIN].dtype is dtype
        assert loaded[KDA + "self_attn.A_log"].dtype is wide


def test_block_fp8_stays_quantised_and_decodes(tmp_path):
    names = [MAIN, SPARSE + "self_attn.o_proj.weight", KDA + "self_attn.q_proj.weight"]
    tensors = quantised(TENSORS, *names)
    loaded = load_folder(write_folder(tmp_path, tiny_config(), tensors))
    for name in names:
        weight = loaded[name]
        assert isinstance(weight, QuantTensor)
        assert weight.shape == tuple(TENSORS[name].shape)
        parts = {"weight": tensors[name], "scale": tensors[name + "_scale_inv"]}
        assert torch.equal(weight.decode(), fp8_block.decode(parts, weight.shape))
    assert not any(name.endswith("_scale_inv") for name in loaded)
    assert not isinstance(loaded[KDA + "self_attn.k_proj.weight"], QuantTensor)


def test_fused_kda_projection_and_convolution_load_as_stored():
    at = KDA + "self_attn."
    projection = torch.cat([TENSORS[f"{at}{x}_proj.weight"] for x in "qkv"])
    conv = torch.cat([TENSORS[f"{at}{x}_conv1d.weight"] for x in "qkv"])
    gone = {f"{at}{x}_{kind}.weight": None for x in "qkv" for kind in ("proj", "conv1d")}
    tensors = changed(**gone, **{at + "qkv_proj.weight": projection, at + "conv1d.weight": conv})
    loaded = parameters_from_dict(CONFIG, tensors, dtype=torch.bfloat16)
    split = parameters_from_dict(CONFIG, TENSORS, dtype=torch.bfloat16)
    assert torch.equal(loaded[at + "qkv_proj.weight"], projection)
    assert at + "q_proj.weight" not in loaded
    assert torch.equal(loaded[at + "conv1d.weight"], split[at + "conv1d.weight"])


def test_split_plain_vision_projections_are_fused():
    at, tensors = split_vision()
    loaded = parameters_from_dict(CONFIG, tensors, dtype=torch.bfloat16)
    assert torch.equal(loaded[at + "qkv.weight"], TENSORS[at + "qkv.weight"])
    assert torch.equal(loaded[at + "qkv.bias"], TENSORS[at + "qkv.bias"])
    assert at + "q_proj.weight" not in loaded
    assert at + "q_proj.bias" not in loaded


def test_split_quantised_vision_projections_keep_their_names_and_biases():
    at, tensors = split_vision()
    tensors = quantised(tensors, *(f"{at}{x}_proj.weight" for x in "qkv"))
    loaded = parameters_from_dict(CONFIG, tensors, dtype=torch.bfloat16)
    assert isinstance(loaded[at + "k_proj.weight"], QuantTensor)
    assert torch.equal(loaded[at + "k_proj.bias"], tensors[at + "k_proj.bias"])
    assert at + "qkv.weight" not in loaded
    assert at + "qkv.bias" not in loaded


def test_gradients_reach_the_tensors_of_a_dictionary():
    leaves = {name: t.float().requires_grad_() for name, t in TENSORS.items()}
    loaded = parameters_from_dict(CONFIG, leaves, dtype=torch.float32)
    sum(value.square().sum() for value in loaded.values()).backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * leaf.detach()), name
    assert loaded[MAIN] is leaves[MAIN]


def test_shared_expert_is_as_wide_as_the_shared_experts_together():
    config = replace(CONFIG, text=replace(CONFIG.text, n_shared_experts=2))
    shapes = {p.name: p.shape for p in parameter_table(config)}
    assert shapes[SPARSE + "mlp.shared_experts.up_proj.weight"] == (48, 40)
    assert shapes[SPARSE + "mlp.shared_experts.down_proj.weight"] == (40, 48)
    assert shapes[MAIN] == (24, 40)


def test_files_are_read_from_front_to_back(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_config(), TENSORS))
    read = []

    original = Checkpoint.read_as_it_is

    def recorded(self, info, buffer):
        read.append(info)
        original(self, info, buffer)

    monkeypatch.setattr(Checkpoint, "read_as_it_is", recorded)
    assignment = assign(CONFIG, checkpoint.tensors)
    load_parameters(checkpoint, assignment, device="cpu", dtype=torch.bfloat16)
    joined = [info for info in read if "_conv1d" in info.name]  # stored apart, needed together
    assert [info.start for info in read if info not in joined] == sorted(
        info.start for info in read if info not in joined
    )


def test_progress_counts_every_byte(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_config(), TENSORS))
    sizes = []
    assignment = assign(CONFIG, checkpoint.tensors)
    load_parameters(
        checkpoint, assignment, device="cpu", dtype=torch.bfloat16, on_bytes=sizes.append
    )
    assert sum(sizes) == checkpoint.num_bytes


# -- values --------------------------------------------------------------------------------------


def test_every_tensor_with_a_non_finite_value_is_named(tmp_path):
    tensors = {name: t.clone() for name, t in quantised(TENSORS, MAIN).items()}
    scaled = LAYERS + "4.mlp.experts.1.down_proj.weight"
    tensors = quantised(tensors, scaled)
    tensors[MAIN].view(torch.uint8)[3, 5] = 0xFF
    tensors[scaled + "_scale_inv"][0, 0] = float("inf")
    bad = [
        KDA + "self_attn.A_log",
        KDA + "self_attn.k_conv1d.weight",
        "lm_head.weight",
        "model.visual.merger.post_projection_norm.bias",
    ]
    for name, value in zip(bad, ("nan", "-inf", "inf", "nan"), strict=True):
        tensors[name].view(-1)[-1] = float(value)
    with pytest.raises(LoadRefused) as caught:
        load_folder(write_folder(tmp_path, tiny_config(), tensors))
    assert set(caught.value.reasons) == {
        f"{name}: holds NaN or infinity" for name in [*bad, MAIN, scaled + "_scale_inv"]
    }


def test_a_value_that_the_activation_dtype_cannot_hold_is_named(tmp_path):
    tensors = TENSORS | {MAIN: TENSORS[MAIN].clone()}
    tensors[MAIN][0, 0] = 1e5
    folder = write_folder(tmp_path, tiny_config(), tensors)
    load_folder(folder, torch.bfloat16)
    with pytest.raises(LoadRefused) as caught:
        load_folder(folder, torch.float16)
    assert caught.value.reasons == (f"{MAIN}: holds values that torch.float16 cannot hold",)


@given(
    st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]),
    st.integers(1, 70),
    st.data(),
)
def test_finiteness_is_decided_by_every_bit_pattern(name, size, data):
    dtype = getattr(torch, name)
    raw = data.draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)
    assert is_finite(values) is bool(torch.isfinite(values.float()).all())


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_both_fp8_nan_patterns_are_seen_and_no_other(byte):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    assert is_finite(finite.view(torch.float8_e4m3fn))
    spoiled = torch.cat([finite, torch.tensor([byte], dtype=torch.uint8)])
    assert not is_finite(spoiled.view(torch.float8_e4m3fn))


# -- what a refusal looks like -------------------------------------------------------------------


def test_hundreds_of_like_reasons_are_printed_as_one_line_each():
    gone = {name: None for name in TENSORS if ".experts." in name and name.startswith(LAYERS)}
    del gone[f"{LAYERS}3.mlp.experts.0.gate_proj.weight"]
    with pytest.raises(LoadRefused) as caught:
        parameters_from_dict(CONFIG, changed(**gone), dtype=torch.bfloat16)
    text = str(caught.value)
    assert len(caught.value.reasons) == len(gone) + 2  # and the two counts that disagree
    assert (
        f"  - {LAYERS}{{1..5}}.mlp.experts.{{0..5}}.up_proj.weight: missing (30 of these)\n" in text
    )
    assert f"  - {LAYERS}3.mlp.experts.{{1..5}}.gate_proj.weight: missing (5 of these)\n" in text
    assert (
        f"  - {LAYERS}{{1..2,4..5}}.mlp.experts.{{0..5}}.gate_proj.weight: missing (24 of these)\n"
        in text
    )
    assert len(text.splitlines()) < 12


def test_a_long_refusal_is_cut_in_print_and_whole_in_reasons():
    names = [f"stray_{letter}" for letter in map(str, range(100))]
    found = LoadRefused("here", [f"{name}: unknown" for name in names], hint="look")
    assert len(found.reasons) == 100
    assert "stray_59: unknown" in str(found)
    assert "stray_60: unknown" not in str(found)
    assert str(found).endswith("  - and 40 more lines (see .reasons)\nhint: look")


@pytest.mark.parametrize("number", ["01", "1" * 6000])
def test_strange_numbers_in_names_are_printed_as_they_are(number):
    reason = f"layers.{number}.x: unknown"
    assert reason[:300] in str(LoadRefused("here", [reason]))


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_gathered_lines_stand_for_exactly_the_reasons(pairs):
    text = str(LoadRefused("here", [f"a.{i}.b.{j}: missing" for i, j in sorted(pairs)]))
    said = set()
    for line in text.splitlines()[1:]:
        left, right = line.removeprefix("  - a.").split(": ")[0].split(".b.")
        new = {(i, j) for i in expanded(left) for j in expanded(right)}
        assert not said & new
        said |= new
    assert said == pairs


def expanded(text):
    """The numbers of "3" or "{0..2,7}"."""
    for run in text.strip("{}").split(","):
        first, _, last = run.partition("..")
        yield from range(int(first), int(last or first) + 1)


# -- files of others -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory):
    """The tiny model, built and saved by transformers in fp32, then loaded and saved in BF16."""
    pytest.importorskip("transformers", minversion="5.24", reason="the oracle is transformers 5.24")
    from transformers.models.glm5_next import modeling_glm5_next as theirs
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig as Theirs

    folder = tmp_path_factory.mktemp("transformers")
    torch.manual_seed(3)
    model = theirs.Glm5NextForConditionalGeneration(Theirs(**tiny_config()))
    model.save_pretrained(folder / "fp32")
    short = theirs.Glm5NextForConditionalGeneration.from_pretrained(
        folder / "fp32", dtype=torch.bfloat16
    )
    short.save_pretrained(folder / "bf16")
    short.to(torch.bfloat16).save_pretrained(folder / "rounded")
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_saved_by_transformers_loads_with_nothing_left(transformers_folder, dtype):
    folder = transformers_folder / dtype
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config)
    assignment = assign(config, checkpoint.tensors)
    names = {info.name for p in assignment.placements for info in p.infos()}
    assert names == set(checkpoint.tensors)
    assert assignment.parts == {Part.TRUNK, Part.VISION}
    loaded = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.float32)
    assert loaded[KDA + "self_attn.conv1d.weight"].shape == (60, 4)


def test_a_model_that_was_rounded_to_bf16_as_a_whole_is_refused(transformers_folder):
    checkpoint = open_checkpoint(transformers_folder / "rounded")
    config = Glm5NextConfig.from_dict(checkpoint.config)
    with pytest.raises(LoadRefused) as caught:
        assign(config, checkpoint.tensors)
    assert f"{KDA}hc_attn_base: dtype BF16, expected F32" in caught.value.reasons
    assert all(reason.endswith("dtype BF16, expected F32") for reason in caught.value.reasons)
    assert len(caught.value.reasons) == 5 * 4 + 3 * 2 + 4


def test_config_json_in_a_folder_is_the_one_that_counts(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path, config, TENSORS)
    config["text_config"]["vocab_size"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LoadRefused, match=r"lm_head.weight: shape \[96, 40\], expected \[100, 40\]"
    ):
        load_folder(folder)


def test_shards_are_read_from_the_files_that_hold_them(tmp_path):
    names = sorted(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    for file, members in shards.items():
        save_file({name: TENSORS[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    loaded = load_folder(tmp_path)
    assert torch.equal(loaded[MAIN], TENSORS[MAIN])
    assert torch.equal(
        loaded[KDA + "self_attn.conv1d.weight"][20:40],
        TENSORS[KDA + "self_attn.k_conv1d.weight"][:, 0].float(),
    )
