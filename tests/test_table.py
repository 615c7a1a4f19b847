"""tools/table.py: the page of a folder of receipts, from receipts and nothing else."""

import math
import sys

import numpy as np
import pytest

from emberbox.errors import MeasureError
from emberbox.measure.compare import compare
from emberbox.measure.show import comparison_cells, figure_text
from emberbox.measure.summary import headlines
from tests.helpers.receipts import artifact_facts, edit, small_panel, write_receipt
from tools import table

PANEL = small_panel(windows=11)
PLAN = """
natural = ["prose"]

[[pair]]
base = "plain"
new = "ours"
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Receipts of this test are made by sources of a commit, whatever the working tree is."""
    made_by = {"version": "0.1.0", "commit": "a" * 40, "is_clean": True}
    monkeypatch.setattr("emberbox.measure.receipt.code_version", lambda: made_by)


@pytest.fixture
def folder(tmp_path):
    """Three receipts of one panel, the largest first by name, and one in the other lane."""
    found = tmp_path / "receipts"
    for name, noise, num_bytes in (
        ("alpha", 0.1, 16_000),
        ("plain", 0.5, 8000),
        ("ours", 0.4, 8004),
    ):
        facts = artifact_facts(name, num_bytes)
        facts["about"] = {"command": f"emberbox compress big {name}"} if name == "ours" else {}
        write_receipt(
            found / f"{name}.json",
            noise,
            len(name),
            PANEL,
            candidate=facts,
            command=f"emberbox measure fidelity big {name} -o receipts/nano/{name}.json",
        )
    write_receipt(found / "engine.json", 0.5, 3, PANEL, lane="served")
    (found / "table.toml").write_text(PLAN)
    return found


def rows(page):
    """Cells of the lines of all tables that begin with a link to a receipt."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| [")
    ]


def run(monkeypatch, folder, *flags):
    monkeypatch.setattr(sys, "argv", ["table.py", "--folder", str(folder), *flags])
    return table.main()


def test_rows_are_by_size_and_lanes_apart(folder):
    page = table.draw(folder)
    names = [row[0] for row in rows(page)]
    assert names == [
        "[plain](plain.json)",
        "[ours](ours.json)",
        "[alpha](alpha.json)",
        "[engine](engine.json)",
    ]
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == ["## Panel small, lane weights", "## Panel small, lane served", "## Pairs"]
    assert page.index("alpha.json") < page.index("lane served") < page.index("engine.json")
    weights, served = page.partition("lane served")[::2]
    assert "the error of the stored weights alone" in weights
    assert "The engine's own prefill" in served
    assert "engine.json" not in weights


def test_a_row_says_what_the_receipt_says(folder):
    receipt = table.read_receipts(folder)["ours"]
    row = rows(table.draw(folder))[1]
    results, record = receipt["results"], receipt.read_record()
    prose = [record[name] for name, domain in receipt.windows if domain == "prose"]
    assert len(prose) == 6
    assert row == [
        "[ours](ours.json)",
        "8,004",
        "2.561",
        figure_text(results["kl"]),
        figure_text(results["reverse_kl"]),
        figure_text(results["top1"], is_share=True),
        figure_text(results["top5"], is_share=True),
        figure_text(results["candidate_perplexity"]),
        figure_text(headlines(prose)["kl"]),
    ]
    (domain,) = (each for each in results["domains"] if each["domain"] == "prose")
    assert row[-1] == figure_text(domain["kl"])


def test_each_row_has_the_commands_that_make_it(folder):
    page = table.draw(folder)
    measure = "emberbox measure fidelity big {0} -o .build/nano/{0}.json\n```"
    assert f"ours:\n\n```sh\nemberbox compress big ours\n{measure.format('ours')}" in page
    assert f"plain:\n\n```sh\n{measure.format('plain')}" in page
    assert "mkdir -p .build/nano" in page
    assert "leave these two words out" in page


def test_commands_are_those_of_the_repository_s_root(folder, monkeypatch):
    """Every path of the page is one from there, and none is that of a committed file."""
    monkeypatch.setattr(table, "ROOT", folder.parent)
    page = table.draw(folder)
    assert "emberbox receipt compare receipts/plain.json receipts/ours.json" in page
    assert "emberbox receipt verify receipts/*.json" in page
    assert "-o receipts" not in page


def test_a_tuned_candidate_is_compressed_then_tuned_then_measured(folder):
    def change(document):
        document["candidate"]["about"] = {
            "command": "emberbox compress SRC DST --recipe base2",
            "tuning": {
                "command": "emberbox tune SRC CANDIDATE DST --seed 0",
                "candidate": {"name": "base2-0"},
            },
        }

    edit(folder / "ours.json", change)
    assert """ours:

