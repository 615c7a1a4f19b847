"""The vision tower against transformers' implementation, and the mistakes that must be visible."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn.functional import gelu

from emberbox.errors import OpError
from emberbox.formats import fp8_block
from emberbox.model import vision
from emberbox.model.config import Glm5NextConfig, VisionConfig
from emberbox.model.parameters import VISUAL
from emberbox.model.vision import VisionTower, positions, rotary_angles
from emberbox.ops.numerics import relative_error
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.table import OpTable, bind_all
from emberbox.ops.vision_attention.reference import rotate

pytest.importorskip("transformers", minversion="5.24", reason="the oracle is transformers 5.24")
from transformers.models.glm5_next.configuration_glm5_next import (
    Glm5NextVisionConfig,
)
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

NANO = Path(__file__).parents[2] / "models" / "ember-nano"
TOLERANCE = 2e-5  # largest difference over the features' rms, float32; measured up to 5e-6
OPS = OpTable.reference()
SMALL = 0.005  # about sqrt(eps): the residual stays so small that each epsilon changes the result

CONFIG = VisionConfig(
    depth=3,
    hidden_size=60,
    num_heads=5,
    intermediate_size=70,
    out_hidden_size=44,
    projection_intermediate_size=52,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    in_channels=3,
    rms_norm_eps=3e-5,
    block_norm_eps=3e-5,
    swiglu_limit=0.8,
    rope_theta=10000.0,
)
IMAGES = ((1, 6, 10), (1, 2, 2), (1, 8, 4))
VIDEOS = ((3, 4, 6), (1, 4, 2), (2, 2, 8))


def random_weight(name, shape, generator):
    x = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.3 * x
    scale = 0.5 if name.endswith("bias") else x[0].numel() ** -0.5
    if "patch_embed" in name or "mlp.down_proj" in name:
        scale *= SMALL
    if "attn.proj" in name:
        scale *= 2 * SMALL
    if "attn.qkv" in name or "merger.proj" in name:
        scale *= 0.02  # below the q, k norms and the LayerNorm: their epsilon counts
    if "gate_proj" in name or "up_proj" in name:
        scale *= 2.0  # the clamp is reached
    return x * scale


def oracle_for(config):
    names = {field.name for field in fields(config)} - {"block_norm_eps", "rope_theta"}
    known = {name: getattr(config, name) for name in names}
    known["rope_parameters"] = {"rope_type": "axial", "rope_theta": config.rope_theta}
    return Glm5NextVisionModel(Glm5NextVisionConfig(**known)).eval()


@pytest.fixture(scope="module")
def oracle():
    model = oracle_for(CONFIG)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weight(name, parameter.shape, generator))
    return model


def params_of(model):
    return {VISUAL + name: p.detach().clone() for name, p in model.named_parameters()}


def pixels(grids, seed=0):
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, 1176, generator=torch.Generator().manual_seed(seed))


def oracle_features(model, x, grids):
    return model(x, torch.tensor(grids)).pooler_output


def error(found, expected):
    assert found.shape == expected.shape
    assert bool(found.isfinite().all())
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


@pytest.mark.parametrize("ops", [OPS, bind_all(torch.device("cpu"))], ids=["plain", "bound"])
@pytest.mark.parametrize("grids", [IMAGES, VIDEOS, ((1, 2, 4),)], ids=["images", "videos", "one"])
@torch.no_grad()
def test_features_are_those_of_transformers(oracle, grids, ops):
    x = pixels(grids)
    expected = oracle_features(oracle, x, grids)
    found = VisionTower(CONFIG, ops, params_of(oracle)).forward(x, grids)
    assert error(found, expected) < TOLERANCE


def test_gradients_of_all_parameters_are_those_of_transformers(oracle):
    grids = VIDEOS
    x, params = pixels(grids), params_of(oracle)
    for p in params.values():
        p.requires_grad_()
    tower = VisionTower(CONFIG, OPS, params)
    cotangent = torch.randn(28, 44, generator=torch.Generator().manual_seed(1))
    tower.forward(x, grids).sum().backward()
    with torch.no_grad():  # a tower built once serves many steps of an optimizer
        for p, wanted in zip(params.values(), oracle.parameters(), strict=True):
            p.mul_(2)
            p.copy_(wanted)
    found = torch.autograd.grad((tower.forward(x, grids) * cotangent).sum(), params.values())
    expected = torch.autograd.grad(
        (oracle_features(oracle, x, grids) * cotangent).sum(), oracle.parameters()
    )
    for name, f, e in zip(params, found, expected, strict=True):
        assert relative_error(f, e) < 1e-4, name


@torch.no_grad()
def test_bf16_is_no_further_from_float32_than_transformers_bf16(oracle):
    grids = IMAGES
    x, low = pixels(grids), torch.bfloat16
    expected = oracle_features(oracle, x, grids)
    params = {name: p.to(low) for name, p in params_of(oracle).items()}
    found = VisionTower(CONFIG, OPS, params).forward(x.to(low), grids)
    other = oracle_for(CONFIG)
    other.load_state_dict(oracle.state_dict())
    theirs = oracle_features(other.to(low), x.to(low), grids)
    assert found.dtype == low
    limit = relative_error(theirs, expected)
    assert 1e-3 < limit < 0.1
    assert relative_error(found, expected) < 1.25 * limit


# ------------------------------------------------------------------ mistakes


def attention_with(normalise_q=True, normalise_k=True, rotate_first=False, interleaved=False):
    """Segment attention with one thing done differently."""

    def turn(x, angles):
        if not interleaved:
            return rotate(x, angles)
        order = torch.arange(x.shape[-1]).view(2, -1).T.flatten()
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(halves, angles)[..., order]

    def prepare(x, weight, angles, eps, normalise):
        norm = (lambda y: rms_norm(y, weight, eps)) if normalise else (lambda y: y)
        return norm(turn(x, angles)) if rotate_first else turn(norm(x), angles)

    def attend(qkv, q_weight, k_weight, angles, lengths, eps):
        q, k, v = qkv.unbind(1)
        q = prepare(q, q_weight, angles, eps, normalise_q)
        k = prepare(k, k_weight, angles, eps, normalise_k)
        parts = zip(*(p.split(list(lengths)) for p in (q, k, v)), strict=True)
        return torch.cat(
            [
                torch.nn.functional.scaled_dot_product_attention(*(p.transpose(0, 1) for p in part))
                for part in parts
            ],
            dim=1,
        ).transpose(0, 1)

    return replace(OPS, vision_attention=attend)


def symmetric_gate(gate, up, limit):
    return OPS.swiglu(gate.clamp(min=-limit), up, limit)


def transposed_blocks(params):
    name = f"{VISUAL}downsample.weight"
    return {**params, name: params[name].transpose(-1, -2)}


def raster_positions(grids, merge):
    del merge
    return torch.cat([torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in grids])


def swapped_positions(grids, merge):
    return positions(grids, merge).flip(-1)


def tanh_gelu(x):
    return gelu(x, approximate="tanh")


# Each turns the arguments of VisionTower, or a name of its module, into a mistaken one.
MISTAKES = {
    "theta": {"config": replace(CONFIG, rope_theta=1000.0)},
    "no clamp": {"config": replace(CONFIG, swiglu_limit=1e9)},
    "block norm eps 1e-6": {"config": replace(CONFIG, block_norm_eps=1e-6)},
    "other norms' eps 1e-6": {"config": replace(CONFIG, rms_norm_eps=1e-6)},
    "symmetric gate clamp": {"ops": replace(OPS, swiglu=symmetric_gate)},
    "no q norm": {"ops": attention_with(normalise_q=False)},
    "no k norm": {"ops": attention_with(normalise_k=False)},
    "norm after rotation": {"ops": attention_with(rotate_first=True)},
    "interleaved rotation": {"ops": attention_with(interleaved=True)},
    "block patches transposed": {"params": transposed_blocks},
    "rows and columns swapped": {"module": {"positions": swapped_positions}},
    "rotary in raster order": {"module": {"positions": raster_positions}},
    "gelu by tanh": {"module": {"gelu": tanh_gelu}},
    "merger norm follows rms_norm_eps": {"module": {"MERGER_NORM_EPS": CONFIG.rms_norm_eps}},
}


@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_mistakes_are_visible(oracle, mistake, monkeypatch):
    x = pixels(IMAGES)
    expected = oracle_features(oracle, x, IMAGES)
    change = MISTAKES[mistake]
    for name, value in change.get("module", {}).items():
        monkeypatch.setattr(vision, name, value)
    params = change.get("params", dict)(params_of(oracle))
    tower = VisionTower(change.get("config", CONFIG), change.get("ops", OPS), params)
    assert error(tower.forward(x, IMAGES), expected) > 20 * TOLERANCE


@torch.no_grad()
def test_the_attention_written_for_mistakes_is_right_without_one(oracle):
    x = pixels(IMAGES)
    tower = VisionTower(CONFIG, attention_with(), params_of(oracle))
    assert error(tower.forward(x, IMAGES), oracle_features(oracle, x, IMAGES)) < TOLERANCE


@torch.no_grad()
def test_patches_in_raster_order_give_other_features(oracle):
    h, w = 6, 10
    grids = ((1, h, w),)
    x = pixels(grids)
    raster = x.view(h // 2, w // 2, 2, 2, -1).transpose(1, 2).reshape(h * w, -1)
    tower = VisionTower(CONFIG, OPS, params_of(oracle))
    assert error(tower.forward(raster, grids), oracle_features(oracle, x, grids)) > 0.1


@torch.no_grad()
def test_slices_of_a_video_do_not_see_each_other_but_patches_of_a_slice_do(oracle):
    tower = VisionTower(CONFIG, OPS, params_of(oracle))
    grids = ((2, 4, 6),)
    x = pixels(grids)
    found = tower.forward(x, grids)
    assert error(found, tower.forward(x, ((1, 4, 6), (1, 4, 6)))) == 0.0
    together = tower.forward(x, ((1, 8, 6),))
    assert error(found, together) > 0.01
    y = x.clone()
    y[0] += 1.0  # one patch of the first slice
    moved = (tower.forward(y, grids) != found).any(-1)
    assert moved.tolist() == [True] * 6 + [False] * 6


# ------------------------------------------------------------------ properties

side = st.integers(1, 4).map(lambda n: 2 * n)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(grids=st.lists(st.tuples(st.integers(1, 3), side, side), min_size=2, max_size=4))
@torch.no_grad()
def test_features_of_an_image_do_not_depend_on_the_others(oracle, grids):
    tower = VisionTower(CONFIG, OPS, params_of(oracle))
    x = pixels(grids)
    sizes = [t * h * w for t, h, w in grids]
    together = tower.forward(x, grids).split([n // 4 for n in sizes])
    for part, grid, features in zip(x.split(sizes), grids, together, strict=True):
        assert error(features, tower.forward(part, (grid,))) < TOLERANCE
    x[: sizes[0]] = float("nan")
    poisoned = tower.forward(x, grids).split([n // 4 for n in sizes])
    assert all(torch.equal(a, b) for a, b in zip(poisoned[1:], together[1:], strict=True))


def test_positions_are_block_major_and_restart_in_every_slice():
    block_row = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert positions(((1, 2, 4),), 2).tolist() == block_row
    assert positions(((2, 2, 4),), 2).tolist() == block_row * 2
    assert positions(((1, 4, 2),), 2).tolist()[4:] == [[2, 0], [2, 1], [3, 0], [3, 1]]


def test_angles_are_row_frequencies_then_column_frequencies():
    angles = rotary_angles(torch.tensor([[3, 5]]), head_dim=8, theta=100.0)
    assert torch.allclose(angles, torch.tensor([[3.0, 0.3, 5.0, 0.5]]))


# ------------------------------------------------------------------ operands and errors


def split_qkv(params):
    """The fused projection as three, the form some quantised checkpoints keep."""
    result = {}
    for name, value in params.items():
        if ".attn.qkv." in name:
            for part, rows in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
                result[name.replace("qkv", part)] = rows
        else:
            result[name] = value
    return result


def is_linear(name, value):
    return name.endswith(".weight") and value.dim() > 1


@pytest.mark.parametrize("prepare", [dict, split_qkv], ids=["fused", "split"])
@torch.no_grad()
def test_quantised_weights_give_the_features_of_their_decoded_form(oracle, prepare):
    plain = prepare(params_of(oracle))
    quantised = {
        name: fp8_block.FORMAT.quantize(value.flatten(1)) if is_linear(name, value) else value
        for name, value in plain.items()
    }
    decoded = {
        name: quantised[name].decode().view(value.shape) if is_linear(name, value) else value
        for name, value in plain.items()
    }
    x = pixels(VIDEOS)
    found = VisionTower(CONFIG, OPS, quantised).forward(x, VIDEOS)
    assert torch.equal(found, VisionTower(CONFIG, OPS, decoded).forward(x, VIDEOS))
    assert error(found, oracle_features(oracle, x, VIDEOS)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("rows", "width", "grids", "message"),
    [
        (12, 1176, ((1, 4, 4),), r"pixel_values are \(12, 1176\).* ask for \(16, 1176\)"),
        (16, 1175, ((1, 4, 4),), r"ask for \(16, 1176\)"),
        (12, 1176, ((1, 4, 3),), r"grid \(1, 4, 3\) is not made of whole 2 x 2 blocks"),
        (0, 1176, ((0, 4, 4),), r"grid \(0, 4, 4\)"),
        (0, 1176, (), r"the grids \[\]"),
    ],
)
def test_patches_that_do_not_fit_the_grids_are_refused(oracle, rows, width, grids, message):
    tower = VisionTower(CONFIG, OPS, params_of(oracle))
    with pytest.raises(OpError, match=message):
        tower.forward(torch.zeros(rows, width), grids)


# ------------------------------------------------------------------ the shipped model


@torch.no_grad()
def test_the_nano_tower_is_that_of_transformers():
    data = json.loads((NANO / "config.json").read_text())
    config = Glm5NextConfig.from_dict(data).vision
    model = oracle_for(config)
    params = {}
    for path in sorted(NANO.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(VISUAL)]  # noqa: SIM118
            params.update({name: file.get_tensor(name).float() for name in names})
    model.load_state_dict({name.removeprefix(VISUAL): value for name, value in params.items()})
    grids = ((1, 8, 8), (1, 4, 10), (2, 6, 4))
    x = pixels(grids)
    x[:64] = torch.tensor(0.3)  # a plain picture beside noisy ones
    x[20:31] = -1.5
    found = VisionTower(config, OPS, params).forward(x, grids)
    expected = oracle_features(model, x, grids)
    assert error(found, expected) < TOLERANCE
    for limit in (2.0, 1e9):  # the trained tower reaches the clamp
        other = VisionTower(replace(config, swiglu_limit=limit), OPS, params).forward(x, grids)
        assert error(other, expected) > 20 * TOLERANCE
