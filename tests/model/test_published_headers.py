"""Headers of published quantised files, at the released size: every tensor finds its place."""

import re
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from emberbox.model.config import Glm5NextConfig
from emberbox.model.weights import assign
from emberbox.store.safetensors_header import TensorInfo
from tests.helpers.published import LAYOUTS, entries, num_bytes
from tests.helpers.published_config import json_files
from tests.helpers.released import MTP, released_config, released_infos

# Tensors and bytes of each layout. The first is the published file to the byte; the others come out
# at the size their authors state.
TOTALS = {
    "whole-2.05": (151_554, 85_128_745_176),
    "mosaic": (151_554, 96_000_381_144),  # 96.1 GB with headers and index, 0.1 GB as of 2.05
    "experts-2": (150_226, 97_709_588_472),  # 97.7 GB
    "experts-2-3": (150_226, 103_145_406_456),  # 103.2 GB with headers and index
    "experts-4": (150_226, 175_622_979_576),  # 175.6 GB, 164 GiB
    "nvfp4": (147_661, 204_412_430_784),  # 190.4 GiB; see the tests of its size
}
# Of 3.05 the rates of every module are published, and as sizes 122.286 and 129.5 GB; the rates give
# neither. The first lies between them with and without the MTP layer, 0.056 GB above the latter,
# and no rate of head, tower or MTP layer, nor leaving out the tower's plain copies, gives it.
WHOLE_3, WHOLE_3_MTP = 125_091_680_472, 2_862_179_364
FILE = Path("release", "model.safetensors")
CONFIG = Glm5NextConfig.from_dict(released_config(fp8=False))
QUANTISED = {"whole": 37_592, "experts": 37_152, "nvfp4": 36_297}
FORMATS = {"nvfp4": "nvfp4", "nvfp4-reciprocal": "nvfp4_reciprocal"}


@pytest.fixture(scope="module")
def plain():
    return {name: (info.dtype, info.shape) for name, info in released_infos(fp8=False).items()}


def headers(layout, plain):
    return {
        name: TensorInfo(name, dtype, shape, FILE, 0, num_bytes(dtype, shape))
        for entry in entries(layout, plain, MTP)
        for name, dtype, shape in entry.headers(layout.marker)
    }


def files_of(layout, plain):
    """The JSON files of a layout at the released size."""
    made = list(entries(layout, plain, MTP))
    return json_files(layout, made, released_config(fp8=False), MTP)


def sizes(layout, plain):
    return {
        name: num_bytes(dtype, shape)
        for entry in entries(layout, plain, MTP)
        for name, dtype, shape in entry.headers(layout.marker)
    }


@pytest.mark.parametrize("name", TOTALS)
def test_a_layout_has_its_published_number_of_tensors_and_bytes(name, plain):
    stored = [
        h for e in entries(LAYOUTS[name], plain, MTP) for h in e.headers(LAYOUTS[name].marker)
    ]
    assert len({name for name, _, _ in stored}) == len(stored)
    assert (len(stored), sum(num_bytes(*header[1:]) for header in stored)) == TOTALS[name]


def test_the_census_of_the_whole_file_is_the_published_one(plain):
    made = list(entries(LAYOUTS["whole-2.05"], plain, MTP))
    names = [name for entry in made for name, _, _ in entry.headers("mul1")]
    assert sum(f".layers.{MTP}." in name for name in names) == 3_508
    sizes = {name: num_bytes(*h) for entry in made for name, *h in entry.headers("mul1")}
    assert round(sum(b for n, b in sizes.items() if f".layers.{MTP}." in n) / 1e9, 3) == 1.936
    experts = sum(b for n, b in sizes.items() if ".mlp.experts." in n)
    assert round(experts / 1e9, 2) == 78.37
    assert round((sum(sizes.values()) - experts) / 1e9, 2) == 6.76
    vision = [e for e in made if e.scheme == "exl3" and "visual" in e.name]
    assert len(vision) == 172
    assert sum(".mlp.experts." in e.name for e in made if e.scheme == "exl3") == 37_152
    split = [n for n in names if "visual" in n and any(f"attn.{x}_proj." in n for x in "qkv")]
    assert len(split) == 360  # q, k, v of the tower stored split, beside the fused ones
    assert sum(entry.is_duplicate for entry in made) == 48


def test_the_published_size_of_3_05_lies_between_its_rates_with_and_without_the_mtp_layer(plain):
    found = sizes(LAYOUTS["whole-3.05"], plain)
    mtp = sum(size for name, size in found.items() if f".layers.{MTP}." in name)
    assert (len(found), sum(found.values()), mtp) == (151_554, WHOLE_3, WHOLE_3_MTP)
    assert WHOLE_3 - WHOLE_3_MTP < 122.286e9 < WHOLE_3


