"""Nearly parallel keys with full write strength and hardly any decay, over more than a chunk.

The triangular system of a chunk then has ones all over its lower half. A series in half precision
overflows there and poisons the state (architecture.md 10 item 13).
"""

from dataclasses import replace

import pytest
import torch

from emberbox.ops.kda_chunk.kernel_torch import kda_chunk as chunked
from emberbox.ops.kda_chunk.reference import kda_chunk
from emberbox.ops.numerics import relative_error
from tests.oracle import checkpoints
from tests.oracle.harness import TABLES, Oracle, Sequences, load_network

LENGTH = 139
FIRST = r"layers\.0\."
PARALLEL = {
    r"embed_tokens": lambda w: w + 0.009,  # all tokens share a direction
    FIRST + r"input_layernorm": torch.ones_like,
    FIRST + r".*k_proj": lambda w: 0.2 * w[:, :1].sign() + 0.02 * w,
    FIRST + r".*b_proj": lambda w: w.abs(),
    FIRST + r".*dt_bias": lambda w: w - 40,
}


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    checkpoints.write_checkpoint(folder, "sharp", overrides=PARALLEL)
    return Oracle("sharp", folder)


@pytest.mark.parametrize("table", TABLES)
def test_logits_agree(parallel, table):
    seen = []
    ops = TABLES[table]()

    def watched(q, k, v, gate, beta, state):
        seen.append((k, gate, beta))
        return ops.kda_chunk(q, k, v, gate, beta, state)

    ids = parallel.token_ids(LENGTH)
    network = load_network(parallel.folder, replace(ops, kda_chunk=watched))
    parallel.check(network.full(ids[None])[0], ids)
    k, gate, beta = (x[8:72] for x in seen[0])  # the first layer, a chunk past the first tokens
    cosines = torch.einsum("thc,jhc->htj", k, k)
    assert float(cosines.min()) > 0.95
    assert float(beta.min()) > 0.9
    assert float(gate.sum(0).min()) > -1.0  # less than a factor e lost over the whole chunk


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [67, 72]], ids=["tokens", "pieces"])
def test_cached_passes_agree(parallel, sizes):
    ids = parallel.token_ids(LENGTH)
    network = load_network(parallel.folder, TABLES["cpu"]())
    parallel.check(Sequences(network).feed(ids, sizes), ids)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1])
def test_chunked_form_equals_the_recurrence_on_parallel_keys(noise):
    """192 tokens at the real head width; beta is 1 and nothing decays."""
    g = torch.Generator().manual_seed(5)
    T, H, D = 192, 2, 128
    direction = torch.randn(H, D, generator=g)
    k = torch.nn.functional.normalize(direction + noise * torch.randn(T, H, D, generator=g), dim=-1)
    q, v = (torch.randn(T, H, D, generator=g) for _ in range(2))
    inputs = q * D**-0.5, k, v, torch.full((T, H, D), -1e-4), torch.ones(T, H)
    state = torch.randn(H, D, D, generator=g)
    expected, final = kda_chunk(*(x.double() for x in inputs), state.double())
    out, last = chunked(*inputs, state)
    assert relative_error(out, expected) < 1e-5
    assert relative_error(last, final) < 1e-5
