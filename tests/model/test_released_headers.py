"""The headers of both releases fit the network: nothing is left, the published totals come out."""

import time
from math import prod

import pytest

from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Kind, Part, parameter_table
from emberbox.model.weights import assign
from tests.helpers.released import released_config, released_infos, released_parts

CONFIG = Glm5NextConfig.from_dict(released_config())

# architecture.md 4
COUNTS = {
    "embeddings": 634_388_480,
    "lm_head": 634_388_480,
    "KDA attention": 4_682_897_792,
    "sparse MLA": 1_291_868_160,
    "indexer": 82_190_592,
    "dense FFN": 452_984_832,
    "router": 49_557_312,
    "shared expert": 1_056_964_608,
    "routed experts": 304_405_807_104,
    "mHC": 35_391_870,
    "layer norms": 372_736 - 4096,
    "final norm": 4096,
    "vision": 563_627_008,
    "MTP layer": 7_432_592_416,
}


@pytest.fixture(scope="module")
def fp8():
    return released_infos(fp8=True)


@pytest.fixture(scope="module")
def bf16():
    return released_infos(fp8=False)


@pytest.fixture(scope="module")
def table():
    return {parameter.name: parameter for parameter in parameter_table(CONFIG)}


@pytest.mark.parametrize("part", sorted(COUNTS))
def test_weights_of_each_part_number_as_published(part, table):
    names = [name for name, _, _ in released_parts()[part]]
    assert sum(prod(table[name].shape) for name in names) == COUNTS[part]


def test_table_has_exactly_the_released_names_and_shapes(table):
    released = {n: shape for tensors in released_parts().values() for n, shape, _ in tensors}
    assert {name: parameter.shape for name, parameter in table.items()} == released


def test_parameters_of_the_model_number_321_billion(table):
    def billions(*parts):
        return sum(prod(p.shape) for p in table.values() if p.part in parts) / 1e9

    assert round(billions(*Part), 2) == 321.32
    assert round(billions(Part.TRUNK), 2) == 313.33
    assert round(billions(Part.MTP), 2) == 7.43
    assert round(billions(Part.VISION), 3) == 0.564


def test_fp8_release_has_its_published_size(fp8):
    scales = [name for name in fp8 if name.endswith("_scale_inv")]
    assert len(fp8) == 76_108
    assert len(scales) == 37_338
    assert len(fp8) - 2 * len(scales) == 1_432
    assert round(sum(info.num_bytes for info in fp8.values()) / 1e9, 1) == 328.3


def test_bf16_release_has_its_published_size(bf16):
    assert len(bf16) == 37_338 + 1_432
    assert round(sum(info.num_bytes for info in bf16.values()) / 1e9, 1) == 642.6


def test_fp8_release_assigns_with_nothing_left_in_seconds(fp8):
    start = time.process_time()
    assignment = assign(CONFIG, fp8)
    seconds = time.process_time() - start
    assert {info.name for p in assignment.placements for info in p.infos()} == set(fp8)
    assert assignment.num_bytes == sum(info.num_bytes for info in fp8.values())
    assert assignment.spare == ()
    quantised = [piece for p in assignment.placements for piece in p.pieces if piece.is_quantised]
    assert len(quantised) == 37_338
    assert {piece.format.name for piece in quantised} == {"fp8_block"}
    assert seconds < 20  # measured 3 s; quadratic look-up would take minutes


def test_bf16_release_assigns_with_nothing_left(bf16):
    assignment = assign(CONFIG, bf16)
    assert {info.name for p in assignment.placements for info in p.infos()} == set(bf16)
    assert assignment.parts == frozenset(Part)
    assert not any(piece.is_quantised for p in assignment.placements for piece in p.pieces)


def test_the_parameters_that_must_stay_f32_are_these(table):
    leaves = {name.rpartition(".")[2] for name, p in table.items() if p.kind is Kind.FP32}
    assert leaves == {
        "A_log",
        "dt_bias",
        "e_score_correction_bias",
        "hc_attn_base",
        "hc_attn_scale",
        "hc_ffn_base",
        "hc_ffn_scale",
    }
    widened = {n.split(".", 4)[-1] for n, p in table.items() if p.kind is Kind.WIDENED}
    assert widened == {
        "mlp.gate.weight",
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
    }
