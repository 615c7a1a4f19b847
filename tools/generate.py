"""Write the reference pages that are drawn from the code: command line, settings, errors, ops.

`--check` writes nothing and fails, with the difference, when a page is not what the code says. The
text is built from the objects themselves, not from a help screen, so that it does not depend on the
Python version or the width of a terminal.
"""

import argparse
import ast
import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by tools/generate.py from the code; `make fix` renews it. -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a page is out of date")
    args = parser.parse_args()
    stale = 0
    for name, build in PAGES.items():
        path = ROOT / "docs" / "reference" / name
        old, new = path.read_text(encoding="utf-8") if path.exists() else "", build()
        if old == new:
            continue
        stale += 1
        if args.check:
            lines = old.splitlines(), new.splitlines()
            print(
                "\n".join(
                    difflib.unified_diff(*lines, f"{name} as it is", f"{name} as it should be")
                )
            )
        else:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if args.check and stale:
        print(f"{stale} generated page(s) out of date; run `make fix`", file=sys.stderr)
    return 1 if args.check and stale else 0


def page(title: str, command: str, *parts: str) -> str:
    """A page with its title, the command that shows the same on a terminal, and the rest."""
    return "\n\n".join([NOTE, f"# {title}", f"```console\n$ {command}\n```", *parts]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `|` in a cell is escaped."""
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [
        " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in row) for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines)


def command_line() -> str:
    """Every verb, and what a verb divides into, with its arguments and its example."""
    from emberbox.cli.main import build_parser

    parser = build_parser()
    verbs = dict(_verbs(parser))
    parts = [parser.description or "", parser.epilog or ""]
    for name, verb in verbs.items():
        parts += [f"## emberbox {name}", verb.description or "", _arguments(verb)]
        parts.append(f"```text\n{(verb.epilog or '').strip()}\n```")
    check = " && ".join(f"emberbox {name} --help" for name in verbs)
    return page("Command line", check, *parts)


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                yield name, verb
                yield from ((f"{name} {kind}", inner) for kind, inner in _verbs(verb))


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = ""
        if action.option_strings and action.nargs != 0:
            value = (
                " | ".join(map(str, action.choices))
                if action.choices
                else str(action.metavar or action.dest.upper())
            )
        rows.append((f"`{names}`", f"`{value}`" if value else "", action.help or ""))
    return table(("argument", "value", "meaning"), rows)


def settings() -> str:
    """Every variable of the environment and every setting with its default."""
    from emberbox import settings as module

    classes = [
        module.EngineSettings,
        module.ServeSettings,
        module.LogSettings,
        module.BuildSettings,
    ]
    variables = table(
        ("variable", "setting", "meaning"),
        ((f"`{v.name}`", f"`{v.setting}`", v.doc) for v in module.VARIABLES),
    )
    parts = [
        "A flag wins over a variable, a variable over the default. A variable that begins with "
        f"`{module.PREFIX}` and is not listed is an error.",
        "## Environment",
        variables,
    ]
    for kind in classes:
        rows = [
            (f"`{f.name}`", f"`{_type_name(f.type)}`", f"`{f.default!r}`")
            for f in dataclasses.fields(kind)
        ]
        parts += [
            f"## {kind.__name__}",
            (kind.__doc__ or "").splitlines()[0],
            table(("setting", "type", "default"), rows),
        ]
    check = "EMBERBOX_DEVICE=cpu emberbox doctor --json"
    return page("Settings", check, *parts)


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def errors() -> str:
    """The exception tree, in the order of errors.py, then those that only the server raises."""
    parts = ["Every error says what is wrong and where; most end with a hint what to do about it."]
    known = {"Exception"}
    for module in ("errors", "server/failures"):
        source = (ROOT / "src" / "emberbox" / f"{module}.py").read_text(encoding="utf-8")
        rows = []
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            base = ast.unparse(node.bases[0])
            if base in known:
                known.add(node.name)
                summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
                rows.append((f"`{node.name}`", f"`{base}`", summary))
        parts += [
            f"## emberbox.{module.replace('/', '.')}",
            table(("error", "is a", "meaning"), rows),
        ]
    check = 'python -c "import emberbox.errors; print(emberbox.errors.__doc__)"'
    return page("Errors", check, *parts)


def ops() -> str:
    """Every op with what it promises, its kernels and its tolerances."""
    from emberbox.ops.table import OPS

    rows = []
    for name, op in OPS.items():
        module = sys.modules[op.reference.__module__.rpartition(".")[0]]
        summary = (module.__doc__ or "").partition("\n\n")[0].rstrip(".")
        tolerance = ", ".join(
            f"{str(k).removeprefix('torch.')} {v:g}" for k, v in op.tolerance.items()
        )
        rows.append((f"`{name}`", summary, ", ".join(op.kernels) or "reference only", tolerance))
    parts = [
        "Each op is a function in plain torch, its reference, and possibly faster kernels. A "
        "tolerance is the largest relative error against the reference in float64.",
        table(("op", "computes", "kernels", "tolerance"), rows),
    ]
    return page("Ops", "emberbox doctor --device cpu", *parts)


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_line,
    "settings.md": settings,
    "errors.md": errors,
    "ops.md": ops,
}


if __name__ == "__main__":
    sys.exit(main())
