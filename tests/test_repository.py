"""What the repository says of itself: versions, pins, pages, sizes; and what it may not hold."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import emberbox
from tools import generate, run_docs, setup_note, size

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_TREE_BYTES = 48 * 1024 * 1024

# Written apart, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w./-])/(?:work|root|farm|home/\w+|opt/(?:ev|pypi|wheels))\b",
    "an index option with an address": r"--(?:extra-)?index-" r"url[= ]+[\"']?https?:",
    "a package registry": r"pypi\.org/simple|files\.pythonhosted|download\.pytorch\.org",
    "a folder outside the repository": r"(?:\.\./|[\s`(])shared/(?:facts|design|nano|golden)",
}


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; without git, those that are not built."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        names = listing.stdout.decode().split("\0")
        return [path for name in names if name and (path := ROOT / name).is_file()]
    hidden = {".git", ".venv", ".build", "__pycache__"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not hidden & set(path.relative_to(ROOT).parts)
    ]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def dependencies() -> set[str]:
    project = pyproject()
    named = {distribution(text) for text in project["dependencies"]}
    for extra in project["optional-dependencies"].values():
        named |= {distribution(text) for text in extra}
    return named - {"emberbox"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.lower().split("==", 1) for line in lines if line and not line.startswith("#"))


def test_version_is_the_same_everywhere() -> None:
    entry = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert entry is not None
    assert (emberbox.__version__, pyproject()["version"]) == (entry[1], entry[1])


def test_readme_names_the_current_version() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.]*\d)", text)) == {emberbox.__version__}


def test_dependencies_are_pinned_exactly() -> None:
    assert dependencies() - set(pins()) == set()
    assert [pin for pin in pins().values() if not re.fullmatch(r"[\w.]+", pin)] == []


def test_dependencies_each_have_a_line_of_reason() -> None:
    text = (ROOT / "docs" / "adr" / "004-dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| ([\w-]+) \| (?!for)", text, re.MULTILINE)) - {"package"}
    assert explained == dependencies()


def test_installed_dependencies_match_the_pins_that_tests_rely_on() -> None:
    from importlib.metadata import version

    for name in ("transformers", "safetensors", "tokenizers"):
        assert version(name) == pins()[name]


PAGES = run_docs.pages(ROOT)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_page_shows_a_command_that_is_executed(name: str) -> None:
    assert PAGES[name] != []


def test_every_console_block_holds_a_command() -> None:
    empty = [
        f"{path.relative_to(ROOT)}: {body!r}"
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for body in re.findall(r"^```console\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
        if not run_docs.console_commands(body)
    ]
    assert empty == []


def test_readme_commands_are_targets_with_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    named = set(
        re.findall(r"\bmake ([a-z]+)\b(?= *(?:[`#]|ARGS|PYTHON|$))", "\n".join(texts), re.M)
    )
    described = set(re.findall(r"^([a-z]+):[^#\n]*## .+$", makefile, re.MULTILINE))
    assert {"demo", "test", "check"} <= named
    assert named - described == set()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == described


def test_check_holds_everything_a_change_must_pass() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    check = re.search(r"^check: ([a-z ]+)", makefile, re.MULTILINE)
    assert check is not None
    steps = check[1].split()
    assert set(steps) == {"lint", "types", "floors", "size", "fresh", "docs", "test"}
    assert steps[-1] == "test"  # the run ends with the count of tests


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_holds(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in tracked_files()
        if path != Path(__file__) and (text := text_of(path)) is not None
        for match in re.finditer(FORBIDDEN[what], text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "example"),
    [
        ("a path of one machine", "see /" + "work/main/x"),
        ("a path of one machine", "/" + "root/.cache"),
        ("an index option with an address", "pip install --index-" + "url https://x.y torch"),
        ("a package registry", "https://download." + "pytorch.org/whl/cpu"),
        ("a folder outside the repository", "see ../" + "shared/facts/x.md"),
    ],
)
def test_the_search_finds_what_is_forbidden(what: str, example: str) -> None:
    assert re.search(FORBIDDEN[what], example)


def test_files_and_tree_stay_small() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in tracked_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES} == {}
    assert sum(sizes.values()) < MAX_TREE_BYTES


def test_contributing_stays_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()) <= 200


# -- the tools that the checks rest on ------------------------------------------------------------


def test_size_names_a_long_file_a_long_function_and_a_part_without_budget(tmp_path: Path) -> None:
    body = "    x = 1\n"
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text(f'def f():\n    """Free."""\n{body * 5}')
    (tmp_path / "ops" / "b.cu").write_text("//\n" * 9)
    (tmp_path / "new.py").write_text("")
    budgets = {"limits": {"file": 8, "function": 5}, "python": {"ops": 7}, "cuda": {"ops": 8}}
    report = size.measure(tmp_path, budgets)
    assert report.offenders == [
        "ops/a.py:1: f() has 6 lines, at most 5",
        "ops/b.cu: 9 lines, at most 8",
        "new: has no budget for python in budgets.toml",
        "ops: 9 lines of cuda, at most 8",
    ]
    assert report.parts["ops (python)"] == (7, 7)


def test_console_commands_keep_continuations_and_drop_output() -> None:
    body = "$ curl \\\n    --fail x\nan answer\n$ echo 'two\nlines'\n"
    assert run_docs.console_commands(body) == "curl \\\n    --fail x\necho 'two\nlines'"


def test_only_marked_blocks_of_the_readme_run() -> None:
    text = "```console\n$ make demo\n```\n\n<!-- run -->\n```console\n$ true\n```\n```sh\nls\n```\n"
    marked = list(run_docs.blocks(text, "README.md", only_marked=True))
    assert [(block.line, block.program) for block in marked] == [(5, "true")]
    assert len(list(run_docs.blocks(text, "page", only_marked=False))) == 2


@pytest.mark.parametrize(
    ("language", "program", "status"),
    [
        ("console", "true\nfalse\ntrue", 1),
        ("console", "false | true", 1),
        ("console", 'echo "$UNSET_VARIABLE"', 1),
        ("console", "sleep 600 &\ntrue", 0),
        ("python", "import emberbox", 0),
        ("python", "raise SystemExit(3)", 3),
    ],
)
def test_a_block_fails_with_its_first_failing_command(
    language: str, program: str, status: int
) -> None:
    block = run_docs.Block("page", 1, language, program)
    assert run_docs.execute(block, ROOT)[0] == status


def test_setup_says_the_size_and_the_variable_without_a_gpu() -> None:
    text = setup_note.note("2.13.0", "", driver=False)
    assert "0.2 GB" in text
    assert "3 GB" in text
    assert "TORCH_INDEX_URL" in text
    assert "TORCH_INDEX_URL" not in setup_note.note("2.13.0", "", driver=True)


def test_setup_refuses_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9, "final", 0))
    monkeypatch.setattr(sys, "argv", ["setup_note.py", "--torch", "2.13.0", "--venv", ".venv"])
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        setup_note.main()


def test_a_table_escapes_what_would_break_it() -> None:
    assert generate.table(("a", "b"), [("x|y", "1\n2")]).splitlines()[-1] == r"| x\|y | 1 2 |"


def test_the_oracle_is_installed_at_its_pin() -> None:
    """Tests against transformers skip themselves without it: here its absence is a failure."""
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert f"transformers=={version('transformers')}" in pins
