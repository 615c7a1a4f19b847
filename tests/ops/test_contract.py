"""Every op, kernel and case against the reference in float64: one contract, from ops.table.OPS."""

import inspect
from dataclasses import replace

import pytest
import torch

from emberbox.ops.check import (
    check_case,
    check_kernels,
    difference,
    expected_of,
    moved,
    tensors,
)
from emberbox.ops.contract import Kernel
from emberbox.ops.numerics import first_mismatch, relative_error
from emberbox.ops.table import OPS, OpTable, bind_all
from tests.helpers.gpu import gpu_or_skip

CPU = torch.device("cpu")


def implementations():
    for op in OPS.values():
        for dtype in op.tolerance:
            for case in op.cases:
                for kernel in (None, *op.kernels):
                    text = "-".join(f"{k}{v}" for k, v in case.items())
                    name = f"{op.name}-{kernel or 'reference'}-{str(dtype)[6:]}-{text}"
                    on_gpu = kernel is not None and op.kernels[kernel].device == "cuda"
                    marks = [pytest.mark.gpu] if on_gpu else []
                    yield pytest.param(op, kernel, case, dtype, id=name, marks=marks)


@pytest.mark.parametrize(("op", "kernel", "case", "dtype"), list(implementations()))
def test_implementation_keeps_the_contract(op, kernel, case, dtype):
    device = "cpu" if kernel is None else op.kernels[kernel].device
    if device == "cuda":
        gpu_or_skip()
    inputs = op.make_inputs(**case, dtype=dtype)
    inputs = {name: moved(value, torch.device(device)) for name, value in inputs.items()}
    kept = {name: value for name, value in inputs.items() if name not in op.updates}
    before = [t.clone() for t in tensors(kept)]
    expected = expected_of(op, op.make_inputs(**case, dtype=dtype))
    function = op.reference if kernel is None else op.load(kernel)
    actual = function(**inputs), [inputs[name] for name in op.updates]
    found, wanted = list(tensors(actual)), list(tensors(expected))
    assert len(found) == len(wanted) > 0
    tolerance = op.tolerance_of(kernel or "reference", dtype)
    for a, e in zip(found, wanted, strict=True):
        assert a.is_floating_point() == e.is_floating_point()
        assert difference(a, e) <= tolerance, first_mismatch(a.cpu(), e, tolerance)
    for b, t in zip(before, tensors(kept), strict=True):
        same = torch.equal(b.reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        assert same, "an input was changed"


def test_a_check_says_which_case_is_wrong_and_where():
    right = check_case(OPS["rms_norm"], None, OPS["rms_norm"].cases[0], torch.float32, CPU)
    assert right.is_right
    assert right.mismatch == ""
    never = replace(OPS["rms_norm"], tolerance={torch.float32: 0.0})
    wrong = check_case(never, None, never.cases[-1], torch.float32, CPU)
    assert not wrong.is_right
    assert 0 < wrong.error < 1e-5
    assert wrong.mismatch.startswith("at (")


def test_a_kernel_may_have_a_tolerance_of_its_own():
    op = OPS["linear_exl3"]
    assert op.tolerance_of("reference", torch.float32) == op.tolerance[torch.float32] == 2e-6
    assert op.tolerance_of("cuda", torch.float32) == 5e-4
    assert (
        OPS["kda_chunk"].tolerance_of("cpu", torch.float32)
        == OPS["kda_chunk"].tolerance[torch.float32]
    )


def test_every_kernel_of_this_cpu_keeps_its_contract():
    found = list(check_kernels(CPU))
    assert all(checked.is_right for checked in found)
    wanted = sum(
        len(op.cases) * len(op.tolerance)
        for op in OPS.values()
        if any(kernel.device == "cpu" for kernel in op.kernels.values())
    )
    assert len(found) == wanted > 50


@pytest.mark.parametrize("op", list(OPS.values()), ids=list(OPS))
def test_kernels_have_the_signature_of_their_reference(op):
    for name in op.kernels:
        expected = inspect.signature(op.reference)
        assert inspect.signature(op.load(name)) == expected


@pytest.mark.parametrize("op", list(OPS.values()), ids=list(OPS))
def test_contract_is_not_empty(op):
    assert op.cases
    assert torch.float32 in op.tolerance
    assert all(0 <= tolerance < 2e-2 for tolerance in op.tolerance.values())


def test_a_wrong_kernel_is_caught():
    op = OPS["rms_norm"]
    inputs = op.make_inputs(T=5, D=128, dtype=torch.float32)
    wrong = op.reference(**{**inputs, "eps": 1e-6})
    error = relative_error(wrong, expected_of(op, inputs)[0])
    assert error > 100 * op.tolerance[torch.float32]


def test_binding_prefers_a_kernel_that_runs_on_the_device():
    assert bind_all(torch.device("cpu")).names["kda_chunk"] == "cpu"
    assert set(OpTable.reference().names.values()) == {"reference"}
    never = Kernel("emberbox.ops.kda_chunk.kernel_torch:kda_chunk", "cpu", min_capability=(99, 0))
    op = OPS["kda_chunk"]
    newer = replace(op, kernels={"future": never})
    assert newer.bind(torch.device("cpu"), (9, 0)).name == "reference"
    for capability, name in (((7, 5), "reference"), ((8, 0), "cuda"), ((12, 1), "cuda")):
        table = bind_all(torch.device("cuda"), capability)
        assert table.names["linear_exl3"] == table.names["moe_experts"] == name
        assert table.reads("exl3") == table.reads("exl3_prepared") == (name == "cuda")
        assert not table.reads("nvfp4")


def test_relative_error_is_infinite_for_nan_and_wrong_shape():
    x = torch.tensor([1.0, 2.0])
    assert relative_error(torch.tensor([1.0, float("nan")]), x) == float("inf")
    assert relative_error(x.view(2, 1), x) == float("inf")
    assert relative_error(x, x) == 0.0
