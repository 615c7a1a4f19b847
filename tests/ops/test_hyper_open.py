"""What happens between sublayers in one op, and after the last: the kernels against float64.

Without a GPU: a chain of them is the plain chain of ops, and what they refuse.
"""

import pytest
import torch
from torch import zeros

from emberbox.errors import OpError
from emberbox.ops import check as checks
from emberbox.ops.check import expected_of
from emberbox.ops.hyper_close import OP as CLOSE
from emberbox.ops.hyper_close import kernel_cuda as close_kernels
from emberbox.ops.hyper_mix.reference import hyper_mix
from emberbox.ops.hyper_open import OP, kernel_cuda, make_inputs
from emberbox.ops.hyper_update.reference import hyper_update
from emberbox.ops.inputs import Random
from emberbox.ops.launch import TYPES, Program, arch_of, source
from emberbox.ops.numerics import relative_error
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.rotation import unrotate
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROTATED = {torch.float32: 2e-4, torch.bfloat16: 1e-2}  # a float16 may round the other way
# Types of activations, fn and norm.
KINDS = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fn in float32": (torch.bfloat16, torch.float32, torch.bfloat16),
    "fn in float16": (torch.float32, torch.float16, torch.bfloat16),
}
NAMES = ("streams", "ys", "post", "mix", "norm", "suhs")  # of what hyper_close takes


def case(T, H, results=1, scales=1, *, types="float32", hard=1.0, seed=0):
    """Inputs of hyper_open. hard: the larger, the more slowly the coefficients settle."""
    dtype, of_fn, of_norm = KINDS[types]
    inputs = make_inputs(T, H, results, scales, dtype=dtype, seed=seed)
    inputs["base"][8:] *= hard
    return inputs | {"fn": inputs["fn"].to(of_fn), "norm": inputs["norm"].to(of_norm)}


def close_case(*args, **more):
    inputs = case(*args, **more)
    return {name: inputs[name] for name in NAMES} | {"eps": 1e-5}


def on_gpu(inputs):
    return {name: checks.moved(value, torch.device("cuda")) for name, value in inputs.items()}


def run(inputs):
    """x, rotated, post, mix and the streams after."""
    here = on_gpu(inputs)
    results = kernel_cuda.hyper_open(**here)
    return [tensor.cpu() for tensor in (*results, here["streams"])]


def run_close(inputs):
    here = on_gpu(inputs)
    results = close_kernels.hyper_close(**here)
    assert torch.equal(here["streams"].cpu(), inputs["streams"])
    return [tensor.cpu() for tensor in results]


def assert_right(found, expected, dtype):
    """rotated is the second."""
    expected = list(checks.tensors(expected))
    assert len(found) == len(expected)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        allowed = (ROTATED if i == 1 else TOLERANCE)[dtype]
        assert relative_error(f, e) <= allowed, ("output", i)


def check_open(inputs):
    assert_right(run(inputs), expected_of(OP, inputs), inputs["streams"].dtype)


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device = gpu_or_skip()
    sources = []
    for types in KINDS.values():
        x, fn, norm = (TYPES[dtype] for dtype in types)
        macros = {"X_TYPE": x, "NORM_TYPE": norm}
        sources.append(source(kernel_cuda.SOURCE, macros | {"FN_TYPE": fn}))
        sources.append(source(close_kernels.SOURCE, macros))
    build_all({str(s): s for s in sources}.values(), arch_of(device))
    return device


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_chain_is_the_plain_chain_of_ops(dtype):
    T, H, eps, iterations = 3, 128, (1e-5, 1e-6), 20
    layers = [make_inputs(T, H, 0, 2, dtype=dtype, seed=seed) for seed in range(3)]
    final = Random(9, dtype).normal(H)
    plain = layers[0]["streams"].clone()
    streams, ys = layers[0]["streams"], ()
    post = mix = torch.empty(0)
    for layer in layers:
        fn, base, scale, norm = (layer[name] for name in ("fn", "base", "scale", "norm"))
        collapsed, *coefficients = hyper_mix(plain, fn, base, scale, eps, iterations)
        x = rms_norm(collapsed, norm, eps[0])
        plain = hyper_update(plain, x.sin(), *coefficients)
        suhs = layer["suhs"]
        found, rotated, post, mix = OP.reference(
            streams, ys, post, mix, fn, base, scale, norm, suhs, eps, iterations
        )
        assert torch.equal(found, x)
        assert rotated.dtype is torch.float16
        for r, suh in zip(rotated, suhs, strict=True):
            assert relative_error(unrotate(r), x * suh) < 1e-3
        ys = (found.sin(),)
    hidden, rotated = CLOSE.reference(streams, ys, post, mix, final, (), eps[0])
    mean = plain.float().mean(1).to(dtype)
    assert torch.equal(hidden, rms_norm(mean, final, eps[0]))
    assert rotated.shape == (0, T, H)


