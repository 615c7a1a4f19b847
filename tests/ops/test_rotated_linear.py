"""Products of rotated rows: against float64, matrix by matrix, however work is dealt to blocks.

Without a GPU: what the reference means by rotated, and what is launched for a bank.
"""

from dataclasses import replace

import pytest
import torch

from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.check import expected_of
from emberbox.ops.inputs import Random
from emberbox.ops.launch import Program, arch_of, source
from emberbox.ops.linear_exl3 import kernel_cuda as linear_kernels
from emberbox.ops.moe_experts.bank import kind_of
from emberbox.ops.numerics import relative_error
from emberbox.ops.prepared import prepared
from emberbox.ops.rotated_linear import OP, make_inputs
from emberbox.ops.rotated_linear import kernel_cuda as kernels
from emberbox.ops.rotated_linear.bank import NO_MATRIX, LinearBank, bank_of
from emberbox.ops.rotated_linear.reference import rotated_linear as reference
from emberbox.ops.rotation import rotate
from tests.helpers.exl3_cases import KINDS, kind_name, weight_of
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
MIXED = ((32, "mul1"), (48, "mcg"), (32, "mul1"), (40, "mul1"), (64, "3inst"), (32, "mul1"))


def case(T, K, outputs, kinds=((32, "mul1"),), seed=0):
    """rotated and bank: matrix i has outputs[i] rows, the kinds in turn."""
    bank = tuple(
        weight_of((n, K), kinds[i % len(kinds)], seed=seed + i) for i, n in enumerate(outputs)
    )
    x = Random(seed, torch.float32).normal(len(bank), T, K)
    rotated = [rotate(rows, w.parts["suh"]) for rows, w in zip(x, bank, strict=True)]
    return torch.stack(rotated), bank


