"""The whole of `compress`, killed at its file operations, ends in the same bytes."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from emberbox.compress.journal import JOURNAL_NAME
from emberbox.compress.pipeline import compress, prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.errors import CheckpointError
from emberbox.store.checkpoint import INDEX_NAME, open_checkpoint
from tests.compress.test_pipeline import OPTIONS, contents
from tests.helpers.crash import Operations, in_child
from tests.helpers.nano import NANO
from tests.helpers.quick_search import quick_search

LAYER = "model.language_model.layers."
# Searched at both ends, so that the text is saved after every layer on the way.
ENDS = f"""
[[rule]]
match = ["{LAYER}0.self_attn.o_proj", "{LAYER}7.self_attn.o_proj"]
format = "exl3"
bits = 2
"""
SMALL = replace(OPTIONS, rows=1, cols=16, resume=True)


def append(path, data):
    """By what is not counted."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(descriptor, data)
    os.close(descriptor)


def run(prepared, folder, searches, die_at=None, kinds=None):
    """Exit status of a fork that compresses; `searches` grows by a byte for each search."""

    def search(*args):
        append(searches, b".")
        return quick_search(*args)

    def work():
        operations = Operations(die_at)
        compress(prepared, folder, search)
        if kinds is not None:
            append(kinds, json.dumps(operations.kinds).encode())

    return in_child(work)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some hundred runs and as many resumed
def test_killed_at_every_file_operation_the_pipeline_goes_on_bit_for_bit(tmp_path):
    check(tmp_path, 1)


def test_killed_at_file_operations_spread_over_the_run_it_goes_on_bit_for_bit(tmp_path):
    check(tmp_path, 16)


def check(tmp_path, parts):
    """Die at every operation, or at one of every stretch of them when `parts` is above 1."""
    prepared = prepare(NANO, parse_recipe(ENDS, "ends"), SMALL)
    kinds, searches, whole = (tmp_path / name for name in ("kinds", "searches", "first/dst"))
    whole.parent.mkdir()  # of the same name as the others: the card says it
    assert run(prepared, whole, searches, kinds=kinds) == 0
    expected, count = contents(whole), len(json.loads(kinds.read_text()))
    of_a_layer = searches.stat().st_size // 2  # two layers are searched, with matrices alike
    assert count > 150
    for die_at in range(0, count, 1 if parts == 1 else count // parts):
        folder, again = tmp_path / "dst", tmp_path / f"searches-{die_at}"
        assert run(prepared, folder, again, die_at) == -9
        if (folder / JOURNAL_NAME).exists() or not (folder / INDEX_NAME).exists():
            if not (folder / INDEX_NAME).exists():
                with pytest.raises(CheckpointError):
                    open_checkpoint(folder)  # what is not complete is never loaded
            assert run(prepared, folder, again) == 0
        assert contents(folder) == expected
        # One layer at the most is made twice.
        assert again.stat().st_size <= 3 * of_a_layer
        shutil.rmtree(folder)
