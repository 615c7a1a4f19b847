"""docs/how-it-works.md against the code: every name exists, and is called in the page's order."""

import importlib
import inspect
import re
import sys
import threading
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from emberbox.cli.loading import LoadScreen
from emberbox.cli.local_server import local_server
from emberbox.settings import EngineSettings

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "models" / "ember-nano"
PACKAGE = str(ROOT / "src" / "emberbox")
PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
PARTS = sorted(path.name for path in Path(PACKAGE).iterdir() if path.is_dir())
Code = tuple[str, str]
NAME = re.compile(rf"`((?:{'|'.join(PARTS)})\.[\w.]+)`")


def hops(heading: str) -> list[str]:
    """The names in the second column of the table under a heading, in order."""
    section = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \|", section, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    return [name for _, name in rows]


WEIGHT, REQUEST = hops("One weight"), hops("One request")


def resolve(name: str) -> object:
    """The object that a name like engine.core.Engine.step stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["emberbox", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def code_of(name: str) -> Code | None:
    """Where the code of a function is written, and its qualified name; None for a class."""
    code = getattr(inspect.unwrap(resolve(name)), "__code__", None)
    return (code.co_filename, code.co_qualname) if code else None


@pytest.fixture(scope="module")
def called() -> dict[str, list[Code]]:
    """The functions of the package in the order of their first calls: of a load with its first
    token, and of one streamed request after it."""
    phases: dict[str, dict[Code, None]] = {"weight": {}, "request": {}}
    now = phases["weight"]

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            now.setdefault((code.co_filename, code.co_qualname))

    former = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        screen = LoadScreen(Console(quiet=True), has_plan=False)
        with local_server(NANO, EngineSettings(device="cpu"), screen) as url:
            now = phases["request"]
            ask(url)
    finally:
        sys.setprofile(former)
        threading.setprofile(former)
    return {name: list(seen) for name, seen in phases.items()}


def ask(url: str) -> None:
    question = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    with httpx.Client(trust_env=False, timeout=60) as http:
        answer = http.post(f"{url}/v1/chat/completions", json=question)
    assert answer.text.endswith("data: [DONE]\n\n")


def test_every_name_on_the_page_is_in_the_code():
    names = NAME.findall(PAGE)
    assert len(names) > 35
    assert [name for name in names if resolve(name) is None] == []


def test_a_name_that_is_not_in_the_code_is_noticed():
    with pytest.raises(AttributeError):
        resolve("engine.core.Engine.no_such_step")
    with pytest.raises(AttributeError):
        resolve("engine.no_such_module.step")


@pytest.mark.parametrize(
    ("phase", "names"), [("weight", WEIGHT), ("request", REQUEST)], ids=["weight", "request"]
)
def test_the_functions_of_a_journey_are_called_in_the_order_of_the_page(called, phase, names):
    assert len(names) > 10
    seen = called[phase]
    functions = {name: code for name in names if (code := code_of(name)) is not None}
    assert [name for name, code in functions.items() if code not in seen] == []
    assert sorted(functions, key=lambda name: seen.index(functions[name])) == list(functions)
