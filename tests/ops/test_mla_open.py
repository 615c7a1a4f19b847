"""A sparse layer's opening: the reference against the cache, the kernel against the reference.

Without a GPU: which places of the cache a row writes, and what is refused.
"""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.model.cache import ring_tokens
from emberbox.ops import check as checks
from emberbox.ops.check import check_case, expected_of, tensors
from emberbox.ops.fp8_rows import dequantise_rows
from emberbox.ops.index_pool.reference import index_pool
from emberbox.ops.launch import STEP_TYPES, TYPES, arch_of, source
from emberbox.ops.mla_open import OP, make_inputs
from emberbox.ops.mla_open import kernel_cuda as kernels
from emberbox.ops.mla_open.reference import RING
from emberbox.ops.numerics import relative_error
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FULL = {"Rq": 1536, "Cl": 512, "Hi": 32, "num_suhs": 2}
NANO = {"Rq": 128, "Cl": 128, "Hi": 16, "num_suhs": 2}
SHAPES = [(1, 1), (3, 1), (2, 5), (8, 4), (1, 13), (1, 14), (1, 200)]
UPDATED = [name for name in OP.updates if name != "scales"]


def rows_of(slots, positions, counts, table):
    return tuple(
        torch.tensor(part, dtype=torch.int32) for part in (slots, positions, counts, table)
    )


def case(B, M, sizes, *, dtype=torch.bfloat16, fp8=0, seed=0):
    """Inputs of the op; a long sequence begins at 5, in a cache of more pages."""
    inputs = make_inputs(B, min(M, 40), **sizes, fp8=fp8, dtype=dtype, seed=seed)
    if M <= 40:
        return inputs
    own = make_inputs(5, M, **sizes, fp8=fp8, dtype=dtype, seed=seed)
    kept = {name: own[name][:M] for name in ("projected", "small")}
    return own | kept | {"rows": rows_of([2], [5], [M - 3], [[7, 0, 3, 9, 11]])}


def on_gpu(inputs):
    return {name: checks.moved(value, CUDA) for name, value in inputs.items()}


def both(inputs):
    """What the kernel gives and changes, what the reference does in float64."""
    expected = [*tensors(expected_of(OP, inputs))]
    here = on_gpu(inputs)
    found = kernels.mla_open(**here), [here[name] for name in OP.updates]
    return [*tensors(found)], expected


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device, made = gpu_or_skip(), {}
    for x_type in STEP_TYPES:
        for latents in (x_type, kernels.FP8):
            for pooled in TYPES:
                macros = kernels.macros(x_type, latents, pooled)
                made[macros] = source(kernels.SOURCE, dict(macros))
    build_all(made.values(), arch_of(device))
    return device


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", OP.tolerance, ids=str)
@pytest.mark.parametrize("at", range(len(OP.cases)))
def test_the_reference_keeps_its_contract(dtype, at):
    checked = check_case(OP, None, OP.cases[at], dtype, CPU)
    assert checked.is_right, checked.mismatch