def test_two_results_are_added_and_rounded_once():
    inputs = make_inputs(3, 128, 2, 0, dtype=torch.bfloat16)
    a, b = inputs["ys"]
    one = {**inputs, "ys": ((a.float() + b.float()).bfloat16(),)}
    one["streams"], before = inputs["streams"].clone(), inputs["streams"].clone()
    found, expected = OP.reference(**inputs), OP.reference(**one)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert torch.equal(inputs["streams"], one["streams"])
    assert not torch.equal(inputs["streams"], before)


REFUSED = {
    "hidden of no whole block": ({"streams": zeros(1, 4, 96)}, "not 4 x 128 n"),
    "three streams": ({"streams": zeros(1, 3, 128)}, "not 4 x 128 n"),
    "streams in float64": ({"streams": zeros(1, 4, 128).double()}, "streams are"),
    "streams with gaps": ({"streams": zeros(1, 4, 256)[..., :128]}, "contiguous"),
    "three results": ({"ys": (zeros(1, 128),) * 3}, "at most 2"),
    "another type of result": ({"ys": (zeros(1, 128).half(),)}, "a result is"),
    "results of other tokens": ({"ys": (zeros(2, 128),)}, "a result is"),
    "coefficients of other tokens": ({"post": zeros(2, 4)}, "post and mix of 1 tokens"),
    "no coefficients": ({"mix": zeros(0)}, "post and mix of 1 tokens"),
    "four scales": ({"suhs": (zeros(128).half(),) * 4}, "at most 3"),
    "a scale in float32": ({"suhs": (zeros(128),)}, "a weight is"),
    "a scale of other channels": ({"suhs": (zeros(256).half(),)}, "a weight is"),
    "norm in float64": ({"norm": zeros(128).double()}, "a weight is"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("op", ["open", "close"])
def test_what_the_kernels_cannot_take_is_refused(name, op):
    change, said = REFUSED[name]
    with pytest.raises(OpError, match=said):
        if op == "open":
            kernel_cuda.hyper_open(**case(1, 128) | change)
        else:
            close_kernels.hyper_close(**close_case(1, 128) | change)


@pytest.mark.parametrize(
    "change", [{"base": zeros(24).half()}, {"fn": zeros(512, 24).T}, {"scale": zeros(24)}]
)
def test_other_weights_are_refused(change):
    with pytest.raises(OpError, match="a weight is"):
        kernel_cuda.hyper_open(**case(1, 128) | change)


@pytest.mark.parametrize(("T", "grids"), [(1, [128, 33]), (8, [128, 264]), (32, [512, 384])])
def test_one_token_fills_a_large_device_and_many_share_their_sums(T, grids, monkeypatch):
    """Launches recorded in place of made, at the width of the released model."""
    asked = []
    monkeypatch.setattr(Program, "launch", lambda _, name, grid, args: asked.append(grid))
    monkeypatch.setattr(kernel_cuda, "num_multiprocessors", lambda device: 132)
    kernel_cuda.hyper_open(**case(T, 4096))
    assert asked == grids


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize(("T", "H"), [(1, 4096), (3, 4096), (8, 4096), (32, 4096), (9, 640)])
def test_at_real_widths(gpu, T, H, types):
    check_open(case(T, H, 2, 3, types=types, seed=T))


@pytest.mark.gpu
@pytest.mark.parametrize("results", [0, 1, 2])
@pytest.mark.parametrize("scales", [0, 1, 2, 3])
@pytest.mark.parametrize("T", [1, 5])
def test_every_number_of_results_and_scales(gpu, T, results, scales):
    check_open(case(T, 384, results, scales))
    inputs = close_case(T, 384, results, scales)
    assert_right(run_close(inputs), expected_of(CLOSE, inputs)[0], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize(("T", "H"), [(1, 4096), (3, 128), (32, 4096), (2, 16384)])
def test_close_at_real_widths(gpu, T, H, types):
    inputs = close_case(T, H, 2, 1, types=types, seed=T)
    assert_right(run_close(inputs), expected_of(CLOSE, inputs)[0], inputs["streams"].dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("iterations", [1, 2, 20, 100])
@pytest.mark.parametrize("hard", [0.0, 0.5, 2.0, 4.0, 8.0, 30.0])
def test_coefficients_that_settle_fast_or_never(gpu, hard, iterations):
    inputs = case(32, 128, hard=hard) | {"iterations": iterations}
    expected = expected_of(OP, inputs)[0]
    post, mix = run(inputs)[2:4]
    assert float((post - expected[2]).abs().max()) <= 1e-5
    assert float((mix - expected[3]).abs().max()) <= 1e-5


@pytest.mark.gpu
def test_no_token_and_more_than_a_step_has(gpu):
    assert run(case(0, 128))[0].shape == (0, 128)
    assert run_close(close_case(0, 128))[1].shape == (1, 0, 128)
    check_open(case(100, 256, 1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("types", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [2, 3, 8, 9, 32])
def test_a_token_gives_the_same_alone_and_among_others(gpu, T, types):
    inputs = case(T, 1024, 2, 2, types=types)
    whole = run(inputs)
    for t in (0, T // 2, T - 1):
        one = {name: inputs[name][t : t + 1].contiguous() for name in ("streams", "post", "mix")}
        one["ys"] = tuple(y[t : t + 1] for y in inputs["ys"])
        x, rotated, *others = run(inputs | one)
        assert torch.equal(x[0], whole[0][t])
        assert torch.equal(rotated[:, 0], whole[1][:, t])
        for found, among in zip(others, whole[2:], strict=True):
            assert torch.equal(found[0], among[t])


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [0, 3])
def test_how_channels_are_dealt_to_blocks_changes_nothing(gpu, scales, monkeypatch):
    inputs, results = case(3, 1152, 1, scales), []
    for span in (1, 2, 4, 8):
        monkeypatch.setattr(kernel_cuda, "_span", lambda *_, span=span: span)
        results.append(run(inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 11, 32])
@pytest.mark.parametrize("results", [0, 2])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, results, monkeypatch):
    inputs = case(T, 384, results, 2)
    if not results:
        inputs |= {"post": torch.empty(0), "mix": torch.empty(0)}
    expected = run(inputs)
    closing = {name: inputs[name] for name in NAMES} | {"eps": 1e-5}
    closed = run_close(closing)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        last = {name: guarded.copy(value) for name, value in closing.items()}
        with monkeypatch.context() as patch:
            guarded.install(patch)
            found = [*kernel_cuda.hyper_open(**here), here["streams"]]
            found += close_kernels.hyper_close(**last)
        torch.cuda.synchronize()
        guarded.check()
        for f, e in zip(found, [*expected, *closed], strict=True):
            assert torch.equal(f.cpu(), e)


@pytest.mark.gpu
def test_results_need_not_lie_at_a_multiple_of_four(gpu):
    inputs = case(1, 256, 2, 1)
    here = on_gpu(inputs)
    here["ys"] = tuple(torch.cat([y.new_zeros(1, 3), y], 1)[:, 3:] for y in here["ys"])
    x, *_ = kernel_cuda.hyper_open(**here)
    assert torch.equal(x.cpu(), run(inputs)[0])


@pytest.mark.gpu
def test_what_is_not_a_number_stays_so_and_stays_with_its_token(gpu):
    inputs = case(4, 256, 1, 1)
    whole = run(inputs)
    inputs["ys"][0][1, 5] = float("nan")
    x, rotated, *_ = run(inputs)
    assert bool(x[1].isnan().all())
    assert bool(rotated[0, 1].isnan().all())
    others = [0, 2, 3]
    assert torch.equal(x[others], whole[0][others])
    assert torch.equal(rotated[:, others], whole[1][:, others])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 32])
def test_a_captured_graph_gives_what_calls_give(gpu, T):
    """Two sublayers and the end, one launch after the other without anything between."""
    cases = [on_gpu(case(T, 512, 1, 1, types="bfloat16", seed=seed)) for seed in range(3)]
    held = {name: cases[0][name].clone() for name in ("streams", "post", "mix")}
    weights = {name: cases[0][name] for name in cases[0] if name not in ("ys", *held)}
    y = cases[0]["ys"][0].clone()

    def step(streams, post, mix):
        x, first, post, mix = kernel_cuda.hyper_open(streams, (y,), post, mix, **weights)
        more, second, post, mix = kernel_cuda.hyper_open(streams, (x, y), post, mix, **weights)
        norm, suhs = weights["norm"], weights["suhs"]
        return (
            *(x, first, more, second, post, mix),
            *close_kernels.hyper_close(streams, (more,), post, mix, norm, suhs, 1e-5),
        )

    step(**{name: value.clone() for name, value in held.items()})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(**held)
    for other in cases:
        for name, value in held.items():
            value.copy_(other[name])
        y.copy_(other["ys"][0])
        graph.replay()
        torch.cuda.synchronize()
        streams = other["streams"].clone()
        called = step(streams, other["post"], other["mix"])
        assert torch.equal(held["streams"], streams)
        for found, expected in zip(captured, called, strict=True):
            assert torch.equal(found, expected)
