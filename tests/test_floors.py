"""What may be imported where: the rules that import-linter (`make floors`) cannot say."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "emberbox"

# Import names that a module up to the floor `measure` may need just to be imported, so that the
# engine runs from source on a bare GPU machine. `cuda` is cuda-core, `PIL` is pillow.
BARE_MACHINE = {
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "rich",
    "PIL",
    "cuda",
    "triton",
}
SERVICE = {"starlette", "uvicorn", "msgspec", "anyio", "prometheus_client"}
ABOVE_MEASURE = {"plan", "server", "compress", "deploy", "testing", "cli", "__main__"}


def module_level_imports(source: str) -> set[str]:
    """Top-level module names that importing `source` imports; not those of functions or types."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else (node.module or "").partition(".")[0])
        pending.extend(ast.iter_child_nodes(node))
    return found


def third_party(source: str) -> set[str]:
    return module_level_imports(source) - set(sys.stdlib_module_names) - {"emberbox"}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


MODULES = sorted(PACKAGE.rglob("*.py"))
LOW_MODULES = [path for path in MODULES if part_of(path) not in ABOVE_MEASURE]


def test_import_scan_sees_every_form_and_only_module_level() -> None:
    source = (
        "import os, torch.nn as nn\n"
        "from numpy.linalg import norm\n"
        "if TYPE_CHECKING:\n    import matplotlib\nelse:\n    import rich\n"
        "try:\n    import triton\nexcept ImportError:\n    pass\n"
        "def later():\n    import huggingface_hub\n"
        "class Holder:\n    import jinja2\n"
        "from . import sibling\n"
    )
    assert module_level_imports(source) == {"os", "torch", "numpy", "rich", "triton", "jinja2", "."}
    assert third_party("import json\nimport emberbox.errors\nimport httpx\n") == {"httpx"}


def test_modules_up_to_measure_import_only_what_a_bare_gpu_machine_has() -> None:
    assert len(LOW_MODULES) > 20
    strays = {
        path.relative_to(ROOT).as_posix(): sorted(names - BARE_MACHINE)
        for path in LOW_MODULES
        if (names := third_party(path.read_text(encoding="utf-8"))) - BARE_MACHINE
    }
    assert strays == {}


def test_modules_above_measure_import_only_declared_dependencies() -> None:
    strays = {
        path.relative_to(ROOT).as_posix(): sorted(names)
        for path in MODULES
        if (names := third_party(path.read_text(encoding="utf-8")) - BARE_MACHINE - SERVICE)
    }
    # Itself imported only where a matrix is compressed on a CPU, inside a function.
    assert strays == {"src/emberbox/compress/kernel_numba.py": ["numba"]}


def test_starting_the_service_is_not_needed_to_import_the_engine() -> None:
    service = [path for path in LOW_MODULES if third_party(path.read_text("utf-8")) & SERVICE]
    assert service == []


@pytest.mark.parametrize("rule", ["environment", "print"])
def test_edges_stay_at_the_edge(rule: str) -> None:
    """The environment is read in settings.py alone; only the command line prints."""
    needle, allowed = {
        "environment": ("environ", lambda path: part_of(path) == "settings"),
        "print": ("print", lambda path: part_of(path) in ("cli", "__main__")),
    }[rule]
    strays = []
    for path in MODULES:
        if allowed(path):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            called = rule != "print" or isinstance(node, ast.Name)
            if name in (needle, "getenv" if rule == "environment" else needle) and called:
                strays.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    assert strays == []


def test_package_init_files_are_empty_but_for_the_top_and_the_ops() -> None:
    full = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("__init__.py")
        if path.read_text(encoding="utf-8").strip()
        and path.parent != PACKAGE
        and path.parent.parent != PACKAGE / "ops"
    ]
    assert full == []


def test_every_part_has_a_floor_and_a_budget() -> None:
    parts = {part_of(path) for path in MODULES} - {"__init__", "__main__"}
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    floors = {
        name.strip(" ()")
        for layer in layers["contracts"][0]["layers"]
        for name in layer.replace(":", "|").split("|")
    }
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text("utf-8"))["python"]
    assert parts - floors == set()
    assert parts - {part for key in budgets for part in key.split("+")} == set()
