"""No launch is given a tensor that its kernel would misread: every input of every op, changed.

Launches are recorded in place of made. A kernel knows macros, grid and numbers: where these are
the same, so must be the type and size of every tensor. Weights are not copied to make them fit.
"""

import sys

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.launch import Program
from emberbox.ops.table import OPS

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.uint8),
)
MAX_NUMBERS = 1 << 16  # of an input: larger cases are no other
LAUNCHED = [name for name, op in OPS.items() if "cuda" in op.kernels and name != "kda_chunk"]
# How many rows there are is for whoever numbers them to know; slots are not read.
UNTOLD = {
    ("index_choose", "pooled", 0),
    ("mla_decode", "latents", 0),
    ("index_choose", "rows.0", 0),
}
NOT_READ = {("index_choose", "rows.0")}
# Activations of other types go to the reference, which says what it cannot take in torch's words.
LEFT_TO_TORCH = {"moe_experts": (RuntimeError,), "moe_routed": (RuntimeError,)}
# Most of them a kernel reads before its turn.
WEIGHTS = {
    "hyper_open": ("fn", "base", "scale", "norm", "suhs"),
    "hyper_close": ("norm", "suhs"),
    "rotated_swiglu": ("suh",),
    "small_linear": ("weight",),
    "swiglu_open": ("suh",),
    "kda_decode": ("weights",),
    "mla_open": ("q_norm", "kv_norm", "k_norm", "ape", "suhs"),
    "mla_decode": ("kv_b", "suh"),
}


@pytest.fixture
def launches(monkeypatch):
    """[(what a kernel is told, its tensors)], as for a GPU of 132 multiprocessors."""
    found = []

    def record(program, name, grid, args, shared=0, threads=256):
        numbers = tuple((type(arg), arg) for arg in args if isinstance(arg, int | float))
        told = (program.path.name, program.macros, name, grid, shared, threads, numbers)
        found.append((told, [arg for arg in args if isinstance(arg, torch.Tensor)]))

    monkeypatch.setattr(Program, "launch", record)
    monkeypatch.setattr(Program, "load", lambda *_: None)
    for name in LAUNCHED:
        OPS[name].load("cuda")  # imports what is patched
    for module in [m for name, m in sys.modules.items() if name.startswith("emberbox.ops")]:
        for name, value in (("num_multiprocessors", 132), ("arch_of", "sm_90")):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda _, value=value: value)
    return found


def leaves(value, path=""):
    """(path, tensor) of plain tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}")


def changed(value, path, new, at=""):
    """`value` with `new` in place of what stands at `path`."""
    if path == at:
        return new
    if not isinstance(value, tuple):
        return value
    items = [changed(item, path, new, f"{at}.{i}") for i, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def with_gaps(tensor):
    """The same numbers, one of two places each."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def variants(op, path, tensor):
    """(what is done to it, the tensor after)."""
    for dtype in TYPES:
        if dtype is not tensor.dtype and (op, path) not in NOT_READ:
            yield str(dtype), tensor.to(dtype)
    if tensor.numel() > 1:
        yield "with gaps", with_gaps(tensor)
    for dim, size in enumerate(tensor.shape):
        if (op, path, dim) not in UNTOLD:
            yield f"one less in {dim}", tensor.narrow(dim, 0, size - 1).contiguous()


def inputs_of(op):
    """Of every case and type, but large ones."""
    for case in op.cases:
        for dtype in op.tolerance:
            inputs = op.make_inputs(**case, dtype=dtype)
            whole = [leaf for value in inputs.values() for _, leaf in leaves(value)]
            if max(leaf.numel() for leaf in whole) <= MAX_NUMBERS:
                yield inputs


def misread(before, after):
    """Whether a kernel that is told the same has other tensors, or any with gaps."""
    if any(not tensor.is_contiguous() for _, tensors in after for tensor in tensors):
        return True
    if [told for told, _ in before] != [told for told, _ in after]:
        return False
    kinds = [[[(t.dtype, t.numel()) for t in ts] for _, ts in some] for some in (before, after)]
    return kinds[0] != kinds[1]


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_changed_input_is_refused_or_the_kernel_is_told(name, launches):
    op, kernel, tried, wrong = OPS[name], OPS[name].load("cuda"), 0, set()
    for inputs in inputs_of(op):
        for _ in range(2):  # working memory has grown at the second time
            launches.clear()
            kernel(**inputs)
        before = list(launches)
        if not before:
            continue  # torch does it
        for argument, value in inputs.items():
            for at, tensor in leaves(value):
                for what, new in variants(name, argument + at, tensor):
                    launches.clear()
                    tried += 1
                    try:
                        kernel(**inputs | {argument: changed(value, at, new)})
                    except (OpError, *LEFT_TO_TORCH.get(name, ())):
                        assert launches == [], (argument + at, what)
                        continue
                    if misread(before, launches):
                        wrong.add((argument + at, what))
    assert wrong == set()
    assert tried > 10


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name in WEIGHTS for argument in WEIGHTS[name]]
)
def test_weights_are_taken_as_they_are_or_refused(name, argument, launches):
    """A copy made just before might not be seen by a kernel that reads it before its turn."""
    op, kernel, tried = OPS[name], OPS[name].load("cuda"), 0
    for inputs in inputs_of(op):
        value = inputs[argument]
        for at, tensor in leaves(value):
            launches.clear()
            kernel(**inputs)
            given = {t.data_ptr() for _, tensors in launches for t in tensors}
            assert tensor.data_ptr() in given
            for new in (with_gaps(tensor), tensor.double()):
                if new.dtype is tensor.dtype and new.is_contiguous():
                    continue  # of one number
                launches.clear()
                with pytest.raises(OpError, match=name):
                    kernel(**inputs | {argument: changed(value, at, new)})
                assert launches == []
                tried += 1
    assert tried
