"""What a measurement takes beside the model, at the released vocabulary: measured, not reckoned."""

import json
import subprocess
import sys

import pytest

from emberbox.compress.measure_sensitivity import DIVERGENCE_BYTES, TOKENS_AT_ONCE, tokens_at_once
from emberbox.measure.fidelity import LOGITS_BYTES, POSITION_BLOCK, position_block

# 2,048-token windows of GLM-5.3-Flash; hidden states are narrow, so that the head is small and what
# is measured is what its logits take.
VOCABULARY, HIDDEN, TOKENS = 154_880, 64, 2048
REAL_HIDDEN = 4096
GIB = 2**30
LIMIT = 3 * GIB


PROGRAM = """
import json, sys
import torch
from pathlib import Path
from emberbox.compress.measure_sensitivity import mean_divergence
from emberbox.measure.fidelity import window_positions
from emberbox.measure.lanes import Head
from emberbox.measure.panel import Window
from emberbox.model.layers import Linear
from emberbox.ops.table import OpTable

what, V, H, T = sys.argv[1], *map(int, sys.argv[2:])

def kib(line):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith(line))

torch.set_num_threads(1)
r = torch.Generator().manual_seed(0)
heads = tuple(torch.randn(V, H, generator=r) / 8 for _ in range(2))
hidden = tuple(torch.randn(T - 1, H, generator=r) for _ in range(2))
ids = torch.randint(V, (T,), generator=r).tolist()
before = kib("VmRSS")
with torch.inference_mode():
    if what == "fidelity":
        wrapped = tuple(Head(Linear(OpTable.reference(), head)) for head in heads)
        found = window_positions(Window("w", "d", "x", tuple(ids)), hidden, wrapped)
        kl, positions = found.kl.mean(), int(found.finite.sum())
    else:
        kl, positions = mean_divergence(hidden, heads), len(hidden[0])
print(json.dumps({
    "beside_bytes": (kib("VmHWM") - before) * 1024, "positions": positions, "kl": float(kl),
}))
"""


def measured(what):
    sizes = map(str, (VOCABULARY, HIDDEN, TOKENS))
    command = [sys.executable, "-c", PROGRAM, what, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(f"{what}: {found['beside_bytes'] / GIB:.2f} GiB beside heads and states")
    assert found["positions"] == TOKENS - 1
    assert 0.5 < found["kl"] < 2  # logits of two models that know nothing of each other
    return found["beside_bytes"]


# Half a minute each on one core.
def test_a_window_of_a_fidelity_measurement_takes_less_than_3_gib_beside_the_model():
    # The reference's head and the states of both models come on top, at their real width.
    on_top = 2 * VOCABULARY * REAL_HIDDEN + 2 * 4 * TOKENS * REAL_HIDDEN
    assert measured("fidelity") + on_top < LIMIT


def test_a_divergence_of_the_sensitivity_takes_no_more_than_it_is_allowed():
    assert measured("sensitivity") < 1.25 * DIVERGENCE_BYTES < LIMIT


@pytest.mark.parametrize("vocabulary", [1, 4096, VOCABULARY, 8 * VOCABULARY, 10**9])
def test_blocks_shrink_as_the_vocabulary_grows_and_never_vanish(vocabulary):
    positions, tokens = position_block(vocabulary), tokens_at_once(vocabulary)
    assert 1 <= positions <= POSITION_BLOCK
    assert 1 <= tokens <= TOKENS_AT_ONCE
    if vocabulary < 10**9:
        assert 8 * positions * vocabulary <= LOGITS_BYTES
        assert 24 * tokens * vocabulary <= DIVERGENCE_BYTES


def test_receipts_of_today_keep_their_blocks():
    assert (position_block(4096), position_block(VOCABULARY)) == (256, 256)
    assert tokens_at_once(4096) == TOKENS_AT_ONCE  # so that the losses of ember-nano stay the same
    assert tokens_at_once(VOCABULARY) == 288
