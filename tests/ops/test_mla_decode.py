"""Latent attention over chosen rows: the reference by hand, the kernels against it in float64.

Without a GPU: what the reference promises, how rows are divided, what is refused.
"""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops import check as checks
from emberbox.ops.check import check_case, expected_of
from emberbox.ops.fp8_rows import dequantise_rows, quantise_rows
from emberbox.ops.launch import TYPES, arch_of, source
from emberbox.ops.mla_decode import OP, make_inputs
from emberbox.ops.mla_decode import kernel_cuda as kernels
from emberbox.ops.numerics import relative_error
from emberbox.ops.rotation import rotate
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOLERANCE = OP.kernels["cuda"].tolerance
FULL = {"H": 64, "Dk": 256, "Dv": 256, "Cl": 512}
NANO = {"H": 4, "Dk": 64, "Dv": 64, "Cl": 128}
ODD = {"H": 18, "Dk": 24, "Dv": 64, "Cl": 384}
WEIGHTS = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16}


def case(T, K, sizes, *, dtype=torch.bfloat16, weights=None, **more):
    """Inputs of the op, kv_b of the type `weights`."""
    inputs = make_inputs(T, K, **sizes, **more, dtype=dtype)
    return inputs | {"kv_b": inputs["kv_b"].to(weights or WEIGHTS[dtype])}


def on_gpu(inputs):
    return {name: checks.moved(value, CUDA) for name, value in inputs.items()}


def error_of(inputs):
    expected, _ = expected_of(OP, inputs)
    return relative_error(kernels.mla_decode(**on_gpu(inputs)).cpu(), expected)


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device, made = gpu_or_skip(), {}
    for sizes in (FULL, NANO, ODD):
        for dtype in TOLERANCE:
            for weights in TYPES:
                for fp8 in (0, 1):
                    i = case(1, 1, sizes, dtype=dtype, weights=weights, fp8=fp8)
                    products = kernels.product_macros(dtype, i["kv_b"], i["q"].shape[1])
                    attend = kernels.attend_macros(dtype, sizes["H"], i["latents"])
                    made[products] = source(kernels.PRODUCTS, dict(products))
                    made[attend] = source(kernels.ATTEND, dict(attend))
    build_all(made.values(), arch_of(device))
    return device


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", OP.tolerance, ids=str)
@pytest.mark.parametrize("at", range(len(OP.cases)))
def test_the_reference_keeps_its_contract(dtype, at):
    checked = check_case(OP, None, OP.cases[at], dtype, CPU)
    assert checked.is_right, checked.mismatch


def test_a_query_sees_its_first_rows_and_no_others():
    """By hand: one head, softmax over two rows of three; over one; over none."""
    inputs = make_inputs(3, 3, H=1, Dk=8, Dv=16, has_suh=0, dtype=torch.float64)
    inputs |= {"chosen": torch.tensor([[0, 2, 7], [5, -1, -1], [3, -1, -1]]).int()}
    out = OP.reference(**inputs | {"num": torch.tensor([2, 1, 0]).int()})
    key, value = inputs["kv_b"][0, :8], inputs["kv_b"][0, 8:]
    rows = inputs["latents"][[0, 2]]
    share = torch.softmax(rows @ key.T @ inputs["q"][0] * 8**-0.5, 0)
    assert relative_error(out[0], value @ (share @ rows)) <= 1e-12
    assert relative_error(out[1], value @ inputs["latents"][5]) <= 1e-12
    assert not bool(out[2].any())


@pytest.mark.parametrize("more", [{}, {"has_suh": 0}, {"fp8": 1}], ids=str)
@pytest.mark.parametrize("dtype", OP.tolerance, ids=str)
def test_no_query_gives_no_row(dtype, more):
    inputs = make_inputs(3, 5, Dk=24, Dv=32, **more, dtype=dtype)
    whole = OP.reference(**inputs)
    out = OP.reference(**inputs | {name: inputs[name][:0] for name in ("q", "chosen", "num")})
    assert out.shape == (0, whole.shape[1])
    assert out.dtype is whole.dtype


def test_float8_rows_count_with_their_scales_and_suh_rotates():
    inputs = make_inputs(3, 5, fp8=1, dtype=torch.float32)
    rows = dequantise_rows(inputs["latents"], inputs["scales"])
    wide = inputs | {"latents": rows, "scales": None, "suh": None}
    expected = rotate(OP.reference(**wide), inputs["suh"])
    assert torch.equal(OP.reference(**inputs), expected)


def test_rows_keep_three_bits_and_the_largest_becomes_448():
    x = torch.tensor([1.0, -7.0, 0.3, 3e-3]).repeat(96).reshape(1, 384)
    x[:, 128:256] = 0.0
    codes, scales = quantise_rows(x)
    assert scales.tolist() == [[pytest.approx(7 / 448), 1.0, pytest.approx(7 / 448)]]
    assert codes.dtype is torch.float8_e4m3fn
    assert float(codes.float().min()) == -448.0
    found = dequantise_rows(codes, scales)
    assert float((found - x).abs().max()) <= 7 * 2**-4
    assert relative_error(found, x) <= 2**-5
    assert not bool(found[:, 128:256].any())


