"""Gate, up, activation and rotation in one launch, against float64 and against the parts."""

from dataclasses import replace

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.check import expected_of, moved
from emberbox.ops.launch import Program, arch_of, source
from emberbox.ops.linear_exl3 import kernel_cuda as linear_kernels
from emberbox.ops.moe_experts.bank import kind_of
from emberbox.ops.numerics import relative_error
from emberbox.ops.prepared import prepared
from emberbox.ops.rotated_linear.bank import bank_of
from emberbox.ops.rotated_linear.reference import rotated_linear
from emberbox.ops.rotated_swiglu import OP, make_inputs
from emberbox.ops.rotated_swiglu import kernel_cuda as kernels
from emberbox.ops.rotation import rotate
from emberbox.ops.swiglu.reference import swiglu
from tests.helpers.exl3_cases import KINDS, kind_name, weight_of
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

TOLERANCE = OP.tolerance[torch.float32]


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device = gpu_or_skip()
    kinds = [kind_of(prepared(weight_of((128, 128), kind))) for kind in KINDS]
    macros = [kernels.program_macros(kind, rows) for kind in kinds for rows in (8, 16)]
    build_all([source(kernels.SOURCE, dict(m)) for m in macros], arch_of(device))
    return device


def case(T, N, K, mixed=0, kind=None):
    inputs = make_inputs(T, N, K, mixed, dtype=torch.float32, seed=T)
    if kind is not None:
        bank = tuple(weight_of((N, K), kind, seed=i) for i in range(2))
        ones = {"suh": torch.ones(K).half()}
        scaled = [{"svh": (w.parts["svh"].float() * K**-0.5).half()} for w in bank]
        inputs["bank"] = tuple(
            replace(w, parts={**w.parts, **ones, **scale})
            for w, scale in zip(bank, scaled, strict=True)
        )
    return inputs


def run(inputs):
    here = {name: moved(value, torch.device("cuda")) for name, value in inputs.items()}
    return kernels.rotated_swiglu(**here | {"bank": bank_of(here["bank"])}).cpu()


def assert_right(inputs):
    expected, _ = expected_of(OP, inputs)
    found = run(inputs)
    assert found.dtype is torch.float16
    assert relative_error(found, expected) <= TOLERANCE


def test_it_is_the_products_then_the_activation_then_the_rotation():
    inputs = case(3, 256, 384, mixed=1)
    y = rotated_linear(inputs["rotated"], inputs["bank"], torch.float32)
    gate, up = y[:, :256], y[:, 256:]
    expected = rotate(swiglu(gate, up, 1.5), inputs["suh"])
    assert torch.equal(OP.reference(**inputs), expected)
    swapped = rotate(swiglu(up, gate, 1.5), inputs["suh"])
    assert relative_error(swapped, expected.double()) > 0.1


@pytest.mark.parametrize(("T", "rows"), [(1, [1]), (16, [16]), (19, [16, 3]), (32, [16, 16])])
def test_matrices_of_one_kind_are_one_launch(T, rows, monkeypatch):
    launched = []
    monkeypatch.setattr(Program, "launch", lambda *args: launched.append(args))
    monkeypatch.setattr(linear_kernels, "num_multiprocessors", lambda device: 132)
    inputs = case(T, 256, 384)
    bank = inputs["bank"] = bank_of(inputs["bank"])
    out = kernels.rotated_swiglu(**inputs)
    assert (out.shape, out.dtype) == ((T, 256), torch.float16)
    at = 0
    for (program, name, grid, args), count in zip(launched, rows, strict=True):
        assert (name, grid) == ("multiply_gate_up", 12)
        assert dict(program.macros) == {"RATE": 4, "CODEBOOK": 2, "ROW_TILES": 1 + (count > 8)}
        parts = [weight.parts[part] for weight in bank for part in ("words", "svh")]
        assert all(a is b for a, b in zip(args, [*parts, inputs["suh"]], strict=False))
        assert args[5].data_ptr() == inputs["rotated"][0, at:].data_ptr()
        assert args[6].data_ptr() == out[at:].data_ptr()
        assert args[10:] == (count, T, 384, 2, 1.5)
        at += count


