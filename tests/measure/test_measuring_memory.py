"""What a measurement takes beside the model, at the released vocabulary and width."""

import json
import subprocess
import sys

from emberbox.measure.fidelity import POSITION_BLOCK
from emberbox.measure.metrics import ROWS

# The widest case: 2,048-token windows of GLM-5.3-Flash.
VOCABULARY, HIDDEN, TOKENS = 154_880, 4096, 2048
LIMIT = 3 * 2**30
# As many as the metrics take at once; what the rest of a block of logits takes, and the states of
# the 2,048 tokens of a window, is added to what was measured.
POSITIONS = ROWS

PROGRAM = f"""
import json
import torch
from pathlib import Path
from emberbox.measure.fidelity import window_positions
from emberbox.measure.lanes import Head
from emberbox.measure.panel import Window
from emberbox.model.layers import Linear
from emberbox.ops.table import OpTable

def kib(line):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith(line))

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
head = torch.empty({VOCABULARY}, {HIDDEN}, dtype=torch.bfloat16)
head.view(-1).view(torch.int16).random_(0x3C00, 0x3D00, generator=generator)  # 2^-7 to 2^-5
ids = torch.randint({VOCABULARY}, ({POSITIONS} + 1,), generator=generator).tolist()
window = Window("w", "d", "x", tuple(ids))
hidden = [torch.randn({POSITIONS}, {HIDDEN}, generator=generator) for _ in range(2)]
hidden[1] = hidden[0] + 0.1 * hidden[1]
heads = (Head(Linear(OpTable.reference(), head)),) * 2
before = kib("VmRSS")
with torch.inference_mode():
    found = window_positions(window, tuple(hidden), heads)
print(json.dumps({{
    "beside_bytes": (kib("VmHWM") - before) * 1024,
    "head_bytes": head.nbytes,
    "positions": len(found),
    "kl": found.kl.mean(),
    "finite": bool(found.finite.all()),
}}))
"""


def test_a_measurement_takes_less_than_3_gib_beside_the_model():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["positions"], found["finite"]) == (POSITIONS, True)
    assert found["kl"] > 0
    assert found["head_bytes"] == 2 * VOCABULARY * HIDDEN
    states = 2 * 4 * TOKENS * HIDDEN  # of both models, float32
    logits = 2 * 4 * (POSITION_BLOCK - POSITIONS) * VOCABULARY
    # The reference's head comes on top: only the candidate's is part of the loaded model.
    total = found["beside_bytes"] + found["head_bytes"] + states + logits
    print(f"beside the model: {total:,} bytes, of them measured {found['beside_bytes']:,}")
    assert total < LIMIT