@pytest.mark.parametrize(
    ("kept", "unit", "published"),
    [(224, 1e9, 151.5), (224, 2**30, 141), (256, 1e9, 170.5), (256, 2**30, 159)],
)
def test_nvfp4_has_the_published_sizes_of_its_builds_with_fewer_experts(
    kept, unit, published, plain
):
    """Their MTP layer is a folder of its own. (Of 192 experts 124 GiB are stated; 123.4 here.)"""
    expert = re.compile(r"\.experts\.(\d+)\.")
    size = sum(
        size
        for name, size in sizes(LAYOUTS["nvfp4"], plain).items()
        if f".layers.{MTP}." not in name
        and ((found := expert.search(name)) is None or int(found[1]) < kept)
    )
    assert round(size / unit, 1 if unit == 1e9 else 0) == published


@pytest.mark.parametrize(("rest", "published"), [("bf16", 194.6), ("fp8", 191.9)])
def test_191_to_195_gb_are_those_of_an_mtp_layer_in_nvfp4_and_plain_dense_layers(
    rest, published, plain
):
    """What is stated of the size is a sum over rates, not of the published file."""
    layout = replace(LAYOUTS["nvfp4"], nvfp4=("routed",), rest=rest)
    found = sum(sizes(layout, plain).values())
    experts = [e for e in entries(layout, plain, MTP) if f".layers.{MTP}.mlp.experts." in e.name]
    found -= sum(num_bytes(*header[1:]) for e in experts for header in e.headers(None))
    found += sum(e.shape[0] * e.shape[1] * 4.5 / 8 for e in experts)
    assert round(found / 1e9, 1) == published


def test_the_ignore_list_has_its_published_length_and_names_nothing_of_the_mtp_layer(plain):
    layout = LAYOUTS["nvfp4"]
    files = files_of(layout, plain)
    assert set(files) == {"config.json", "hf_quant_config.json"}
    found = files["config.json"]["quantization_config"]
    ignore, quantised = found["ignore"], files["hf_quant_config.json"]["quantization"]
    assert len(set(ignore)) == len(ignore) == 132
    assert quantised["quant_algo"] == found["quant_algo"] == "MIXED_PRECISION"
    assert quantised["kv_cache_quant_algo"] == "FP8"
    assert not any(f".layers.{MTP}." in name for name in quantised["quantized_layers"])
    # A BF16 matrix that is not ignored is the MTP layer's: there the lists contradict the tensors.
    outside, patterns = [], [name for name in ignore if "*" in name]
    for entry in entries(layout, plain, MTP):
        module = entry.name.removesuffix(".weight")
        listed = module in ignore or any(fnmatchcase(module, pattern) for pattern in patterns)
        assert (module in quantised["quantized_layers"]) == (entry.scheme == "nvfp4")
        if entry.scheme == "nvfp4":
            assert not listed
        elif not listed and len(entry.shape) == 2 and entry.name.endswith(".weight"):
            outside.append(module)
    assert (
        len(outside) == 3 * 288 + 3 + 10
    )  # experts, shared one, attention, indexer, router, eh_proj
    assert all(f".layers.{MTP}." in module for module in outside)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("whole-2.05", 2.05), ("whole-3.05", 3.05), ("experts-2-3", 2.14), ("experts-4", 4.0)],
)
def test_the_config_of_a_trellis_says_its_achieved_bits(name, bits, plain):
    files = files_of(LAYOUTS[name], plain)
    found = files["config.json"]["quantization_config"]
    assert found["bits"] == bits
    assert found["original_quantization_config"]["weight_block_size"] == [128, 128]
    storage = files["quantization_config.json"]["tensor_storage"]
    stored = {n: s for module in storage.values() for n, s in module["stored_tensors"].items()}
    assert {n: s["n_bytes"] for n, s in stored.items()} == sizes(LAYOUTS[name], plain)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_a_layout_is_consumed(name, plain):
    layout = LAYOUTS[name]
    infos = headers(layout, plain)
    start = time.process_time()
    assignment = assign(CONFIG, infos)
    seconds = time.process_time() - start
    placed = {info.name for p in assignment.placements for info in p.infos()}
    spare = {info.name for info in assignment.spare}
    assert placed | spare == set(infos)
    assert not placed & spare
    assert len(spare) == (48 if layout.whole_model else 0)
    assert all(".attn.qkv." in name for name in spare)
    quantised = [piece for p in assignment.placements for piece in p.pieces if piece.is_quantised]
    formats = [piece.format.name for piece in quantised]
    main = FORMATS.get(name, "exl3")
    kind = "whole" if layout.whole_model else "nvfp4" if layout.nvfp4 else "experts"
    assert formats.count(main) == QUANTISED[kind]
    if name == "experts-2-fp8":
        assert formats.count("fp8_block") == 37_338 - 37_152
    else:
        assert set(formats) == {main}
    if layout.nvfp4:
        mtp = f".layers.{MTP}."
        assert not any(mtp in piece.parameter.name for piece in quantised)
        assert sum(mtp in name for name in placed) == 889
    assert seconds < 20  # measured 3 s; quadratic look-up would take minutes


def test_the_projections_of_an_expert_may_have_three_rates(plain):
    made = entries(LAYOUTS["tiers"], plain, MTP)
    bits = {e.bits for e in made if ".layers.7.mlp.experts.0." in e.name}
    assert bits == {2, 2.5, 3}
