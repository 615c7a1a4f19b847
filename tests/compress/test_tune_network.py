"""The network of a tuning step is the plain network, and its gradients are right."""

import pytest
import torch

from emberbox.compress.tune import Side
from emberbox.compress.tune_memory import token_bytes
from emberbox.compress.tune_network import TuningNetwork, conv_of_rows, kda_of_rows, moe_experts
from emberbox.compress.tune_operands import NORM, SCALES, Tunable
from emberbox.measure.lanes import load_plain
from emberbox.ops import kda_chunk, short_conv
from emberbox.ops import moe_experts as moe
from tests.helpers.nano import NANO

BASE2 = NANO.with_name("ember-nano-base2")


@pytest.fixture(scope="module")
def side():
    return Side.open(BASE2)


@pytest.fixture(scope="module")
def tunable(side):
    return Tunable.load(side.checkpoint, side.trunk, torch.device("cpu"))


def logits(side, tunable, values, ids):
    network = TuningNetwork(side.config, tunable.operands(values), len(ids))
    return network.logits(network.hidden(ids))


def test_it_computes_what_the_plain_network_does(side, tunable):
    ids = torch.randint(0, 4000, (3, 67), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = logits(side, tunable, tunable.base, ids).view(3, 67, -1)
        expected = load_plain(BASE2, "cpu").full(ids)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_gradient_is_the_slope(side, tunable):
    """Along a direction of scales and norms, against central differences."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 4000, (2, 9), generator=generator)
    aim = torch.randn(18, 4096, generator=generator)
    direction = torch.randn(tunable.base.shape, generator=generator)

    def value(offsets):
        return (logits(side, tunable, tunable.values(offsets), ids) * aim).mean()

    offsets = torch.zeros_like(tunable.base, requires_grad=True)
    value(offsets).backward()
    slope = float(offsets.grad @ direction)
    with torch.no_grad():
        step = 2e-4
        difference = value(step * direction) - value(-step * direction)
    assert slope == pytest.approx(float(difference) / (2 * step), rel=0.02)
    sizes = [entry.num_values for entry in tunable.entries]
    moved = {
        entry.role
        for entry, part in zip(tunable.entries, offsets.grad.split(sizes), strict=True)
        if part.any()
    }
    assert moved == {*SCALES, NORM}


@pytest.mark.parametrize("T", [1, 19, 33])
def test_rows_do_not_see_each_other(T):
    B, H, D = 3, 2, 8
    parts = [kda_chunk.make_inputs(T, H, D, dtype=torch.float32, seed=b) for b in range(B)]
    state = torch.zeros(H, D, D)
    joined = [torch.cat([p[name] for p in parts]) for name in ("q", "k", "v", "gate", "beta")]
    found, _ = kda_of_rows(B, *joined, state)
    for part, own in zip(parts, found.chunk(B), strict=True):
        expected, _ = kda_chunk.kda_chunk(**(part | {"state": state}))
        assert torch.allclose(own, expected, atol=1e-5)
    rows = [torch.randn(T, 6, generator=torch.Generator().manual_seed(b)) for b in range(B)]
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))
    history = torch.zeros(3, 6)
    convolved = conv_of_rows(B, torch.cat(rows), weight, history)
    for row, own in zip(rows, convolved.chunk(B), strict=True):
        assert torch.allclose(own, short_conv.short_conv(row, weight, history), atol=1e-6)


def test_experts_without_tokens_take_no_part():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, generator=generator)
    shapes = ((4, 7), (4, 7), (7, 4))
    projections = tuple(
        tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
        for _ in range(6)
    )
    experts = torch.tensor([[1, 4], [4, 1], [1, 0], [4, 0], [1, 4]])  # never 2, 3 or 5
    weights = torch.rand(5, 2, generator=generator)
    found = moe_experts(x, experts, weights, projections, 2.0)
    assert torch.allclose(found, moe.moe_experts(x, experts, weights, projections, 2.0), atol=1e-5)
    found.sum().backward()
    assert [w[0].grad is not None for w in projections] == [True, True, False, False, True, False]


def test_memory_grows_with_the_chunk_and_the_vocabulary(side):
    """Of ember-nano 1.1 to 1.3 MB a token were used at a chunk of 16, 2.9 MB at 64 (CPU)."""
    text = side.config.text
    assert 1.3e6 < token_bytes(text, 16) < 2.6e6
    assert 2.9e6 < token_bytes(text, 64) < 5.8e6


# -- values ---------------------------------------------------------------------------------------


def test_offsets_of_zero_store_the_same_bits(side, tunable):
    stored = tunable.stored(torch.zeros_like(tunable.base))
    for name, value in stored.items():
        info = side.checkpoint.tensors[name]
        buffer = bytearray(info.num_bytes)
        side.checkpoint.read_into(info, buffer)
        assert value.view(torch.uint8).numpy().tobytes() == bytes(buffer), name
    assert len(stored) == len(tunable.entries) > 700


def test_values_are_rounded_as_stored_and_stay_finite(tunable):
    offsets = torch.full_like(tunable.base, 1e9)
    offsets[::2] *= -1
    rounded, stored = tunable.rounded(offsets), tunable.stored(offsets)
    assert rounded.isfinite().all()
    assert rounded.abs().max() > 65504  # norms in bfloat16
    flat = torch.cat([stored[e.info.name].float().flatten() for e in tunable.entries])
    assert torch.equal(flat, rounded)
    halves = [v for v in stored.values() if v.dtype is torch.float16]
    assert max(float(v.abs().max()) for v in halves) == 65504


def test_an_offset_is_a_share_of_a_scale_and_of_the_size_of_a_norm(tunable):
    offsets = torch.full_like(tunable.base, 0.5)
    moved = torch.split(tunable.values(offsets), [e.num_values for e in tunable.entries])
    base = torch.split(tunable.base, [e.num_values for e in tunable.entries])
    for entry, after, before in zip(tunable.entries, moved, base, strict=True):
        own = before if entry.role in SCALES else before.square().mean().sqrt()
        assert torch.allclose(after, before + 0.5 * own, rtol=1e-5, atol=1e-7)
