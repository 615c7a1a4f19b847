"""kda_decode and kda_apply: the layer op by op, drafts against single steps; kernels on a GPU."""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops import kda_apply, kda_decode
from emberbox.ops.check import check_case, expected_of, moved, tensors
from emberbox.ops.conv_step.reference import conv_step
from emberbox.ops.inputs import Random
from emberbox.ops.kda_apply import kernel_cuda as apply_kernels
from emberbox.ops.kda_decode import kernel_cuda as kernels
from emberbox.ops.kda_inputs.reference import kda_inputs
from emberbox.ops.kda_step.reference import kda_step
from emberbox.ops.launch import STEP_TYPES, Program, arch_of, source
from emberbox.ops.numerics import relative_error
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.rotation import rotate
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

CPU = torch.device("cpu")
D = 128
DTYPES = (torch.float32, torch.bfloat16)
# B, M, H, R: rows 1, 3, 8, 32 at the full size; the nano model's; odd ones.
FULL = [(B, M, 64, 128) for B, M in ((1, 1), (3, 1), (1, 8), (8, 4), (32, 1))]
SIZES = (*FULL, (4, 2, 2, 128), (5, 3, 3, 8), (2, 5, 1, 264))
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 8e-3}


def decode_inputs(B, M, H, R, *, dtype=torch.float32, seed=0, suh=None, counts=None):
    """As make_inputs, rotated only if `suh` says so where it says anything."""
    inputs = kda_decode.make_inputs(B, M, H, R, dtype=dtype, seed=seed)
    if suh is not None:
        scales = Random(seed, torch.float16).uniform(H * D, low=0.5, high=1.5).half()
        inputs["weights"] = (*inputs["weights"][:6], scales if suh else None)
    if counts is not None:
        inputs["rows"] = inputs["rows"][0], torch.tensor(counts, dtype=torch.int32)
    return inputs


