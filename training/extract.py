"""Prose and code out of a package archive: documents, documentation strings, sources.

Only (nearly) ASCII text of ordinary line length is taken; tests, vendored copies and data are not,
nor what `training.licences` or a named exclusion keeps out.
"""

import ast
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training.licences import Exclusion, forbidden, unused

SKIP = re.compile(
    r"(^|/)(tests?|testing|_vendor|vendor|vendored|extern|externals?|third_party|locale|locales|"
    r"encodings|migrations|(?<!doc/)build|_build|node_modules|benchmarks?|_generated|conf/locale|"
    r"project_templates?|news|newsfragments|changes|changelog|release|releases|releasenotes|"
    r"whats_new|whatsnew|themes|\.github)(/|$)",
    re.IGNORECASE,
)
SKIP_NAMES = re.compile(
    r"(^|/)(test_[^/]*|[^/]*_test|conftest|[^/]*(change|release|licen[cs]e|news|history|authors|"
    r"contributors|copying|notice|credits|security|third.party|requirements)[^/]*|[^/]*_pb2|"
    r"top_level|sources|entry_points|record|metadata|wheel)\.[a-z]+$",
    re.IGNORECASE,
)
DOCUMENT_SUFFIXES = (".rst", ".md", ".txt")
DOCUMENT_FOLDERS = re.compile(r"(^|/)(docs?|documentation|examples|tutorial|topics|guides?)(/|$)")
MAX_BYTES, MAX_LINE = 200_000, 200
MIN_DOCSTRING, MIN_DOCUMENT, MIN_SOURCE = 160, 600, 600
MIN_PLAIN = 0.97  # of the lines of a file
TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-",
     "\u2026": "...", "\u00a0": " ", "\u2022": "*", "\u2192": "->", "\u00d7": "x"}
)  # fmt: skip
HEADER = re.compile(r"\A(?:[ \t]*#[^\n]*\n|[ \t]*\n)+")


@dataclass(slots=True)
class Extract:
    """Documents of one package; `dropped`: path of a file -> the words that keep it out."""

    prose: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


def read_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the regular files of a wheel or source archive, sorted by name."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if _is_wanted(name, archive.getinfo(name).file_size):
                    yield name, archive.read(name)
        return
    with tarfile.open(path) as tar:
        members = {m.name: m for m in tar.getmembers() if m.isfile() and _is_wanted(m.name, m.size)}
        for name in sorted(members):
            file = tar.extractfile(members[name])
            if file is not None:
                yield name, file.read()


def _is_wanted(name: str, size: int) -> bool:
    inside = name.partition("/")[2] or name
    if size > MAX_BYTES or SKIP.search(inside) or SKIP_NAMES.search(inside):
        return False
    return name.endswith((".py", *DOCUMENT_SUFFIXES))


def extract(path: Path, exclusions: Sequence[Exclusion] = ()) -> Extract:
    """All of one archive that may be taken. Raises ValueError for an exclusion of nothing."""
    out = Extract()
    paths = []
    for name, content in read_archive(path):
        inside = name if path.suffix == ".whl" else name.partition("/")[2]
        paths.append(inside)
        if any(exclusion.covers(inside) for exclusion in exclusions):
            continue
        text = _plain(content)
        if text is None:
            continue
        words = forbidden(content.decode("utf-8"))
        if words is not None:
            out.dropped[inside] = words
        else:
            _take(out, name, text)
    if idle := unused(exclusions, paths):
        raise ValueError(f"{path.name}: exclusions that name no file: {', '.join(idle)}")
    return out


def _take(out: Extract, name: str, text: str) -> None:
    if name.endswith(".py"):
        out.prose += docstrings(text)
        source = HEADER.sub("", text, count=1)  # licence headers teach nothing
        if len(source) >= MIN_SOURCE and source.isascii():
            out.code.append(source)
    elif DOCUMENT_FOLDERS.search(name) and len(text) >= MIN_DOCUMENT:
        out.prose.append(text)


def docstrings(source: str) -> Iterator[str]:
    """Documentation strings that read as prose: long, and few examples."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= MIN_DOCSTRING and text.count(">>>") < 4:
                yield text + "\n"


def _plain(content: bytes) -> str | None:
    """ASCII text with Unix line ends, or None: typographic signs are spelled plainly, a few lines
    with other letters are left out."""
    try:
        text = content.decode("utf-8").translate(TYPOGRAPHY)
    except UnicodeDecodeError:
        return None
    lines = [line.rstrip() for line in re.split(r"\r?\n", text.expandtabs(4))]
    kept = [line for line in lines if line.isascii() and line.isprintable()]
    if len(kept) < MIN_PLAIN * len(lines) or any(len(line) > MAX_LINE for line in kept):
        return None
    return re.sub(r"\n{3,}", "\n\n\n", "\n".join(kept)).strip("\n") + "\n"
