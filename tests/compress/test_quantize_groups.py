"""Groups of matrices in lock-step: the same as alone, in memory that was announced."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from emberbox.compress import quantize_exl3
from emberbox.compress.quantize_exl3 import group_bytes, quantize
from emberbox.compress.trellis_plan import TrellisPlan
from emberbox.compress.trellis_steps import Found
from emberbox.errors import OpError
from emberbox.formats.trellis import unpack
from tests.helpers.quantising import PLAN, assert_same, correlated, quantize_one, unknown, weight
from tests.helpers.quick_search import quick_search

GROUP = [(200, 130, seed) for seed in (3, 4, 5)]


@pytest.mark.parametrize("bits", [2, 2.5])
def test_a_matrix_comes_out_the_same_alone_and_in_a_group(bits):
    weights = [weight(*case) for case in GROUP]
    weights[1][7] = 3.0  # its scales are looked for elsewhere than those of its neighbours
    plans = [TrellisPlan(bits=bits, seed=seed) for seed in range(3)]
    own = [correlated(130, seed=6), unknown(130), correlated(130, seed=8)]
    group = quantize(weights, own, plans, quick_search, device="cpu")
    for made, *alone in zip(group, weights, own, plans, strict=True):
        assert_same(made, quantize_one(*alone))
    assert [made.report.has_feedback for made in group] == [True, False, True]


def test_a_group_may_share_a_hessian():
    weights, plans = [weight(*case) for case in GROUP], [PLAN] * 3
    shared = quantize(weights, [correlated(130)], plans, quick_search, device="cpu")
    own = quantize(weights, [correlated(130)] * 3, plans, quick_search, device="cpu")
    for one, other in zip(shared, own, strict=True):
        assert_same(one, other)


def test_the_parts_of_a_group_do_not_keep_each_other_in_memory():
    weights = [weight(*case) for case in GROUP]
    for made in quantize(weights, [unknown(130)], [PLAN] * 3, quick_search, device="cpu"):
        for tensor in made.tensor.parts.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_float32_as_on_a_gpu_loses_nothing(monkeypatch):
    in_float64 = quantize_one(weight(), correlated(), TrellisPlan(bits=4))
    monkeypatch.setattr(quantize_exl3, "working_dtype", lambda device: torch.float32)
    single = quantize_one(weight(), correlated(), TrellisPlan(bits=4))
    assert single.report.proxy_error == pytest.approx(in_float64.report.proxy_error, rel=0.03)


def random_paths(tiles, num_words, codebook):
    """A search that takes no memory of its own."""
    words = torch.randint(-(1 << 15), 1 << 15, (len(tiles), num_words), dtype=torch.int16)
    return Found(unpack(words), torch.zeros(len(tiles), dtype=torch.float16))


def peak_bytes(run):
    """Most that torch held at a time of what it allocated during `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize(
    ("num", "in_features", "out_features"),
    [(1, 256, 512), (1, 512, 128), (6, 128, 200), (4, 256, 256)],
    ids=str,
)
def test_a_group_takes_no_more_memory_than_it_says(num, in_features, out_features):
    weights = [weight(out_features, in_features, seed) for seed in range(num)]
    plans = [TrellisPlan(bits=8, seed=seed) for seed in range(num)]
    hessians = [correlated(in_features)]
    peak = peak_bytes(lambda: quantize(weights, hessians, plans, random_paths, device="cpu"))
    bound = group_bytes(num, in_features, out_features)
    assert 0.4 * bound < peak <= bound


def test_bytes_of_a_group_grow_with_it_and_are_half_on_a_gpu():
    one, two, three = (group_bytes(num, 4096, 2048) for num in (1, 2, 3))
    assert two - one == three - two > 8 * (4096 * 2048 + 4096 * 4096)
    assert 0.5 < group_bytes(32, 4096, 2048, "cuda") / group_bytes(32, 4096, 2048) < 0.6


def test_groups_that_do_not_go_together_are_refused():
    def group(weights, hessians, plans):
        return quantize(weights, hessians, plans, quick_search, device="cpu")

    with pytest.raises(OpError, match=r"got torch.float32 \[256, 128\] in a group of \[128, 128\]"):
        group([weight(), weight(256)], [unknown()], [PLAN] * 2)
    with pytest.raises(OpError, match="2 weights with 1 plans and 1 Hessians"):
        group([weight()] * 2, [unknown()], [PLAN])
    with pytest.raises(OpError, match="3 weights with 3 plans and 2 Hessians"):
        group([weight()] * 3, [unknown()] * 2, [PLAN] * 3)
    with pytest.raises(OpError, match="0 weights"):
        group([], [unknown()], [])
    with pytest.raises(OpError, match="differ in bits or codebook"):
        group([weight()] * 2, [unknown()], [PLAN, TrellisPlan(bits=3)])