def changed_by(inputs):
    """Masks over history, states and the four of `pending`: what the op may change."""
    T = len(inputs["inputs"][0])
    slots, counts = (each.tolist() for each in inputs["rows"])
    M = T // len(slots)
    held = torch.zeros(len(inputs["cache"][0]), dtype=torch.bool)
    held[[slot for slot, count in zip(slots, counts, strict=True) if count]] = True
    rows = torch.tensor([0 < row % M < counts[row // M] for row in range(T)])
    return (held, held, rows, rows, rows, rows)


def held_of(inputs):
    return (*inputs["cache"], *inputs["pending"])


def cloned(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(cloned(item) for item in value) if isinstance(value, tuple) else value


def copy_of(inputs):
    return {name: cloned(value) for name, value in inputs.items()}


# -- the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [kda_decode.OP, kda_apply.OP], ids=lambda op: op.name)
def test_the_references_keep_their_contracts(op):
    for dtype in op.tolerance:
        for case in op.cases:
            found = check_case(op, None, case, dtype, CPU)
            assert found.is_right, found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_each_is_the_layer_op_by_op(dtype):
    """To the bit: the roundings are those of model/kda.py."""
    B, H, R = 3, 2, 24
    inputs = decode_inputs(B, 1, H, R, dtype=dtype, suh=True, counts=[1] * B)
    qkv, small = inputs["inputs"]
    f_b, g_b, conv, A_log, dt_bias, o_norm, suh = inputs["weights"]
    (history, states), slots = copy_of(inputs)["cache"], inputs["rows"][0].long()
    small = small.to(dtype)
    mixed = conv_step(qkv, conv, history, slots)
    q, k, v = mixed.view(B, 3, H, D).unbind(1)
    forget = (small[:, :R] @ f_b.T).view(B, H, D)
    q, k, gate = kda_inputs((q, k), forget, A_log, dt_bias, -5.0)
    out = kda_step((q, k, v), gate, torch.sigmoid(small[:, 2 * R :].float()), states, slots)
    by = torch.sigmoid((small[:, R : 2 * R] @ g_b.T).float()).view(B, H, D)
    x = (rms_norm(out.to(dtype), o_norm, 1e-5).float() * by).to(dtype).flatten(1)
    found = kda_decode.OP.reference(**inputs)
    assert torch.equal(found, rotate(x, suh))
    assert torch.equal(inputs["cache"][0], history)
    assert relative_error(inputs["cache"][1], states) < 1e-7


@pytest.mark.parametrize("accepted", [(0, 3, 1), (2, 0, 3)])
def test_drafts_that_are_applied_are_single_steps(accepted):
    """One pass over four tokens of three sequences, then as many as are accepted."""
    B, M, H, R = 3, 4, 2, 16
    inputs = decode_inputs(B, M, H, R, suh=False, counts=[M] * B)
    steps = copy_of(inputs)
    whole = kda_decode.OP.reference(**inputs)
    states, history = inputs["cache"][1].unsqueeze(0), inputs["cache"][0].unsqueeze(0)
    pending = tuple(each.unsqueeze(0) for each in inputs["pending"])
    counts = torch.tensor(accepted, dtype=torch.int32)
    kda_apply.OP.reference(states, history, pending, inputs["rows"][0], counts)
    for m in range(M):
        rows = torch.arange(B) * M + m
        one = steps | {
            "inputs": tuple(each[rows] for each in steps["inputs"]),
            "pending": tuple(each[rows] for each in steps["pending"]),
            "rows": (steps["rows"][0], (counts >= m).int()),
        }
        out = kda_decode.OP.reference(**one)
        taken = counts >= m
        assert relative_error(whole[rows][taken], out[taken]) < 1e-6
    assert torch.equal(history[0], steps["cache"][0])
    assert relative_error(states[0], steps["cache"][1]) < 1e-6


def test_padding_changes_nothing_and_comes_out_as_zero():
    inputs = decode_inputs(4, 3, 1, 8, suh=False, counts=[0, 1, 3, 2])
    before = copy_of(inputs)
    out = kda_decode.OP.reference(**inputs)
    is_real = out.abs().sum(-1) > 0
    assert is_real.tolist() == [False] * 3 + [True, False, False] + [True] * 5 + [False]
    for mask, old, new in zip(changed_by(inputs), held_of(before), held_of(inputs), strict=True):
        assert torch.equal(old[~mask], new[~mask])
        assert all(not torch.equal(a, b) for a, b in zip(old[mask], new[mask], strict=True))


# -- launches, without a GPU ---------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """(macros, kernel, grid, arguments, shared bytes, threads) in place of launches."""
    found = []

    def note(program, name, grid, args, shared=0, threads=256):
        found.append((dict(program.macros), name, grid, args, shared, threads))

    monkeypatch.setattr(Program, "launch", note)
    return found


@pytest.mark.parametrize(("M", "tokens"), [(1, 1), (2, 8), (8, 8)])
def test_a_launch_has_a_block_for_each_head_and_memory_for_its_tokens(launches, M, tokens):
    inputs = decode_inputs(2, M, 3, 40, dtype=torch.bfloat16)
    y = kernels.kda_decode(**inputs)
    assert (y.shape, y.dtype) == ((2 * M, 3 * D), torch.bfloat16)
    ((macros, name, grid, args, shared, threads),) = launches
    assert (macros, name, grid) == ({"X_TYPE": 2, "TOKENS": tokens}, "kda_decode", 6)
    assert threads == 512
    # q, k, v, decay, gate and result, and four sums of a token; partial sums; a change; f_a, g_a.
    assert shared == 4 * (M * (6 * D + 4) + 16 * (2 * D + 8) + D) + 2 * M * (2 * 40 + 32)
    assert args[-5:] == (M, 3, 40, -5.0, 1e-5)
    assert kernels.kda_decode(**decode_inputs(2, 1, 2, 40)).dtype is torch.float16


def test_weights_that_are_ready_are_taken_as_they_are(launches):
    inputs = decode_inputs(1, 1, 2, 16, dtype=torch.bfloat16)
    kernels.kda_decode(**inputs)
    assert all(a is w for a, w in zip(launches[0][3][2:9], inputs["weights"], strict=True))
    f_b, g_b, *others = inputs["weights"]
    stored = (f_b, g_b, *(w.double().repeat_interleave(2, -1)[..., ::2] for w in others))
    with pytest.raises(OpError, match=r"conv is .* contiguous"):
        kernels.kda_decode(**inputs | {"weights": stored})
    kernels.kda_decode(**inputs | {"weights": kernels.ready_weights(stored)})
    for a, w in zip(launches[1][3][2:9], inputs["weights"], strict=True):
        assert a.dtype == w.dtype
        assert torch.equal(a, w)


def test_whole_numbers_are_passed_as_the_floats_they_stand_for(launches):
    kernels.kda_decode(**decode_inputs(1, 1, 2, 16) | {"constants": (-5, 1e-5)})
    assert repr(launches[0][3][-2:]) == "(-5.0, 1e-05)"


def test_a_launch_of_accepted_drafts_has_two_blocks_for_each_head(launches):
    inputs = kda_apply.make_inputs(3, 2, 4, 2, dtype=torch.bfloat16)
    apply_kernels.kda_apply(**inputs)
    ((macros, name, grid, args, _, threads),) = launches
    assert (macros, name, grid, threads) == ({"X_TYPE": 2}, "kda_apply", 3 * 2 * 2 * 2, 256)
    assert args[-4:] == (2, 4, 2, 4)


@pytest.mark.parametrize(
    ("name", "index", "change"),
    [
        ("inputs", 0, lambda x: x.half()),
        ("inputs", 0, lambda x: x[:, :-1]),
        ("inputs", 0, lambda x: x[:3]),
        ("inputs", 1, lambda x: x.bfloat16()),
        ("inputs", 1, lambda x: x[:, 1:]),
        ("weights", 0, lambda x: x[:, :12]),
        ("weights", 1, lambda x: x[:-1]),
        ("weights", 2, lambda x: x[:, :3]),
        ("weights", 5, lambda x: x[:64]),
        ("weights", 6, lambda x: x[:D]),
        ("weights", 3, lambda x: x.bfloat16()),
        ("weights", 0, lambda x: x.bfloat16()),
        ("weights", 1, lambda x: x.T.contiguous().T),
        ("cache", 0, lambda x: x.bfloat16()),
        ("cache", 1, lambda x: x.transpose(2, 3)),
        ("cache", 1, lambda x: x.double()),
        ("pending", 0, lambda x: x[1:]),
        ("pending", 2, lambda x: x.bfloat16()),
        ("rows", 0, lambda x: x.long()),
        ("rows", 1, lambda x: x[1:]),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(launches, name, index, change):
    inputs = decode_inputs(2, 2, 2, 16)
    inputs[name] = tuple(change(x) if i == index else x for i, x in enumerate(inputs[name]))
    with pytest.raises(OpError, match="kda_decode"):
        kernels.kda_decode(**inputs)
    assert launches == []


@pytest.mark.parametrize("name", ["states", "history", "slots", "accepted"])
def test_drafts_that_the_kernel_cannot_read_are_refused(launches, name):
    inputs = kda_apply.make_inputs(1, 2, 2, 1, dtype=torch.float32)
    inputs[name] = inputs[name].to(torch.float64)
    with pytest.raises(OpError, match="kda_apply"):
        apply_kernels.kda_apply(**inputs)
    assert launches == []


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu():
    """The device, with every kernel that these tests launch in the cache."""
    device = gpu_or_skip()
    types = STEP_TYPES.values()
    pairs = [{"X_TYPE": x_type, "TOKENS": n} for x_type in types for n in (1, kernels.MAX_TOKENS)]
    sources = [source(kernels.SOURCE, macros) for macros in pairs]
    sources += [source(apply_kernels.SOURCE, {"X_TYPE": x_type}) for x_type in types]
    build_all(sources, arch_of(device))
    return device


def on(device, inputs):
    here = {name: moved(value, device) for name, value in inputs.items()}
    torch.cuda.synchronize()  # the kernel reads the cache before its turn
    return here


def run(device, inputs):
    """(result, what the op updates) on the CPU."""
    here = on(device, inputs)
    out = kernels.kda_decode(**here)
    return out.cpu(), tuple(each.cpu() for each in held_of(here))


def check_against_float64(inputs, out, held, dtype):
    expected, (cache, pending) = expected_of(kda_decode.OP, inputs)
    assert relative_error(out, expected) <= LIMITS[dtype]
    found = zip(changed_by(inputs), held_of(inputs), held, (*cache, *pending), strict=True)
    for mask, before, after, wanted in found:
        assert torch.equal(before[~mask], after[~mask])
        if bool(mask.any()):
            limit = LIMITS[dtype] if dtype is torch.bfloat16 else 2e-5
            assert relative_error(after[mask], wanted[mask]) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suh", [True, False], ids=["rotated", "plain"])
def test_the_kernel_against_float64(gpu, size, dtype, suh):
    inputs = decode_inputs(*size, dtype=dtype, suh=suh)
    check_against_float64(inputs, *run(gpu, inputs), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("M", range(1, 9))
def test_every_count_of_tokens(gpu, M):
    inputs = decode_inputs(M + 1, M, 2, 128, dtype=torch.float32, suh=False)
    assert inputs["rows"][1].tolist() == [*range(M, -1, -1)]
    out, held = run(gpu, inputs)
    check_against_float64(inputs, out, held, torch.float32)
    is_real = out.abs().sum(-1) > 0
    assert is_real.tolist() == [m < M - b for b in range(M + 1) for m in range(M)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 1, 64, 128), (3, 8, 2, 128), (5, 3, 3, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, size, dtype, monkeypatch):
    inputs = decode_inputs(*size, dtype=dtype, suh=True)
    expected, held = run(gpu, inputs)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        torch.cuda.synchronize()
        with monkeypatch.context() as patch:
            guarded.install(patch)
            out = kernels.kda_decode(**here)
        torch.cuda.synchronize()
        guarded.check()
        assert torch.equal(out.cpu(), expected)
        for after, wanted in zip(held_of(here), held, strict=True):
            assert torch.equal(after.cpu(), wanted)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4])
def test_a_sequence_gives_the_same_alone_and_among_others(gpu, M):
    inputs = decode_inputs(6, M, 2, 128, dtype=torch.bfloat16, counts=[M] * 6)
    whole, held = run(gpu, inputs)
    for b, slot in enumerate(inputs["rows"][0].tolist()):
        rows = slice(b * M, b * M + M)
        one = inputs | {
            "inputs": tuple(each[rows].contiguous() for each in inputs["inputs"]),
            "pending": tuple(each[rows].contiguous() for each in inputs["pending"]),
            "rows": tuple(each[b : b + 1].contiguous() for each in inputs["rows"]),
        }
        out, own = run(gpu, one)
        assert torch.equal(out, whole[rows])
        assert all(torch.equal(own[i][slot], held[i][slot]) for i in (0, 1))
        assert all(torch.equal(own[i], held[i][rows]) for i in (2, 3, 4, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4])
def test_what_is_not_a_number_stays_with_its_head(gpu, M):
    inputs = decode_inputs(3, M, 2, 128, suh=False, counts=[M] * 3)
    whole, _ = run(gpu, inputs)
    inputs["inputs"][0][M, D + 5] = float("nan")  # q of head 1, first token of sequence 1
    found, _ = run(gpu, inputs)
    assert bool(found[M, D:].isnan().all())
    assert torch.equal(found[:, :D], whole[:, :D])
    others = [row for row in range(3 * M) if row // M != 1]
    assert torch.equal(found[others], whole[others])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [(1, 1, 2, 1), (3, 5, 3, 2), (34, 2, 2, 64), (2, 3, 8, 3)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepted_drafts_against_float64(gpu, size, dtype):
    L, B, M, H = size
    inputs = kda_apply.make_inputs(L, B, M, H, dtype=dtype)
    inputs["slots"] = torch.randperm(B + 2).int()[:B]
    _, (states, history) = expected_of(kda_apply.OP, inputs)
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        torch.cuda.synchronize()
        apply_kernels.kda_apply(**here)
        torch.cuda.synchronize()
        guarded.check()
        assert torch.equal(here["history"].cpu().double(), history)
        assert relative_error(here["states"].cpu(), states) <= 1e-6
        used = inputs["slots"][inputs["accepted"] > 0].tolist()
        others = [slot for slot in range(B + 2) if slot not in used]
        assert torch.equal(here["states"].cpu()[:, others], inputs["states"][:, others])


def decode_two_layers(held, layers, counts):
    """Both layers' tokens, then the drafts of both."""
    states, history, pending, slots, accepted = held
    outs = []
    for layer, inputs in enumerate(layers):
        of_layer = tuple(each[layer] for each in pending)
        cache = history[layer], states[layer]
        here = inputs | {"cache": cache, "pending": of_layer, "rows": (slots, counts)}
        outs.append(kernels.kda_decode(**here))
    apply_kernels.kda_apply(states, history, pending, slots, accepted)
    return outs


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4])
def test_a_captured_graph_gives_what_a_call_gives(gpu, M):
    B, H, R, dtype = 3, 4, 128, torch.bfloat16
    layers = [on(gpu, decode_inputs(B, M, H, R, dtype=dtype, seed=seed)) for seed in (1, 2)]
    made = on(gpu, kda_apply.make_inputs(2, B, M, H, dtype=dtype))
    start = tuple(made.values())
    counts = torch.full((B,), M, dtype=torch.int32, device=gpu)
    decode_two_layers(cloned(start), layers, counts)
    held = cloned(start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = decode_two_layers(held, layers, counts)
    plain = cloned(start)
    for seed in range(3):
        for inputs in layers:
            new = decode_inputs(B, M, H, R, dtype=dtype, seed=10 + seed)["inputs"]
            for old, value in zip(inputs["inputs"], new, strict=True):
                old.copy_(value)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        wanted = decode_two_layers(plain, layers, counts)
        torch.cuda.synchronize()
        for a, b in zip(tensors((held, outs)), tensors((plain, wanted)), strict=True):
            assert torch.equal(a, b)
