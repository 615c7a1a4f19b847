"""models/ember-nano-base2 keeps the rules of exllamav3's readers."""

import re
from collections import defaultdict

import pytest

from emberbox.compress.conversion_items import joined
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.checksums import verify_checksums
from emberbox.store.verification import verify_folder
from tests.helpers.nano import NANO

FOLDER = NANO.with_name("ember-nano-base2")
TENSORS = open_checkpoint(FOLDER).tensors


def test_one_rate_per_projection_kind_and_layer_gate_as_up():
    rates = defaultdict(set)
    for name, info in TENSORS.items():
        if name.endswith(".trellis"):
            kind = joined(re.sub(r"\.experts\.\d+\.", ".experts.", name.removesuffix(".trellis")))
            rates[kind].add(info.shape[-1])
    assert len(rates) > 60
    assert {kind: found for kind, found in rates.items() if len(found) > 1} == {}
    experts = {words for kind, found in rates.items() if ".experts." in kind for words in found}
    assert experts == {32}  # 16-bit words of a tile: two bits a weight


def test_sides_are_multiples_of_128_and_every_weight_has_its_parts():
    modules = [n.removesuffix(".trellis") for n in TENSORS if n.endswith(".trellis")]
    assert len(modules) == 465
    for module in modules:
        rows, columns, _ = TENSORS[f"{module}.trellis"].shape
        assert rows % 8 == columns % 8 == 0
        assert TENSORS[f"{module}.suh"].shape == (16 * rows,)
        assert TENSORS[f"{module}.svh"].shape == (16 * columns,)
        assert TENSORS[f"{module}.mul1"].shape == ()


def test_the_files_are_those_of_the_checksums():
    assert verify_checksums(FOLDER) > 12


@pytest.mark.parametrize("folder", [NANO, FOLDER], ids=lambda folder: folder.name)
def test_every_tensor_is_that_of_its_digest(folder):
    verdict = verify_folder(folder)
    assert verdict.faults == ()
    assert verdict.num_tensors == len(open_checkpoint(folder).tensors) > 600
