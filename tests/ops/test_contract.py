"""Every op, kernel and case against the reference in float64: one contract, from ops.table.OPS."""

import inspect
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import Kernel, Op
from emberbox.ops.numerics import first_mismatch, relative_error
from emberbox.ops.table import OPS, OpTable, bind_all


def implementations():
    for op in OPS.values():
        for dtype in op.tolerance:
            for case in op.cases:
                kernels = [None, *(n for n, k in op.kernels.items() if k.device == "cpu")]
                for kernel in kernels:
                    text = "-".join(f"{k}{v}" for k, v in case.items())
                    name = f"{op.name}-{kernel or 'reference'}-{str(dtype)[6:]}-{text}"
                    yield pytest.param(op, kernel, case, dtype, id=name)


def widened(value):
    """float64 copies of floating-point tensors, everything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, QuantTensor):
        return value.decode().double()
    if isinstance(value, tuple):
        return tuple(widened(v) for v in value)
    return value


def tensors(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, QuantTensor):
        yield from value.parts.values()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)


def reference_of(op: Op, inputs: dict) -> object:
    wide = {name: widened(value) for name, value in inputs.items()}
    # A decoded weight is a plain one: products with any format answer to the plain product.
    function = OPS["linear"].reference if op.name.startswith("linear_") else op.reference
    return function(**wide), [wide[name] for name in op.updates]


@pytest.mark.parametrize(("op", "kernel", "case", "dtype"), list(implementations()))
def test_implementation_keeps_the_contract(op, kernel, case, dtype):
    inputs = op.make_inputs(**case, dtype=dtype)
    kept = {name: value for name, value in inputs.items() if name not in op.updates}
    before = [t.clone() for t in tensors(kept)]
    expected = reference_of(op, inputs)
    function = op.reference if kernel is None else op.load(kernel)
    actual = function(**inputs), [inputs[name] for name in op.updates]
    found, wanted = list(tensors(actual)), list(tensors(expected))
    assert len(found) == len(wanted) > 0
    for a, e in zip(found, wanted, strict=True):
        assert a.is_floating_point() == e.is_floating_point()
        error = relative_error(a, e)
        assert error <= op.tolerance[dtype], first_mismatch(a, e, op.tolerance[dtype])
    for b, t in zip(before, tensors(kept), strict=True):
        same = torch.equal(b.reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        assert same, "an input was changed"


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
    error = relative_error(wrong, reference_of(op, inputs)[0])
    assert error > 100 * op.tolerance[torch.float32]


def test_binding_prefers_a_kernel_that_runs_on_the_device():
    assert bind_all(torch.device("cpu")).names["kda_chunk"] == "cpu"
    assert set(OpTable.reference().names.values()) == {"reference"}
    never = Kernel("emberbox.ops.kda_chunk.kernel_torch:kda_chunk", "cpu", min_capability=(99, 0))
    op = OPS["kda_chunk"]
    newer = Op(op.name, op.reference, op.make_inputs, op.cases, op.tolerance, {"future": never})
    assert newer.bind(torch.device("cpu"), (9, 0)).name == "reference"


def test_relative_error_is_infinite_for_nan_and_wrong_shape():
    x = torch.tensor([1.0, 2.0])
    assert relative_error(torch.tensor([1.0, float("nan")]), x) == float("inf")
    assert relative_error(x.view(2, 1), x) == float("inf")
    assert relative_error(x, x) == 0.0
