"""SwiGLU of two halves and the rotation behind it, against float64 and against their parts."""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.check import expected_of, moved
from emberbox.ops.launch import Program
from emberbox.ops.numerics import relative_error
from emberbox.ops.rotation import rotate, unrotate
from emberbox.ops.swiglu.reference import swiglu
from emberbox.ops.swiglu_open import OP, make_inputs
from emberbox.ops.swiglu_open import kernel_cuda as kernels
from tests.helpers.gpu import gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where __expf differs in its last bits, a float16 does here and there; else one rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.fixture
def gpu():
    return gpu_or_skip()


def run(inputs):
    here = {name: moved(value, torch.device("cuda")) for name, value in inputs.items()}
    return kernels.swiglu_open(**here).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_activation_then_the_rotation(dtype):
    inputs = make_inputs(5, 256, 1, dtype=dtype)
    gate, up = inputs["gate_up"][:, :256], inputs["gate_up"][:, 256:]
    y = swiglu(gate, up, 1.5)
    assert torch.equal(OP.reference(**{**inputs, "suh": None}), y)
    rotated = OP.reference(**inputs)
    assert torch.equal(rotated, rotate(y, inputs["suh"]))
    scaled = y.double() * inputs["suh"].double()
    assert relative_error(unrotate(rotated, torch.float64), scaled) < 5e-4
    swapped = OP.reference(torch.cat([up, gate], -1), 1.5, None)
    assert relative_error(swapped, y.double()) > 0.1


def test_a_warp_has_a_block_of_channels_of_a_row(monkeypatch):
    launched = []
    monkeypatch.setattr(Program, "launch", lambda *args: launched.append(args))
    for T, width, rotated, grid in ((1, 2048, 1, 2), (3, 130, 0, 1), (32, 12288, 1, 384)):
        inputs = make_inputs(T, width, rotated, dtype=torch.bfloat16)
        out = kernels.swiglu_open(**inputs)
        assert out.dtype is (torch.float16 if rotated else torch.bfloat16)
        _, name, blocks, args = launched.pop()
        assert (name, blocks) == ("activate", grid)
        assert (args[2] is out, args[3] is out) == (bool(rotated), not rotated)
        assert args[4:] == (T, width, 1.5)
    assert kernels.swiglu_open(inputs["gate_up"][:0], 1.5, None).shape == (0, 12288)
    assert launched == []


def test_what_does_not_fit_is_refused_by_name():
    inputs = make_inputs(2, 256, 1, dtype=torch.float32)
    with pytest.raises(OpError, match=r"suh is \(128,\) .* expected \(256,\)"):
        kernels.swiglu_open(inputs["gate_up"], 1.5, inputs["suh"][:128])
    with pytest.raises(OpError, match=r"suh is \(256,\) of torch\.float32"):
        kernels.swiglu_open(inputs["gate_up"], 1.5, inputs["suh"].float())
    with pytest.raises(OpError, match=r"suh is .* contiguous"):
        kernels.swiglu_open(inputs["gate_up"], 1.5, inputs["suh"].repeat_interleave(2)[::2])
    with pytest.raises(OpError, match="511 channels are no gate and up"):
        kernels.swiglu_open(inputs["gate_up"][:, 1:], 1.5, None)
    odd = make_inputs(2, 130, 1, dtype=torch.float32)
    with pytest.raises(OpError, match="130 channels to rotate, expected whole blocks of 128"):
        kernels.swiglu_open(**odd)
    with pytest.raises(OpError, match=r"torch\.float64, not one of"):
        kernels.swiglu_open(inputs["gate_up"].double(), 1.5, None)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "rotated"), [(2048, 1), (128, 1), (12288, 1), (1, 0), (389, 0)])
def test_real_and_odd_sizes(gpu, T, dtype, width, rotated):
    inputs = make_inputs(T, width, rotated, dtype=dtype, seed=T)
    expected, _ = expected_of(OP, inputs)
    found = run(inputs)
    assert found.dtype is (torch.float16 if rotated else dtype)
    assert relative_error(found, expected) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "rotated"), [(384, 1), (389, 0)])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, width, rotated, monkeypatch):
    inputs = make_inputs(9, width, rotated, dtype=torch.bfloat16)
    expected = run(inputs)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        with monkeypatch.context() as patch:
            guarded.install(patch)
            found = kernels.swiglu_open(**here)
        torch.cuda.synchronize()
        guarded.check()
        assert torch.equal(found.cpu(), expected)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row(gpu):
    inputs = make_inputs(3, 256, 1, dtype=torch.float32)
    whole = run(inputs)
    inputs["gate_up"][1, 5] = float("nan")
    found = run(inputs)
    assert bool(found[1, :128].isnan().all())
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@pytest.mark.gpu
def test_a_captured_graph_gives_what_a_call_gives(gpu):
    inputs = make_inputs(3, 2048, 1, dtype=torch.bfloat16)
    here = {name: moved(value, gpu) for name, value in inputs.items()}
    x = here["gate_up"].clone()
    kernels.swiglu_open(**here)  # builds and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.swiglu_open(**here)
    for scale in (1.0, -0.5):
        here["gate_up"].copy_(x * scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, kernels.swiglu_open(**here))
        assert bool(found.any())
