"""The list of mistakes fits the source, and the committed table has a line for each."""

from pathlib import Path

from tools import mutants

ROOT = Path(__file__).parents[1]
TABLE = mutants.read_table(mutants.TABLE)


def test_every_fragment_is_in_the_source_exactly_once():
    stale = [
        mutant.mistake
        for mutant in TABLE
        if (ROOT / "src" / "emberbox" / mutant.file).read_text("utf-8").count(mutant.find) != 1
    ]
    assert not stale


def test_every_named_test_is_in_its_file():
    for node in {node for mutant in TABLE for node in mutant.tests}:
        file, _, name = node.partition("::")
        wanted = f"def {name.partition('[')[0]}(" if name else "def test_"
        assert wanted in (ROOT / file).read_text("utf-8"), node


def test_the_committed_table_has_a_line_per_mistake():
    lines = (ROOT / "docs" / "mutants.md").read_text("utf-8").splitlines()
    named = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert named[1:] == [mutant.mistake for mutant in TABLE]
