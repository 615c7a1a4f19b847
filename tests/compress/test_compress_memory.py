"""A whole conversion on a CPU takes no more memory than its plan says, measured by the system."""

import json
import subprocess
import sys

from tests.helpers.nano import NANO

# Beside what the plan counts: weights of a sublayer, of this model at most 5 MB in float32, what
# 256 tokens need on their way through one, pages the allocator keeps, and parts of torch that come
# into memory when they are first used. Measured: 30 to 48 MB, from one run to another.
BESIDE_BYTES = 60_000_000
ROWS, COLS = 48, 256
# Text passes 256 tokens at a time: what counts then is what the plan counts.
RUN = f"""
import json, sys, torch
from pathlib import Path
from emberbox.compress import walk
from emberbox.compress.pipeline import CompressOptions, compress, prepare
from emberbox.compress.recipe import parse_recipe
from tests.helpers.quick_search import quick_search

def peak():
    # Of this program alone: ru_maxrss begins with what its parent had.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

RECIPE = '''[[rule]]
match = ["**.layers.3.mlp.experts.*.*", "**.layers.[03].self_attn.o_proj", "lm_head"]
format = "exl3"
bits = 2
'''
torch.set_num_threads(1)
walk.TOKENS_AT_ONCE = 256
options = CompressOptions(rows={ROWS}, cols={COLS}, group_bytes=1)
prepared = prepare(Path(sys.argv[1]), parse_recipe(RECIPE, "some"), options)
before = peak()
compress(prepared, Path(sys.argv[2]), quick_search)
print(json.dumps([peak() - before, prepared.search_bytes, prepared.activation_bytes]))
"""


def test_the_peak_of_a_walk_is_below_what_its_plan_counts(tmp_path):
    command = [sys.executable, "-c", RUN, str(NANO), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    grown, search_bytes, activation_bytes = json.loads(done.stdout)
    # The text, lm_head's own search, and little else: none of the three drowns in another.
    assert activation_bytes == ROWS * COLS * (128 * (4 * 4 + 4 + 4) + 12 * 4)
    assert 40e6 < search_bytes < 60e6
    assert 0.6 * (search_bytes + activation_bytes) < grown
    assert grown < search_bytes + activation_bytes + BESIDE_BYTES
