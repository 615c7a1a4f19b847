"""A whole layer of ember-nano against the twin: what the plain numpy search made of stored inputs.

tests/golden/make_encode_layer.py made the file. All sums are float64, so other machines find the
same windows.
"""

import zlib
from functools import cache

import numpy as np
import pytest
import torch

from emberbox.compress import trellis_search_cuda
from emberbox.compress.conversion_plan import plan_conversion
from emberbox.compress.hessian import Hessian
from emberbox.compress.quantize_exl3 import quantize
from emberbox.compress.recipe import load_recipe
from emberbox.compress.trellis_search_cpu import search
from emberbox.compress.trellis_steps import Found
from tests.golden.make_encode_layer import (
    COMMITTED,
    LAYER,
    PREFIX,
    RECIPE,
    encode,
    opened,
    read,
    weights_of,
)

MAX_BYTES = 1_500_000
NUM_EXPERTS = 16
EXPERTS = (0, 3, 6, 9, 12, 15)  # the rest by `make soak`
KINDS = ("gate_proj", "up_proj", "down_proj")
OTHERS = ("self_attn.qkv_proj", "self_attn.o_proj", *(f"mlp.shared_experts.{k}" for k in KINDS))


@cache
def golden():
    """(inputs, results by name)"""
    return read(COMMITTED)


def of_experts(numbers):
    return [f"mlp.experts.{number}.{kind}" for number in numbers for kind in KINDS]


@pytest.mark.parametrize(
    "name",
    [
        *OTHERS,
        *of_experts(EXPERTS),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in of_experts(sorted({*range(NUM_EXPERTS)} - {*EXPERTS}))
        ),
    ],
)
def test_the_compiled_search_gives_what_the_twin_made(name):
    inputs, results = golden()
    matrix = next(matrix for matrix in inputs.matrices if matrix.name == name)
    made, twin = encode(opened(), inputs, matrix, search), results[name]
    assert made.trellis.dtype == np.int16
    for part in ("trellis", "suh", "svh"):
        np.testing.assert_array_equal(getattr(made, part), getattr(twin, part), err_msg=part)
    assert made.proxy_error == pytest.approx(twin.proxy_error, rel=1e-9, abs=0)


def test_the_file_holds_the_whole_layer_and_is_small():
    inputs, results = golden()
    names = {*OTHERS, *of_experts(range(NUM_EXPERTS))}
    assert {matrix.name for matrix in inputs.matrices} == names == results.keys()
    assert sum(result.trellis.size * 2 for result in results.values()) == 286_720
    assert COMMITTED.stat().st_size <= MAX_BYTES


def test_the_stored_weights_are_those_of_ember_nano():
    source, (inputs, _) = opened(), golden()
    for matrix in inputs.matrices:
        weight, sha256 = weights_of(source, matrix.sources)
        assert (sha256, tuple(weight.shape)) == (matrix.weights_sha256, matrix.shape), matrix.name


def test_the_stored_plans_are_those_of_the_recipe():
    source, (inputs, _) = opened(), golden()
    plan = plan_conversion(source.config, source.checkpoint.tensors, load_recipe(RECIPE))
    expected = {
        item.name: (item.sources, item.shape, item.target.bits, item.target.codebook)
        for item in plan.groups()[f"layer-{LAYER:03d}"]
        if item.target.format == "exl3"
    }
    found = {
        PREFIX + m.name: (tuple(PREFIX + s for s in m.sources), m.shape, m.bits, m.codebook)
        for m in inputs.matrices
    }
    assert found == expected
    for matrix in inputs.matrices:
        assert matrix.seed == zlib.crc32((PREFIX + matrix.name).encode()), matrix.name


def test_matrices_with_one_input_have_one_hessian_and_each_down_projection_its_own():
    inputs, _ = golden()
    of = {matrix.name: inputs.hessians[matrix.hessian] for matrix in inputs.matrices}
    routed = {id(of[f"mlp.experts.{e}.{k}"]) for e in range(NUM_EXPERTS) for k in KINDS[:2]}
    downs = {id(of[f"mlp.experts.{e}.down_proj"]) for e in range(NUM_EXPERTS)}
    assert (len(routed), len(downs), len(inputs.hessians)) == (1, 16, 21)
    assert {hessian.num_rows for hessian in of.values()} == {4096}


# -- on a GPU -------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", [*OTHERS, *of_experts(range(NUM_EXPERTS))])
def test_the_search_on_a_gpu_gives_what_the_twin_made(name):
    """The stored inputs, sums in float64 as the twin's: every window is equal."""
    inputs, results = golden()
    matrix = next(matrix for matrix in inputs.matrices if matrix.name == name)
    made, twin = encode(opened(), inputs, matrix, search_on_gpu), results[name]
    for part in ("trellis", "suh", "svh"):
        np.testing.assert_array_equal(getattr(made, part), getattr(twin, part), err_msg=part)
    assert made.proxy_error == pytest.approx(twin.proxy_error, rel=1e-9, abs=0)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", [*OTHERS, *of_experts(range(NUM_EXPERTS))])
def test_all_of_the_quantiser_on_a_gpu_is_as_good_as_the_twin(name):
    """Sums are float32 there, so that paths part now and then: the error is the same to 1 %."""
    inputs, results = golden()
    matrix = next(matrix for matrix in inputs.matrices if matrix.name == name)
    weight, sha256 = weights_of(opened(), matrix.sources)
    assert sha256 == matrix.weights_sha256
    given = inputs.hessians[matrix.hessian]
    hessian = Hessian(given.matrix.cuda(), given.num_rows)
    (made,) = quantize(
        [weight.cuda()], [hessian], [matrix.plan], trellis_search_cuda.search, device="cuda"
    )
    assert made.report.proxy_error == pytest.approx(results[name].proxy_error, rel=0.01)


def search_on_gpu(tiles, num_words, codebook):
    found = trellis_search_cuda.search(tiles.cuda(), num_words, codebook)
    return Found(found.windows.cpu(), found.cost.cpu())