def test_matrices_of_two_kinds_are_multiplied_side_by_side(monkeypatch):
    launched = []
    monkeypatch.setattr(Program, "launch", lambda *args: launched.append(args[1]))
    monkeypatch.setattr(linear_kernels, "num_multiprocessors", lambda device: 132)
    kernels.rotated_swiglu(**case(2, 128, 256, mixed=1))
    assert launched == ["multiply_side_by_side", "multiply_side_by_side", "activate"]


def test_what_does_not_fit_is_refused_by_name():
    inputs = case(2, 128, 256)
    with pytest.raises(OpError, match=r"suh is \(256,\) .* expected \(128,\)"):
        kernels.rotated_swiglu(**inputs | {"suh": torch.ones(256).half()})
    with pytest.raises(OpError, match=r"suh is .* torch\.float32, expected"):
        kernels.rotated_swiglu(**inputs | {"suh": inputs["suh"].float()})
    with pytest.raises(OpError, match=r"suh is .* contiguous"):
        kernels.rotated_swiglu(**inputs | {"suh": inputs["suh"].repeat_interleave(2)[::2]})
    other = (inputs["bank"][0], weight_of((256, 256), (32, "mul1")))
    with pytest.raises(OpError, match=r"matrices \[\(128, 256\), \(256, 256\)\]"):
        kernels.rotated_swiglu(**inputs | {"bank": other})


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 32])
def test_real_shapes(gpu, T):
    assert_right(case(T, 2048, 4096))
    assert_right(case(T, 1024, 4096, mixed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_every_kind_and_count_of_rows(gpu, kind):
    for T in (1, 2, 7, 8, 9, 16, 17, 33):
        assert_right(case(T, 384, 256, kind=kind))


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 3, 5])
@pytest.mark.parametrize("T", [1, 8, 9, 16])
def test_however_units_are_dealt_to_blocks(gpu, multiprocessors, T, monkeypatch):
    """A gate and its up projection lie in one block, in two, or in many."""
    monkeypatch.setattr(linear_kernels, "num_multiprocessors", lambda device: multiprocessors)
    inputs = case(T, 640, 1152)
    assert_right(inputs)
    assert torch.equal(run(inputs), run(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 7, 8, 13, 19])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, monkeypatch):
    inputs = case(T, 256, 384)
    inputs["bank"] = tuple(prepared(weight) for weight in inputs["bank"])
    expected = run(inputs)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        here["bank"] = bank_of(here["bank"])
        with monkeypatch.context() as patch:
            guarded.install(patch)
            found = kernels.rotated_swiglu(**here)
        torch.cuda.synchronize()
        guarded.check()
        assert torch.equal(found.cpu(), expected)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
def test_two_runs_and_rows_alone_are_bit_equal(gpu):
    inputs = case(16, 384, 4096)
    many = run(inputs)
    assert torch.equal(run(inputs), many)
    for row in (0, 7, 8, 15):
        alone = inputs["rotated"][:, row : row + 1].contiguous()
        assert torch.equal(run(inputs | {"rotated": alone})[0], many[row]), row


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row(gpu):
    inputs = case(3, 256, 384)
    whole = run(inputs)
    inputs["rotated"][1, 2, 5] = float("nan")
    found = run(inputs)
    assert bool(found[2].isnan().all())
    assert torch.equal(found[:2], whole[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 11, 32])
def test_a_captured_graph_gives_what_a_call_gives(gpu, T):
    inputs = case(T, 256, 1024)
    here = {name: moved(value, gpu) for name, value in inputs.items()}
    here["bank"], held = bank_of(here["bank"]), here["rotated"]
    kernels.rotated_swiglu(**here)  # builds, loads, takes working memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.rotated_swiglu(**here)
    for scale in (1.0, 0.5, -1.0):
        held.copy_(inputs["rotated"] * scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, kernels.rotated_swiglu(**here))
        assert bool(found.any())