def run(rotated, bank, dtype=torch.float32):
    """On the GPU, a bank made before; the result on the CPU."""
    ready = bank_of(tuple(weight.to("cuda") for weight in bank))
    return kernels.rotated_linear(rotated.cuda(), ready, dtype).cpu()


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch most in the cache."""
    device = gpu_or_skip()
    kinds = [kind_of(prepared(weight_of((128, 128), kind))) for kind in KINDS]
    macros = [kernels.program_macros(k, rows, torch.float32) for k in kinds for rows in (8, 16)]
    build_all([source(kernels.SOURCE, dict(m)) for m in macros], arch_of(device))
    return device


# -- what is expected ----------------------------------------------------------------------------


def test_rotated_rows_give_what_the_rows_give_side_by_side():
    r = Random(1, torch.float32)
    weights = [weight_of((n, 384), kind) for n, kind in ((256, MIXED[0]), (128, MIXED[1]))]
    x = r.normal(2, 3, 384)
    rotated = torch.stack([rotate(x[i], w.parts["suh"]) for i, w in enumerate(weights)])
    y = reference(rotated, tuple(weights), torch.float32)
    assert y.dtype is torch.float32
    products = [rows.double() @ w.decode().double().T for rows, w in zip(x, weights, strict=True)]
    # Rounding rotated rows to float16 is all that differs.
    assert 1e-5 < relative_error(y[:, :256], products[0]) < 5e-4
    assert 1e-5 < relative_error(y[:, 256:], products[1]) < 5e-4
    assert reference(rotated, tuple(weights), torch.bfloat16).dtype is torch.bfloat16


def test_the_input_scales_of_a_weight_are_not_applied():
    rotated, (weight,) = case(3, 256, (128,))
    y = reference(rotated, (weight,), torch.float32)
    unscaled = {**weight.parts, "suh": torch.full((256,), 7.0).half()}
    assert torch.equal(reference(rotated, (replace(weight, parts=unscaled),), torch.float32), y)
    old = {name: part for name, part in weight.parts.items() if name != "suh"}
    signs = torch.full((16,), 0x5555, dtype=torch.int16)
    of_old_files = QuantTensor(exl3.FORMAT, {**old, "su": signs}, weight.shape)
    assert torch.equal(reference(rotated, (of_old_files,), torch.float32), y)
    assert torch.equal(reference(rotated, (prepared(weight),), torch.float32), y)


def test_float64_and_plain_weights_are_what_kernels_answer_to():
    inputs = make_inputs(3, 128, 256, 2, 1, dtype=torch.float32)
    expected, _ = expected_of(OP, inputs)
    assert expected.dtype is torch.float64
    assert expected.shape == (3, 128 + 256)
    assert relative_error(OP.reference(**inputs), expected) <= 1e-6
    assert 0.5 < float(expected.std()) < 2.0


# -- what is launched ----------------------------------------------------------------------------


def test_matrices_of_a_kind_share_a_launch_of_up_to_four():
    _, bank = case(1, 128, (128, 256, 384, 128, 256, 128), MIXED)
    ready = bank_of(bank)
    assert isinstance(ready, LinearBank)
    assert (ready.inputs, ready.outputs) == (128, 1280)
    assert [(launch.kind, launch.output_groups) for launch in ready.launches] == [
        (4 * 4 + 2, 1 + 3 + 1),
        (4 * 6 + 1, 2),
        (4 * 5 + 2, 1),
        (4 * 8 + 0, 2),
    ]
    first = ready.launches[0].args
    numbers = [first[5 * i + 2 : 5 * i + 5] for i in range(3)]
    # First output group of the launch, number of the matrix, first column.
    assert numbers == [(0, 0, 0), (1, 2, 384), (4, 5, 1152)]
    for place, matrix in enumerate((0, 2, 5)):
        assert first[5 * place] is ready[matrix].parts["words"]
        assert first[5 * place + 1] is ready[matrix].parts["svh"]
    assert first[15:] == NO_MATRIX
    alike = bank_of(case(1, 128, (128,) * 6)[1])
    assert [launch.output_groups for launch in alike.launches] == [4, 2]
    assert bank_of(ready) is ready


@pytest.mark.parametrize(
    ("T", "rows"), [(1, [1]), (8, [8]), (16, [16]), (32, [16, 16]), (19, [16, 3])]
)
def test_rows_are_taken_by_sixteen(T, rows, monkeypatch):
    launched = []
    monkeypatch.setattr(Program, "launch", lambda *args: launched.append(args))
    monkeypatch.setattr(linear_kernels, "num_multiprocessors", lambda device: 132)
    rotated, bank = case(T, 256, (128, 256))
    y = kernels.rotated_linear(rotated, bank, torch.bfloat16)
    assert (y.shape, y.dtype) == ((T, 384), torch.bfloat16)
    assert len(launched) == len(rows)
    at = 0
    for (program, name, grid, args), count in zip(launched, rows, strict=True):
        assert name == "multiply_side_by_side"
        assert grid == 6  # units of 128 inputs and 128 outputs
        assert dict(program.macros)["ROW_TILES"] == (1 if count <= 8 else 2)
        assert args[20].data_ptr() == rotated[0, at:].data_ptr()
        assert args[21].data_ptr() == y[at:].data_ptr()
        assert args[24:] == (count, T, 256, 3, 384)
        at += count


def test_a_bank_that_is_made_at_the_call_is_waited_for(monkeypatch):
    """Its words are read before the launch's turn, when they might not be written yet."""
    done = []
    monkeypatch.setattr(Program, "launch", lambda *_: done.append("launched"))
    monkeypatch.setattr(linear_kernels, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernels, "settle", lambda device: done.append(device))
    rotated, bank = case(1, 128, (128,))
    kernels.rotated_linear(rotated, bank, torch.float32)
    kernels.rotated_linear(rotated, bank_of(bank), torch.float32)
    assert done == [rotated.device, "launched", "launched"]


def test_what_does_not_fit_is_refused_by_name():
    rotated, bank = case(2, 256, (128, 256))
    other, _ = case(2, 128, (128, 256))
    with pytest.raises(OpError, match=r"rows \[2, 2, 128\], expected \[2, T, 256\]"):
        kernels.rotated_linear(other, bank, torch.float32)
    with pytest.raises(OpError, match=r"rows are torch\.float32, expected contiguous float16"):
        kernels.rotated_linear(rotated.float(), bank, torch.float32)
    with pytest.raises(OpError, match=r"torch\.int32 asked for"):
        kernels.rotated_linear(rotated, bank, torch.int32)
    for wrong in ((bank[0], bank[1].decode()), (bank[0], weight_of((130, 256), MIXED[0]))):
        with pytest.raises(OpError, match="expected EXL3 of one width, in whole blocks of 128"):
            kernels.rotated_linear(rotated, wrong, torch.float32)
    assert bank_of(()) == ()