```sh
emberbox compress big base2-0 --recipe base2
emberbox tune big base2-0 ours --seed 0
emberbox measure fidelity big ours -o .build/nano/ours.json
```""" in table.draw(folder)


SEEDS = """
natural = ["prose"]
planned = ["ours-[0-9]"]
[[pair]]
base = "base"
new = "ours"
seeds = [0, 1, 2]
"""


def seeds_of(folder, *names):
    """Receipts NAME-SEED beside a plan of three seeds."""
    for path in folder.glob("*"):
        path.unlink()
    for number, name in enumerate(names):
        noise = 0.5 if name.startswith("base") else 0.4 + 0.02 * number
        facts = artifact_facts(name, 8000 + 4 * number)
        write_receipt(folder / f"{name}.json", noise, number, PANEL, candidate=facts)
    (folder / "table.toml").write_text(SEEDS)
    return table.read_receipts(folder)


def lines_of(page, text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ") and text in line
    ]


BASES, OURS = [[f"{name}-{seed}" for seed in range(3)] for name in ("base", "ours")]


def test_seeds_have_a_line_each_and_one_of_their_mean(folder):
    receipts = seeds_of(folder, *BASES, *OURS)
    lines = lines_of(table.draw(folder), " against ")
    assert [line[0] for line in lines[::2]] == [
        *(f"ours-{seed} against base-{seed}" for seed in range(3)),
        "**ours against base, mean over seeds 0, 1, 2**",
    ]
    assert [line[3] for line in lines] == ["all", "natural text"] * 4
    every = compare(receipts["base-1"], receipts["ours-1"], {"natural text": ("prose",)})
    assert lines[2][4:] == comparison_cells(every.all)
    assert lines[3][4:] == comparison_cells(every.groups["natural text"])
    size = 100 * (24_000 + 4 * 12) / (24_000 + 4 * 3) - 100
    assert lines[-2][2] == f"{size:+.3f} %"
    # Windows by hand: the difference of each is the mean over its seeds.
    means = [
        np.array([math.fsum(each.kl) / len(each) for each in receipts[name].read_record().values()])
        for name in (*BASES, *OURS)
    ]
    away = np.mean(means[3:], 0) - np.mean(means[:3], 0)
    assert lines[-2][8:] == [
        f"{100 * float(lines[-2][7].split()[0]) / float(lines[-2][5]):+.1f} %",
        f"{(away < 0).sum()}/{(away > 0).sum()}/0",
        lines[-2][-1],
    ]
    together = [receipts[name]["results"]["kl"]["value"] for name in (*BASES, *OURS)]
    assert float(lines[-2][5]) == pytest.approx(sum(together[:3]) / 3, rel=1e-3)
    assert float(lines[-2][6]) == pytest.approx(sum(together[3:]) / 3, rel=1e-3)


@pytest.mark.parametrize("missing", [{0}, {0, 2}, {0, 1, 2}], ids=str)
def test_what_is_planned_may_be_missing_and_its_lines_with_it(folder, missing):
    there = [name for seed, name in enumerate(OURS) if seed not in missing]
    seeds_of(folder, *BASES, *there)
    page = table.draw(folder)
    assert [line[0] for line in lines_of(page, " against ")[::2]] == [
        *(f"{name} against {name.replace('ours', 'base')}" for name in there),
        *["**ours against base, mean over seeds 1, 2**"] * (len(there) > 1),
    ]
    assert ("## Pairs" in page) == bool(there)
    assert len(rows(page)) == 3 + len(there)


def test_what_is_not_planned_may_not_be_missing(folder):
    seeds_of(folder, *BASES[:2], *OURS)
    with pytest.raises(MeasureError, match="there is no receipt 'base-2'"):
        table.draw(folder)


def test_pairs_are_compared_over_all_and_over_natural_text(folder):
    receipts = table.read_receipts(folder)
    found = compare(receipts["plain"], receipts["ours"], {"natural text": ("prose",)})
    lines = [line for line in table.draw(folder).splitlines() if "ours against plain" in line]
    for line, group, paired in zip(
        lines, ("all", "natural text"), (found.all, found.groups["natural text"]), strict=True
    ):
        cells = ["ours against plain", "small, weights", "+0.050 %", group]
        assert line == "| " + " | ".join([*cells, *comparison_cells(paired)]) + " |"
    compared = f"emberbox receipt compare {folder / 'plain.json'} {folder / 'ours.json'}"
    assert compared in table.draw(folder)


def test_without_a_plan_there_are_neither_pairs_nor_natural_text(folder):
    (folder / "table.toml").unlink()
    page = table.draw(folder)
    assert "## Pairs" not in page
    assert "natural text" not in page
    assert len(rows(page)[0]) == 8


def test_check_fails_until_the_page_is_written(folder, monkeypatch, capsys):
    assert run(monkeypatch, folder, "--check") == 1
    assert "out of date" in capsys.readouterr().err
    assert not (folder / "README.md").exists()
    assert run(monkeypatch, folder) == 0
    assert (folder / "README.md").read_text("utf-8") == table.draw(folder)
    assert run(monkeypatch, folder, "--check") == 0


@pytest.mark.parametrize("what", ["page", "receipt", "plan"])
def test_check_notices_any_change(folder, monkeypatch, capsys, what):
    run(monkeypatch, folder)
    if what == "page":
        page = (folder / "README.md").read_text("utf-8")
        (folder / "README.md").write_text(page.replace("8,004", "8,000"), "utf-8")
    elif what == "receipt":
        write_receipt(folder / "plain.json", 0.51, 5, PANEL)
    else:
        (folder / "table.toml").write_text(PLAN.replace('["prose"]', '["code"]'))
    capsys.readouterr()
    assert run(monkeypatch, folder, "--check") == 1
    said = capsys.readouterr()
    assert "--- as it is" in said.out
    assert "make table" in said.err


def test_a_crooked_receipt_is_not_drawn(folder, monkeypatch, capsys):
    edit(folder / "ours.json", lambda d: d["results"]["kl"].update(value=0.001))
    assert run(monkeypatch, folder) == 1
    assert "ours.json: results.kl.value is 0.001" in capsys.readouterr().err
    assert not (folder / "README.md").exists()


def test_no_receipts_are_a_failure(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path, "--check") == 1
    assert "holds no receipt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("natural = [", "not TOML"),
        ('pairs = []\nnatural = ["prose"]', r"got \['pairs'\]"),
        ("natural = [3]", "expected natural"),
        ("notes = [3]", "expected natural"),
        ('natural = ["prose", "verse"]', "natural: no window is of verse"),
        ('[[pair]]\nbase = "plain"', "each .*pair.* has a base and a new"),
        ('[[pair]]\nbase = "plain"\nnew = "ours"\nold = "x"', "and nothing but seeds"),
        ('[[pair]]\nbase = "plain"\nnew = "ours"\nseeds = ["x"]', "expected natural"),
        ('[[pair]]\nbase = "plain"\nnew = "theirs"', "there is no receipt 'theirs'"),
        ('[[pair]]\nbase = "plain"\nnew = "engine"', "lane: weights in plain, served in engine"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(folder, plan, said):
    (folder / "table.toml").write_text(plan)
    with pytest.raises(MeasureError, match=said):
        table.draw(folder)


def test_sources_that_no_commit_holds_are_marked(folder):
    assert "†" not in table.draw(folder)
    edit(folder / "ours.json", lambda document: document["emberbox"].update(is_clean=False))
    page = table.draw(folder)
    assert [row[0] for row in rows(page)][:3] == [
        "[plain](plain.json)",
        "[ours](ours.json) †",
        "[alpha](alpha.json)",
    ]
    assert page.count("†: measured by sources that differ from the commit") == 1


def test_notes_stand_under_the_introduction_and_what_comes_after_behind_a_row(folder):
    plan = 'notes = ["""\nOne text.\n"""]\n[after]\nours = ["git checkout -"]\n'
    (folder / "table.toml").write_text(plan)
    page = table.draw(folder)
    assert "\n\nOne text.\n\n## Panel small" in page
    assert "-o .build/nano/ours.json\ngit checkout -\n```" in page
    assert page.count("git checkout -") == 1


def test_commands_have_the_paths_of_the_receipt_and_what_must_come_before(folder):
    command = "emberbox compress SRC DST --recipe x --sensitivity sensitivity.json"

    def change(document):
        document["candidate"]["about"] = {"command": command}

    edit(folder / "ours.json", change)
    (folder / "table.toml").write_text('[before]\nours = ["make SRC", "emberbox x DST"]\n')
    assert """ours:

```sh
make big
emberbox x ours
emberbox compress big ours --recipe x --sensitivity receipts/nano/recipes/sensitivity.json
emberbox measure fidelity big ours -o .build/nano/ours.json
```""" in table.draw(folder)
