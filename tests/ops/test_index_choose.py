"""The choice of paged pools: the reference against the ops it is made of, the kernels against it.

Without a GPU: the reference, what the kernels refuse, and how many rows they take at a time.
"""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.check import check_case, expected_of, moved
from emberbox.ops.index_choose import OP, POOL, make_inputs
from emberbox.ops.index_choose import kernel_cuda as kernels
from emberbox.ops.index_choose.reference import PAGE, index_choose
from emberbox.ops.index_scores.reference import index_scores
from emberbox.ops.index_select.reference import index_select
from emberbox.ops.launch import STEP_TYPES, Program, arch_of, source
from tests.helpers.gpu import build_all, gpu_or_skip
from tests.helpers.guarded import FILLS, Guarded

IN_PAGE = PAGE // POOL
NO_PAGE = 1 << 28  # read by nobody: its rows would lie outside of any memory
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def case(positions, counts, M, *, Hi=16, topk=64, dtype=BFLOAT16, seed=0):
    """Inputs where every sequence has just the pages that it needs, and a sequence without real
    tokens none."""
    inputs = make_inputs(len(positions), M, max(positions), Hi, dtype=dtype, seed=seed)
    slots, _, _, table = inputs["rows"]
    for pages, position, count in zip(table, positions, counts, strict=True):
        pages[-(-(position + count) // PAGE) if count else 0 :] = NO_PAGE
    rows = torch.tensor([positions, counts], dtype=torch.int32)
    return inputs | {"rows": (slots, *rows, table), "topk": topk}


def without_fractions(inputs, levels):
    """The same with few different scores, which are exact: many ties."""
    q, pooled = torch.zeros_like(inputs["q"]), torch.zeros_like(inputs["pooled"])
    q[:, ::128] = 1
    generator = torch.Generator().manual_seed(levels)
    pooled[:, 0] = torch.randint(levels, (len(pooled),), generator=generator).to(pooled.dtype)
    return inputs | {"q": q, "pooled": pooled, "weights": torch.ones_like(inputs["weights"])}


def places(inputs, b, tokens):
    """Latent rows of tokens of sequence b."""
    pages = inputs["rows"][3][b].tolist()
    return [pages[token // PAGE] * PAGE + token % PAGE for token in tokens]


def chosen_rows(inputs, function=index_choose):
    """What each row chose, as lists; that nothing else is there is looked at."""
    chosen, num = function(**inputs)
    assert chosen.dtype is num.dtype is torch.int32
    assert chosen.shape == (len(inputs["q"]), inputs["topk"] + POOL - 1)
    assert all(bool((row[n:] == -1).all()) for row, n in zip(chosen, num, strict=True))
    return [row[:n].tolist() for row, n in zip(chosen, num, strict=True)]


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_a_row_chooses_what_scores_and_selection_of_its_sequence_say(dtype):
    inputs = case([5000, 0, 261, 130], [3, 3, 2, 3], 3, dtype=dtype)
    _, positions, counts, table = inputs["rows"]
    found = chosen_rows(inputs)
    for t in range(12):
        b, m = divmod(t, 3)
        if m >= counts[b]:
            assert found[t] == []
            continue
        at = positions[b : b + 1].long() + m
        pages = table[b, : int(at) // PAGE + 1].long()
        keys = inputs["pooled"].unflatten(0, (-1, IN_PAGE))[pages].flatten(0, 1)
        q = inputs["q"][t].view(1, -1, 128)
        scores = index_scores(q, keys, inputs["weights"][t : t + 1])
        tokens = index_select(scores, at, POOL, inputs["topk"])
        assert found[t] == places(inputs, b, sorted(tokens[tokens >= 0].tolist()))


@pytest.mark.parametrize("position", [0, 1, 2, 3, 62, 63, 64, 255, 256, 258])
def test_every_token_is_chosen_while_all_pools_fit(position):
    inputs = case([position], [1], 1, topk=256)
    assert chosen_rows(inputs) == [places(inputs, 0, range(position + 1))]


def test_ties_go_to_the_lower_pool_and_a_choice_is_in_the_order_of_tokens():
    inputs = without_fractions(case([95], [1], 1, topk=16), 1)
    best, second = 20, (3, 7, 9, 15)  # one is best, three of the four equal ones have a place
    pages = inputs["rows"][3][0]
    for p in (best, *second):
        inputs["pooled"][pages[p // IN_PAGE] * IN_PAGE + p % IN_PAGE, 0] = 2 if p == best else 1
    tokens = [4 * p + i for p in (3, 7, 9, 20) for i in range(4)]
    assert chosen_rows(inputs) == [places(inputs, 0, tokens)]


def test_a_pool_whose_heads_all_say_no_ties_with_one_of_zeros():
    """Whatever the sign of zero. A negative weight makes a score negative."""
    inputs = without_fractions(case([99], [1], 1, topk=16), 1)
    pages = inputs["rows"][3][0]
    inputs["weights"][:] = -1
    for p, value in ((0, 1), (1, -1), (2, 0), (4, 3)):  # scores -16, -0, -0, -48
        inputs["pooled"][pages[p // IN_PAGE] * IN_PAGE + p % IN_PAGE, 0] = value
    tokens = [4 * p + i for p in (1, 2, 3, 5) for i in range(4)]
    assert chosen_rows(inputs) == [places(inputs, 0, tokens)]


NO_ROWS = case([70], [0], 1)
NO_ROWS |= {name: NO_ROWS[name][:0] for name in ("q", "weights")}


def test_no_rows():
    assert chosen_rows(NO_ROWS) == []


WRONG = {
    "pooled is": lambda x: x | {"pooled": x["pooled"].half()},
    "q is .4, 2047.": lambda x: x | {"q": x["q"][:, :-1].contiguous()},
    "multiple of 16": lambda x: x | {"q": x["q"][:, :1024], "weights": x["weights"][:, :8]},
    "whole pools": lambda x: x | {"topk": 62},
    "pools of 32": lambda x: x | {"pool": 32},  # two in a page: rows of scores begin anywhere
    "pools of 64": lambda x: x | {"pool": 64},
    "weights is": lambda x: x | {"weights": x["weights"].double()},
    "table is": lambda x: x | {"rows": tuple(r.long() for r in x["rows"])},
    "q is .4, 2048.": lambda x: x | {"q": x["q"].T.contiguous().T},
    "3 sequences": lambda x: x | {"rows": tuple(r[[0, 0, 1]] for r in x["rows"])},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_the_kernels_do_not_take_is_refused(said):
    inputs = WRONG[said](case([70, 70], [2, 2], 2))
    with pytest.raises(OpError, match=said):
        kernels.index_choose(**inputs)


@pytest.fixture
def launches(monkeypatch):
    """(name, grid, sizes) of launches, which are recorded in place of done."""
    recorded = []

    def record(program, name, grid, args, shared=0, threads=256):
        recorded.append((name, grid, [arg for arg in args if isinstance(arg, int)]))

    monkeypatch.setattr(Program, "launch", record)
    monkeypatch.setattr(Program, "load", lambda *_: None)
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 3)
    return recorded


def test_nothing_is_scored_where_the_table_holds_no_more_pools_than_are_chosen(launches):
    kernels.index_choose(**case([250], [6], 6))  # 64 pools, 16 chosen
    kernels.index_choose(**case([250], [6], 6, topk=256))
    assert [(name, grid) for name, grid, _ in launches] == [
        ("score", 6),
        ("choose", 6),
        ("choose", 6),
    ]


def test_many_rows_are_taken_in_pieces_that_scores_have_memory_for(launches, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_SCORES", 2 * 64 * 3)
    kernels.index_choose(**case([240, 240], [8, 8], 8))
    grids = [grid for name, grid, _ in launches if name == "choose"]
    firsts = [sizes[2] for name, _, sizes in launches if name == "choose"]
    assert (grids, firsts) == ([6, 6, 4], [0, 3, 6])


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu():
    """The device, with both kernels in the cache."""
    device = gpu_or_skip()
    wanted = [source(kernels.SOURCE, {"X_TYPE": x}) for x in STEP_TYPES.values()]
    build_all(wanted, arch_of(device))
    return device


def on_gpu(inputs):
    return {name: moved(value, torch.device("cuda")) for name, value in inputs.items()}


def run(inputs):
    chosen, num = kernels.index_choose(**on_gpu(inputs))
    return chosen.cpu(), num.cpu()


def assert_right(inputs):
    expected, _ = expected_of(OP, inputs)
    for found, wanted in zip(run(inputs), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("inputs", OP.cases, ids=str)
def test_cases_of_the_contract(gpu, inputs, dtype):
    assert check_case(OP, "cuda", inputs, dtype, gpu).is_right


@pytest.mark.gpu
@pytest.mark.parametrize("position", [0, 1, 2, 3, 63, 64, *range(254, 268), 323, 2051])
@pytest.mark.parametrize("topk", [64, 256])
def test_positions_around_edges(gpu, position, topk):
    assert_right(case([position], [1], 1, topk=topk))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4, 8])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("Hi", [16, 32, 48, 64])
def test_sequences_of_very_different_lengths(gpu, M, dtype, Hi):
    """The second sequence is padding, the last token of the third is."""
    positions, counts = [5003, 900, 1, 17900], [M, 0, M - 1, M]
    assert_right(case(positions, counts, M, Hi=Hi, topk=256, dtype=dtype, seed=M))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8])
@pytest.mark.parametrize("position", [20_000, 131_071, 300_001])
def test_long_contexts(gpu, M, position):
    assert_right(case([position], [M], M, Hi=32, topk=2048, seed=position))


@pytest.mark.gpu
def test_a_million_tokens(gpu):
    assert_right(case([1_048_570], [4], 4, Hi=32, topk=2048))


@pytest.mark.gpu
def test_long_and_short_contexts_together(gpu):
    positions, counts = [300_001, 40, 9000], [4, 4, 3]
    assert_right(case(positions, counts, 4, Hi=32, topk=2048, seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2, 7, 200])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("position", [700, 5000, 70_000])
def test_ties(gpu, levels, sign, position):
    """All the same, or many: of the lowest, of the middle, of the highest."""
    inputs = without_fractions(case([position, 333], [3, 2], 3, topk=256), levels)
    inputs["weights"] *= sign
    assert_right(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("of", ["q", "pooled"])
def test_the_last_bits_count(gpu, of):
    """The later pools are better by what two bf16 parts of a number cannot hold."""
    inputs = without_fractions(case([1999], [1], 1, dtype=FLOAT32), 1)
    plain, better = 1 + 2**-9, 1 + 2**-9 + 2**-21
    pages = inputs["rows"][3][0].tolist()
    for p in range(500):
        own = inputs["pooled"][pages[p // IN_PAGE] * IN_PAGE + p % IN_PAGE]
        if of == "q":
            own[int(p >= 450)] = 1  # the channel
        else:
            own[0] = better if p >= 450 else plain
    if of == "q":
        inputs["q"].zero_()[0, :2] = torch.tensor([plain, better])
        inputs["pooled"] = inputs["pooled"].to(BFLOAT16)
    tokens = range(1800, 1864)
    assert run(inputs)[0][0, :64].tolist() == places(inputs, 0, tokens)
    assert_right(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [37, 1000])
def test_many_rows_of_one_sequence(gpu, T, monkeypatch):
    """A prompt: from before anything has to be chosen to long after."""
    inputs = case([200], [T - 5], T, Hi=32, topk=256)
    assert_right(inputs)
    monkeypatch.setattr(kernels, "MAX_SCORES", 10_000)
    assert_right(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("M", [1, 3])
def test_nothing_outside_of_a_buffer_is_written_or_counts(gpu, M, dtype, monkeypatch):
    inputs = case([5003, 100, 70, 1300], [M, 0, M, 1], M, Hi=32, topk=128, dtype=dtype)
    expected, results = run(inputs), []
    for fill in FILLS:
        guarded = Guarded(gpu, fill)
        here = {name: guarded.copy(value) for name, value in inputs.items()}
        with monkeypatch.context() as patch:
            guarded.install(patch)
            results.append(kernels.index_choose(**here))
        torch.cuda.synchronize()
        guarded.check()
    for chosen, num in results:
        assert torch.equal(chosen.cpu(), expected[0])
        assert torch.equal(num.cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "weights", "pooled"])
def test_what_is_no_number_names_places_of_the_sequence(gpu, name, value):
    inputs = case([5003, 5003], [2, 2], 2)
    inputs[name][: len(inputs[name]) // 2] = value
    chosen, num = run(inputs)
    assert num.tolist() == [64, 65, 64, 65]
    for t, n in enumerate(num.tolist()):
        allowed = places(inputs, t // 2, range(5004 + t % 2))
        found = chosen[t, :n].tolist()
        assert set(found) <= set(allowed)
        assert len(set(found)) == n
        assert bool((chosen[t, n:] == -1).all())


@pytest.mark.gpu
def test_a_captured_graph_gives_what_a_call_gives(gpu):
    """Positions and tables of later steps are other ones, their shapes the same."""
    starts = ([5003, 80], [[2, 2], [2, 0]]), ([90, 4090], [[1, 2], [2, 2]])
    steps = [
        on_gpu(case([*positions, 6000], [*counts, 0], 2, topk=128, seed=seed))
        for seed, (positions, several) in enumerate(starts)
        for counts in several
    ]
    held = {n: moved(v, gpu) for n, v in case([6000] * 3, [2] * 3, 2, topk=128).items()}
    kernels.index_choose(**held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.index_choose(**held)
    for step in steps:
        for name in ("q", "weights", "pooled"):
            held[name].copy_(step[name])
        for mine, other in zip(held["rows"], step["rows"], strict=True):
            mine.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        alone = kernels.index_choose(**step)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.gpu
def test_no_rows_on_a_gpu(gpu):
    chosen, num = run(NO_ROWS)
    assert (chosen.shape, num.shape) == ((0, 67), (0,))