# -- on a GPU ------------------------------------------------------------------------------------


def assert_right(rotated, bank, dtype=torch.float32):
    expected = reference(rotated.double(), bank, dtype)
    found = run(rotated, bank, dtype)
    assert found.dtype is dtype
    assert relative_error(found, expected) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 32])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("K", "outputs"),
    [(4096, (2048, 2048)), (4096, (1536, 512, 1024)), (2048, (4096,)), (1536, (4096,))],
)
def test_real_shapes(gpu, T, dtype, K, outputs):
    assert_right(*case(T, K, outputs, ((48, "mul1"),)), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_every_kind_and_count_of_rows(gpu, kind):
    for T in (1, 2, 7, 8, 9, 16, 17, 32, 33):
        assert_right(*case(T, 384, (128, 384), (kind,), seed=T))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 11, 32])
def test_matrices_of_several_kinds_and_more_than_four(gpu, T):
    assert_right(*case(T, 640, (128, 256, 384, 128, 256, 128), MIXED))
    assert_right(*case(T, 256, (256, 128, 384, 128, 512, 128)))


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 3, 5])
@pytest.mark.parametrize("T", [1, 8, 9, 16])
def test_however_units_are_dealt_to_blocks(gpu, multiprocessors, T, monkeypatch):
    """Few blocks have many units each, and begin and end in the middle of a matrix."""
    monkeypatch.setattr(linear_kernels, "num_multiprocessors", lambda device: multiprocessors)
    rotated, bank = case(T, 1152, (640, 128, 256))
    assert_right(rotated, bank)
    assert torch.equal(run(rotated, bank), run(rotated, bank))


@pytest.mark.gpu
def test_it_is_the_product_with_the_rows_themselves(gpu):
    weight = weight_of((640, 1152), MIXED[0])
    x = Random(3, torch.float32).normal(5, 1152)
    rotated = rotate(x, weight.parts["suh"])[None]
    plain = linear_kernels.linear_exl3(x.cuda(), prepared(weight.to("cuda"))).cpu()
    # Both round rotated rows to float16; here and there a last bit falls otherwise.
    assert relative_error(run(rotated, (weight,)), plain.double()) <= 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 7, 8, 13, 16, 19])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, T, dtype, monkeypatch):
    rotated, bank = case(T, 384, (128, 256, 128), ((32, "mul1"), (32, "mul1"), (40, "mul1")))
    bank = tuple(prepared(weight) for weight in bank)
    results = []
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = guarded.copy(rotated), bank_of(guarded.copy(bank))
        with monkeypatch.context() as patch:
            guarded.install(patch)
            results.append(kernels.rotated_linear(*here, dtype))
        torch.cuda.synchronize()
        guarded.check()
    expected = run(rotated, bank, dtype)
    assert all(torch.equal(result.cpu(), expected) for result in results)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
def test_two_runs_and_rows_alone_are_bit_equal(gpu):
    rotated, bank = case(16, 4096, (384, 256))
    many = run(rotated, bank)
    assert torch.equal(run(rotated, bank), many)
    for row in (0, 7, 8, 15):
        alone = run(rotated[:, row : row + 1].contiguous(), bank)
        assert torch.equal(alone[0], many[row]), row


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row_and_matrix(gpu):
    rotated, bank = case(3, 384, (128, 256))
    whole = run(rotated, bank)
    rotated[1, 2, 5] = float("nan")
    found = run(rotated, bank)
    assert bool(found[2, 128:].isnan().all())
    assert torch.equal(found[:2], whole[:2])
    assert torch.equal(found[2, :128], whole[2, :128])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 11, 32])
def test_a_captured_graph_gives_what_a_call_gives(gpu, T):
    rotated, bank = case(T, 1024, (256, 128), MIXED)
    ready = bank_of(tuple(weight.to("cuda") for weight in bank))
    held = torch.zeros_like(rotated, device="cuda")
    kernels.rotated_linear(held, ready, torch.bfloat16)  # builds, loads, takes working memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.rotated_linear(held, ready, torch.bfloat16)
    for scale in (1.0, 0.5, -2.0):
        held.copy_(rotated * scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, kernels.rotated_linear(held, ready, torch.bfloat16))


@pytest.mark.gpu
def test_no_rows(gpu):
    rotated, bank = case(0, 128, (128, 256))
    assert run(rotated, bank).shape == (0, 384)