def test_rows_go_to_their_pages_slots_and_pools():
    """Two sequences of three rows, two and none of them real; one completes pool 16 of its own."""
    inputs = make_inputs(2, 3, dtype=torch.float64)
    inputs |= {"rows": rows_of([3, 1], [66, 9], [2, 0], [[4, 2, 0], [1, 5, 3]])}
    before = {name: inputs[name].clone() for name in UPDATED}
    OP.reference(**inputs)
    changed = {n: (inputs[n] != before[n]).any(-1).nonzero().tolist() for n in UPDATED}
    at = 2 * 64 + 2
    assert changed["latents"] == [[at], [at + 1]]
    assert changed["ring_keys"] == changed["ring_gates"] == [[3, 2], [3, 3]]
    assert changed["pooled"] == [[at // 4]]
    gates = inputs["small"][:2, 128:256]
    assert torch.equal(inputs["ring_gates"][3, 2:4], gates)
    pool = [inputs[name][3, :4] for name in ("ring_keys", "ring_gates")]
    assert torch.equal(inputs["pooled"][at // 4], index_pool(*pool, inputs["ape"]))
    assert torch.equal(inputs["ring_keys"][3, :2], before["ring_keys"][3, :2])


def test_the_ring_turns_after_sixteen_tokens():
    inputs = make_inputs(1, 37, dtype=torch.float64)
    inputs |= {"rows": rows_of([1], [6], [37], [[2, 0, 1]])}
    OP.reference(**inputs)
    last = [43 - 1 - (42 - place) % 16 for place in range(16)]  # token that each place holds
    gates = inputs["small"][:, 128:256]
    assert torch.equal(inputs["ring_gates"][1], gates[[token - 6 for token in last]])


def test_norms_and_head_weights():
    inputs = make_inputs(2, 1, Hi=4, dtype=torch.float64)
    q, _, weights = OP.reference(**inputs)
    x = inputs["projected"][:, :128]
    root = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert relative_error(q, x / root * inputs["q_norm"]) <= 1e-12
    assert relative_error(weights, inputs["small"][:, 256:] / 2) <= 1e-12
    keys = inputs["small"][0, :128]
    centred = keys - keys.mean()
    weight, bias = inputs["k_norm"]
    expected = centred / (centred.square().mean() + 1e-6).sqrt() * weight + bias
    slot, position = int(inputs["rows"][0][0]), int(inputs["rows"][1][0])
    assert relative_error(inputs["ring_keys"][slot, position % 16], expected) <= 1e-6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"projected": torch.zeros(2, 256).half()}, "projected is .* torch.float16"),
        ({"scales": torch.ones(384, 1)}, "need scales"),
        ({"small": torch.zeros(2, 259, dtype=torch.bfloat16)}, "small is .* torch.bfloat16"),
        ({"q_norm": torch.zeros(100)}, "100 query and 156 latent"),
        ({"ape": torch.zeros(3, 128)}, "pools of 3"),
        ({"suhs": (torch.zeros(128).half(),) * 3}, "3 rotations"),
        ({"suhs": (torch.zeros(128),)}, "suh is .* torch.float32"),
        ({"suhs": (torch.zeros(64).half(),)}, "suh is .64,."),
        ({"kv_norm": torch.zeros(256)[::2]}, "kv_norm is .* contiguous"),
        ({"kv_norm": torch.zeros(256)}, "kv_norm is .256,."),
        ({"k_norm": (torch.zeros(128), torch.zeros(129))}, "bias of k_norm is"),
        ({"small": torch.zeros(2, 256)}, "256 small products"),
        ({"latents": torch.zeros(384, 256)}, "latents is .384, 256."),
        ({"latents": torch.zeros(384, 128).half()}, "latents is .* torch.float16"),
        ({"pooled": torch.zeros(97, 128)}, "pooled is .97, 128."),
        ({"ring_keys": torch.zeros(4, 8, 128)}, "ring_keys is .* expected .4, 16, 128."),
        ({"ring_gates": torch.zeros(4, 32, 128)}, "ring_gates is .* expected .4, 16, 128."),
        ({"rows": rows_of([0, 1], [5], [1, 1], [[0]] * 2)}, "positions is .1,."),
        ({"rows": rows_of([0, 1, 2], [5] * 3, [1] * 3, [[0]] * 3)}, "2 rows of 3 sequences"),
        ({"rows": rows_of([], [], [], [])}, "2 rows of 0 sequences"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(change, said):
    with pytest.raises(OpError, match=said):
        kernels.mla_open(**make_inputs(2, 1, dtype=torch.float32) | change)


@pytest.mark.parametrize("which", range(4))
def test_rows_are_numbers_of_32_bits(which):
    inputs = make_inputs(2, 1, dtype=torch.float32)
    rows = tuple(p.long() if i == which else p for i, p in enumerate(inputs["rows"]))
    with pytest.raises(OpError, match=r"torch\.int64"):
        kernels.mla_open(**inputs | {"rows": rows})


@pytest.mark.parametrize("scales", [torch.ones(384, 1).half(), torch.ones(383, 1)])
def test_scales_of_other_types_or_rows_are_refused(scales):
    inputs = make_inputs(2, 1, fp8=1, dtype=torch.float32)
    with pytest.raises(OpError, match="scales is"):
        kernels.mla_open(**inputs | {"scales": scales})


def test_a_cache_has_the_ring_that_the_kernel_knows():
    """For every pool that the kernel takes; those of 16 tokens have a longer one."""
    assert {ring_tokens(pool) for pool in (1, 2, 4, kernels.MAX_POOL)} == {RING}
    assert ring_tokens(2 * kernels.MAX_POOL) != RING


def test_whole_numbers_are_passed_as_the_floats_they_stand_for(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels.Program, "launch", lambda *call: asked.append(call[3]))
    kernels.mla_open(**make_inputs(1, 1, dtype=torch.float32) | {"eps": (0, 1)})
    assert repr(asked[0][-3:]) == "(0.0, 1.0, 2)"


@pytest.mark.parametrize(("M", "phases"), [(1, [2]), (13, [2]), (14, [0, 1]), (40, [0, 1])])
def test_the_ring_waits_where_new_keys_would_meet_old_ones(M, phases, monkeypatch):
    """14 tokens: the last writes the place from which the first pools."""
    asked = []

    def record(program, name, grid, args):
        asked.append((name, grid, args[-1]))

    monkeypatch.setattr(kernels.Program, "launch", record)
    kernels.mla_open(**make_inputs(1, M, dtype=torch.bfloat16))
    assert asked == [("open_rows", 3 * M, phase) for phase in phases]


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OP.tolerance, ids=str)
@pytest.mark.parametrize("sizes", [FULL, NANO], ids=["full", "nano"])
@pytest.mark.parametrize(("B", "M"), SHAPES)
def test_it_keeps_the_contract(gpu, B, M, sizes, dtype):
    found, expected = both(case(B, M, sizes, dtype=dtype))
    errors = [relative_error(f.cpu(), e) for f, e in zip(found, expected, strict=True)]
    assert max(errors) <= OP.tolerance[dtype], errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OP.tolerance, ids=str)
@pytest.mark.parametrize(("B", "M"), SHAPES)
def test_float8_latents(gpu, B, M, dtype):
    inputs = case(B, M, FULL, dtype=dtype, fp8=1)
    here = on_gpu(inputs)
    kernels.mla_open(**here)
    OP.reference(**inputs)
    found, expected = (
        dequantise_rows(i["latents"].cpu(), i["scales"].cpu()) for i in (here, inputs)
    )
    assert relative_error(found, expected) <= 6e-3  # a code next to a tie may be the other one
    assert relative_error(here["scales"].cpu(), inputs["scales"]) <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_norms_and_pooled_keys_of_every_type(gpu, kind):
    inputs = case(3, 4, NANO)
    for name in ("q_norm", "ape", "pooled"):
        inputs[name] = inputs[name].to(kind)
    inputs["k_norm"] = (inputs["k_norm"][0].to(kind), inputs["k_norm"][1].float())
    found, expected = both(inputs)
    errors = [relative_error(f.cpu(), e) for f, e in zip(found, expected, strict=True)]
    assert max(errors) <= OP.tolerance[torch.bfloat16], errors


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [0, 1], ids=["plain", "fp8"])
@pytest.mark.parametrize(("B", "M"), SHAPES)
def test_padding_and_other_rows_are_left_alone(gpu, B, M, fp8):
    inputs = case(B, M, NANO, fp8=fp8)
    counts = inputs["rows"][2]
    counts[0] = M - 1
    names = [name for name in OP.updates if inputs[name] is not None]
    before = {name: inputs[name].clone() for name in names}
    here = on_gpu(inputs)
    kernels.mla_open(**here)
    OP.reference(**inputs)
    for name in names:
        wanted = _changed(inputs[name], before[name])
        assert torch.equal(_changed(here[name].cpu(), before[name]), wanted), name


