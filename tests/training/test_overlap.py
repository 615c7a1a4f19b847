"""Held-out text stands in no training text, and the check would see it if it did."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from training.corpus import SKETCH
from training.data.tables import held_out_text
from training.data.text import KINDS, TOKENIZER
from training.overlap import RUN, Index, Sketch, check, clean_pieces, contains, run_hashes
from training.packages import read_packages

TOKENS = Tokenizer.from_file(str(TOKENIZER))
SEEN = "The quick brown fox jumps over the lazy dog near the river.\nAnd then it sleeps.\n"
FRESH = "Nothing of this sentence was written in that other document, I say.\n"
LEAK = "the quick brown fox jumps over the lazy dog near the river"


@pytest.fixture(scope="module")
def index():
    return Index.of(TOKENS, [[SEEN], ["Another document, of one line that is long enough.\n"]])


def test_a_shared_line_is_found(index):
    found = check(index, TOKENS, [FRESH, "Another document, of one line that is long enough.\n"])
    assert (found.lines, found.lines_found) == (2, 1)


def test_a_shared_run_inside_another_line_is_found(index):
    found = check(index, TOKENS, [f"Somebody wrote: {LEAK}, I think.\n"])
    assert found.lines_found == 0
    assert found.runs_found > 0
    assert check(index, TOKENS, [FRESH]).runs_found == 0


def test_cleaning_keeps_whole_lines_around_what_it_removes(index):
    text = f"{FRESH}Before.\nSomebody wrote: {LEAK}, he said.\nAfter it there is more to say.\n"
    pieces = list(clean_pieces(index, TOKENS, text, 1))
    assert pieces == [f"{FRESH}Before.\n", "After it there is more to say.\n"]
    assert list(clean_pieces(index, TOKENS, text, 12)) == [f"{FRESH}Before.\n"]


def test_runs_are_hashed_by_content_and_order():
    ids = np.arange(40)
    hashes = run_hashes(np.concatenate([ids, ids]))
    assert len(hashes) == 80 - RUN + 1
    assert (hashes[:20] == hashes[40:60]).all()
    assert len(np.unique(run_hashes(ids))) == 40 - RUN + 1
    assert run_hashes(ids[::-1])[0] not in run_hashes(ids)
    assert len(run_hashes(ids[: RUN - 1])) == 0


def test_membership_at_the_edges():
    known = np.array([3, 5, 9], np.uint64)
    asked = np.array([0, 3, 4, 9, 10], np.uint64)
    assert contains(known, asked).tolist() == [False, True, False, True, False]
    assert not contains(known[:0], asked).any()


def test_a_sketch_survives_its_file_and_sees_its_share(index, tmp_path):
    many = [f"Line number {i} of a text that is long enough to be counted.\n" for i in range(3000)]
    big = Index.of(TOKENS, [many])
    Sketch.of(big).write(tmp_path / "sketch.json", {"about": "test"})
    sketch = Sketch.read(tmp_path / "sketch.json")
    assert 10 < len(sketch.lines) < 120
    found = sketch.check(TOKENS, many)
    assert found.lines == found.lines_found > 10
    assert found.runs == found.runs_found > 2
    assert sketch.check(TOKENS, [FRESH]).lines_found == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_excerpts_do_not_overlap_the_training_text(kind):
    sketch = Sketch.read(SKETCH)
    assert len(sketch.lines) > 5000
    assert len(sketch.runs) > 5000
    found = sketch.check(TOKENS, held_out_text(kind))
    assert found.lines > 15
    assert found.runs > 8
    assert (found.lines_found, found.runs_found) == (0, 0)


def test_sources_are_pinned_and_split():
    packages = read_packages()
    assert len({package.name for package in packages}) == len(packages) > 30
    assert all(
        len(package.sha256) == 64 and package.version in package.file for package in packages
    )
    held_out = {package.name for package in packages if package.held_out}
    assert len(held_out) >= 5