@pytest.mark.parametrize("tasks", [1, 4, 7, 32, 4096])
@pytest.mark.parametrize("K", [1, 64, 65, 2051, 9000])
def test_runs_cover_every_row_once(tasks, K, monkeypatch):
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 132)
    runs, rows = kernels._runs(tasks, K, CPU)
    assert rows % kernels.RUN_STEP == 0
    assert 1 <= runs <= kernels.MAX_RUNS
    assert (runs - 1) * rows < K <= runs * rows
    if (tasks, K) == (4, 2051):
        assert (runs, rows) == (33, 64)  # one token of the whole model fills 132 multiprocessors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(2, 256, dtype=torch.float16)}, "q is .* torch.float16"),
        ({"latents": torch.zeros(9, 128, dtype=torch.float8_e4m3fn)}, "need scales"),
        ({"latents": torch.zeros(9, 128, dtype=torch.float16)}, "latents is .* torch.float16"),
        ({"latents": torch.zeros(9, 256)}, "latents is .9, 256."),
        ({"kv_b": torch.zeros(4, 128, 192)}, "latents of 192"),
        ({"kv_b": torch.zeros(4, 64 + 32, 128)}, "values of 32"),
        ({"kv_b": torch.zeros(4, 64, 128)}, "values of 0"),
        ({"kv_b": torch.zeros(1, 256 + 64, 128)}, "1 heads"),
        ({"kv_b": torch.zeros(4, 128, 128).double()}, "kv_b is"),
        ({"chosen": torch.zeros(2, 2).int().T.contiguous().T}, "chosen is .* contiguous"),
        ({"chosen": torch.zeros(2, 2).long()}, "chosen is .* torch.int64"),
        ({"chosen": torch.zeros(2, 0).int()}, "no column"),
        ({"num": torch.zeros(2).long()}, "num is .* torch.int64"),
        ({"num": torch.zeros(1).int()}, "num is .1,."),
        ({"suh": torch.zeros(256)}, "suh is .* torch.float32"),
        ({"suh": torch.zeros(128).half()}, "suh is .128,."),
    ],
)
def test_what_the_kernels_do_not_take_is_named(change, said):
    with pytest.raises(OpError, match=said):
        kernels.mla_decode(**make_inputs(2, 2, dtype=torch.float32) | change)


@pytest.mark.parametrize("scales", [torch.ones(7, 1).half(), torch.ones(6, 1), torch.ones(7, 2)])
def test_scales_of_other_types_or_rows_are_refused(scales):
    with pytest.raises(OpError, match="scales is"):
        kernels.mla_decode(**make_inputs(2, 2, fp8=1, dtype=torch.float32) | {"scales": scales})


def test_keys_have_as_many_channels_as_shared_memory_holds(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels.Program, "launch", lambda *call: asked.append(call))
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 132)
    kernels.mla_decode(**make_inputs(1, 2, H=1, Dk=512, Dv=128, dtype=torch.float32))
    assert dict(asked[0][0].macros)["KEY"] == 512
    with pytest.raises(OpError, match=r"keys of 520 .* up to 512"):
        kernels.mla_decode(**make_inputs(1, 2, H=1, Dk=520, Dv=128, dtype=torch.float32))


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [0, 1], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [FULL, NANO, ODD], ids=["full", "nano", "odd"])
@pytest.mark.parametrize(("T", "K"), [(1, 2051), (1, 3), (3, 700), (8, 2051), (32, 130)])
def test_it_keeps_the_contract(gpu, T, K, sizes, dtype, fp8):
    assert error_of(case(T, K, sizes, dtype=dtype, fp8=fp8)) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("weights", TYPES, ids=str)
@pytest.mark.parametrize("has_suh", [0, 1])
@pytest.mark.parametrize("T", [1, 2, 4, 7])
def test_weights_of_every_type(gpu, T, weights, has_suh):
    inputs = case(T, 70, NANO, weights=weights, has_suh=has_suh)
    assert error_of(inputs) <= TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_large_logits_do_not_overflow(gpu):
    inputs = case(2, 300, NANO, dtype=torch.float32)
    inputs["q"] *= 300
    assert error_of(inputs) <= 2e-3  # shares of almost one row alone


@pytest.mark.gpu
def test_what_is_not_a_number_stays_with_its_query(gpu):
    inputs = case(3, 90, NANO)
    whole = kernels.mla_decode(**on_gpu(inputs))
    inputs["q"][1] = float("nan")
    found = kernels.mla_decode(**on_gpu(inputs))
    if int(inputs["num"][1]):
        assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_many_queries_are_taken_in_pieces(gpu, dtype, monkeypatch):
    inputs = case(45, 150, NANO, dtype=dtype)
    monkeypatch.setattr(kernels, "MAX_QUERIES", 16)
    assert error_of(inputs) <= TOLERANCE[dtype]


@pytest.mark.gpu
def test_thousands_of_queries(gpu):
    inputs = case(2500, 67, NANO)
    assert error_of(inputs) <= TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [FULL, NANO, ODD], ids=["full", "nano", "odd"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("fp8", [0, 1], ids=["plain", "fp8"])
@pytest.mark.parametrize("T", [1, 3, 11])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, fp8, dtype, sizes, monkeypatch):
    inputs, results = case(T, 133, sizes, dtype=dtype, fp8=fp8), []
    expected = kernels.mla_decode(**on_gpu(inputs)).cpu()
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        with monkeypatch.context() as patch:
            guarded.install(patch)
            results.append(kernels.mla_decode(**here))
        torch.cuda.synchronize()
        guarded.check()
    assert all(torch.equal(result.cpu(), expected) for result in results)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 32])
def test_a_captured_graph_gives_what_a_call_gives(gpu, T):
    inputs = [on_gpu(make_inputs(T, 260, **NANO, dtype=torch.bfloat16, seed=s)) for s in range(3)]
    held = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs[0].items()}
    kernels.mla_decode(**held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = kernels.mla_decode(**held)
        second = kernels.mla_decode(**(held | {"q": held["q"] * 0.5}))
    for other in inputs:
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                value.copy_(other[name])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, kernels.mla_decode(**held))
        assert torch.equal(second, kernels.mla_decode(**(held | {"q": held["q"] * 0.5})))