def _changed(after, before):
    """Which rows have other bytes."""
    views = [t.flatten(0, -2).contiguous().view(torch.uint8) for t in (after, before)]
    return (views[0] != views[1]).any(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [0, 1], ids=["plain", "fp8"])
@pytest.mark.parametrize("num_suhs", [0, 1, 2])
@pytest.mark.parametrize(("B", "M"), [(1, 1), (3, 4), (1, 21)])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, B, M, num_suhs, fp8, monkeypatch):
    inputs, results = case(B, M, FULL | {"num_suhs": num_suhs}, fp8=fp8), []
    expected = [t.cpu() for t in kernels.mla_open(**on_gpu(inputs))]
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        with monkeypatch.context() as patch:
            guarded.install(patch)
            results.append(kernels.mla_open(**here))
        torch.cuda.synchronize()
        guarded.check()
    for result in results:
        assert all(torch.equal(f.cpu(), e) for f, e in zip(result, expected, strict=True))


@pytest.mark.gpu
def test_a_captured_graph_gives_what_a_call_gives(gpu):
    inputs = [on_gpu(case(3, 4, NANO, seed=seed)) for seed in range(3)]
    held = {n: _cloned(v) for n, v in inputs[0].items()}
    kernels.mla_open(**held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = kernels.mla_open(**held)
    for other in inputs:
        for own, given in zip(tensors(held), tensors(other), strict=True):
            own.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        alone = kernels.mla_open(**other)
        assert all(torch.equal(a, b) for a, b in zip(outputs, alone, strict=True))
        assert all(torch.equal(held[name], other[name]) for name in UPDATED)


def _cloned(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(_cloned(item) for item in value) if isinstance(value, tuple) else value
