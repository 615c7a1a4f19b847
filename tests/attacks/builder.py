"""Files and folders made to mislead a reader, one per way to do it. Knows the format only.

Each attack says which error must answer it and a piece of text that the message must hold.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emberbox import errors

F32_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def build(header, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file from a header (an object to dump, or raw bytes) with an honest length unless given."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(**changes) -> bytes:
    """A file of one F32 tensor of 2 whose entry is changed; a value of None removes the key."""
    fields = {k: v for k, v in {**F32_PAIR, **changes}.items() if v is not None}
    return build({"x": fields}, bytes(8))


@dataclass(frozen=True)
class FileAttack:
    name: str
    content: bytes
    error: type[errors.HeaderError]
    says: str


def _two(first: list[int], second: list[int]) -> dict:
    return {
        "a": {"dtype": "U8", "shape": [first[1] - first[0]], "data_offsets": first},
        "b": {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": second},
    }


_E = errors
FILE_ATTACKS = [
    FileAttack(name, content, error, says)
    for name, content, error, says in [
        # length
        ("empty-file", b"", _E.TruncatedFile, "0 bytes long"),
        ("seven-bytes", b"\x02" + bytes(6), _E.TruncatedFile, "7 bytes long"),
        ("header-past-the-end", build({"x": F32_PAIR}, length=4000), _E.TruncatedFile, "4000"),
        ("header-of-2-to-the-64", build(b"{}", length=2**64 - 1), _E.HeaderTooLarge, "limit"),
        ("header-over-the-limit", build(b"{}", length=100_000_001), _E.HeaderTooLarge, "limit"),
        ("data-cut-short", entry()[:-1], _E.TruncatedFile, "tensor 'x' is cut"),
        ("no-data-at-all", entry()[:-8], _E.TruncatedFile, "its header describes"),
        # JSON
        ("empty-header", build(b""), _E.HeaderSyntax, "does not start with"),
        ("not-json", build(b"{broken"), _E.HeaderSyntax, "not JSON"),
        ("a-list", build(b"[]"), _E.HeaderSyntax, "does not start with"),
        ("leading-space", build(b" {}"), _E.HeaderSyntax, "does not start with"),
        ("byte-order-mark", build(b"\xef\xbb\xbf{}"), _E.HeaderSyntax, "does not start with"),
        ("utf-16", build("{}".encode("utf-16-le")), _E.HeaderSyntax, "not JSON"),
        ("not-utf-8", build(b'{"\xff": 1}'), _E.HeaderSyntax, "not UTF-8"),
        ("two-objects", build(b"{}{}"), _E.HeaderSyntax, "not JSON"),
        ("zero-padding", build(b"{}\0\0"), _E.HeaderSyntax, "not JSON"),
        ("nested-lists", build(b'{"x":' + b"[" * 200_000), _E.HeaderSyntax, "deep"),
        ("nested-objects", build(b'{"x":' * 200_000), _E.HeaderSyntax, "deep"),
        ("surrogate-name", build(b'{"\\ud800": 1}'), _E.HeaderSyntax, "surrogate"),
        ("not-a-number", build(b'{"x": NaN}'), _E.HeaderSyntax, "NaN"),
        ("integer-of-5000-digits", build(b'{"x":' + b"9" * 5000 + b"}"), _E.HeaderSyntax, "JSON"),
        # names
        (
            "name-twice",
            build(
                b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
                bytes(2),
            ),
            _E.DuplicateName,
            "'x' stands twice",
        ),
        ("dtype-twice", build(b'{"x":{"dtype":"U8","dtype":"I8"}}'), _E.DuplicateName, "'dtype'"),
        ("metadata-twice", build(b'{"__metadata__":{"a":"","a":""}}'), _E.DuplicateName, "'a'"),
        # entries
        ("metadata-of-numbers", build({"__metadata__": {"a": 1}}), _E.HeaderSyntax, "strings"),
        ("metadata-a-list", build({"__metadata__": []}), _E.HeaderSyntax, "strings"),
        ("entry-a-number", build({"x": 1}), _E.HeaderSyntax, "'x'"),
        ("entry-without-shape", entry(shape=None), _E.HeaderSyntax, "'x'"),
        ("entry-with-more", entry(strides=[1]), _E.HeaderSyntax, "'x'"),
        ("dtype-a-list", entry(dtype=["F32"]), _E.HeaderSyntax, "dtype"),
        ("dtype-unknown", entry(dtype="F33"), _E.UnknownDtype, "'F33'"),
        ("dtype-lower-case", entry(dtype="f32"), _E.UnknownDtype, "'f32'"),
        ("dtype-very-long", entry(dtype="F" * 9999), _E.UnknownDtype, "F'"),
        ("shape-a-number", entry(shape=2), _E.HeaderSyntax, "shape"),
        ("shape-negative", entry(shape=[-2]), _E.HeaderSyntax, "shape"),
        ("shape-twice-negative", entry(shape=[-1, -2]), _E.HeaderSyntax, "shape"),
        ("shape-a-bool", entry(shape=[2, True]), _E.HeaderSyntax, "shape"),
        ("shape-a-float", entry(shape=[2.0]), _E.HeaderSyntax, "shape"),
        ("shape-a-string", entry(shape=["2"]), _E.HeaderSyntax, "shape"),
        ("shape-null", entry(shape=[None]), _E.HeaderSyntax, "shape"),
        ("shape-huge", entry(shape=[2**64 + 2]), _E.HeaderSyntax, "shape"),
        ("shape-wraps-at-64-bits", entry(shape=[2**62, 4]), _E.WrongSize, "no possible"),
        ("shape-of-many-huge", entry(shape=[2**63 - 1] * 5000), _E.WrongSize, "no possible"),
        ("shape-too-large", entry(shape=[3]), _E.WrongSize, "needs 12 bytes"),
        ("shape-too-small", entry(shape=[1]), _E.WrongSize, "needs 4 bytes"),
        ("shape-empty-data-not", entry(shape=[0]), _E.WrongSize, "needs 0 bytes"),
        ("dtype-too-wide", entry(dtype="F64"), _E.WrongSize, "needs 16 bytes"),
        ("half-a-byte", entry(dtype="F4", shape=[15]), _E.WrongSize, "no possible"),
        ("offsets-reversed", entry(data_offsets=[8, 0]), _E.HeaderSyntax, "data_offsets"),
        ("offsets-negative", entry(data_offsets=[-8, 0]), _E.HeaderSyntax, "data_offsets"),
        ("offsets-three", entry(data_offsets=[0, 4, 8]), _E.HeaderSyntax, "data_offsets"),
        ("offsets-floats", entry(data_offsets=[0.0, 8.0]), _E.HeaderSyntax, "data_offsets"),
        ("offsets-bools", entry(data_offsets=[False, 8]), _E.HeaderSyntax, "data_offsets"),
        ("offsets-huge", entry(data_offsets=[0, 2**80]), _E.HeaderSyntax, "data_offsets"),
        # cover
        ("overlap", build(_two([0, 5], [4, 8]), bytes(8)), _E.OverlappingTensors, "'b'"),
        ("same-bytes", build(_two([0, 8], [0, 8]), bytes(8)), _E.OverlappingTensors, "'b'"),
        ("one-inside", build(_two([0, 8], [2, 4]), bytes(8)), _E.OverlappingTensors, "'b'"),
        ("empty-inside", build(_two([0, 8], [4, 4]), bytes(8)), _E.OverlappingTensors, "'b'"),
        ("gap", build(_two([0, 3], [4, 8]), bytes(8)), _E.UncoveredBytes, "before tensor 'b'"),
        ("gap-at-start", build(_two([1, 3], [3, 8]), bytes(8)), _E.UncoveredBytes, "'a'"),
        ("trailing-byte", entry() + b"\0", _E.UncoveredBytes, "1 bytes after"),
        ("data-without-tensors", build({}, bytes(9)), _E.UncoveredBytes, "9 bytes after"),
        ("beyond-the-end", entry(shape=[2**40], data_offsets=[0, 2**42]), _E.TruncatedFile, "long"),
    ]
]


@dataclass(frozen=True)
class FolderAttack:
    name: str
    change: Callable[[Path], object]
    error: type[errors.CheckpointError]
    says: str


def honest_folder(folder: Path) -> None:
    """config.json, an index, and two shards: a and b in the first, c in the second."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "glm5_next"}')
    (folder / "s1.safetensors").write_bytes(build(_two([0, 3], [3, 8]), bytes(8)))
    third = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    (folder / "s2.safetensors").write_bytes(build({"c": third}, b"cccc"))
    write_index(folder, {})


def write_index(folder: Path, changes: dict) -> None:
    """The honest index with `changes`; a value of None removes the name."""
    honest = {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}
    weight_map = {k: v for k, v in {**honest, **changes}.items() if v is not None}
    text = json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)


INDEX = "model.safetensors.index.json"


def _points_at(shard) -> Callable[[Path], object]:
    return lambda folder: write_index(folder, {"c": shard})


def _writes(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _copies(source: str, target: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / target).parent.mkdir(exist_ok=True)
        (folder / target).write_bytes((folder / source).read_bytes())

    return change


def _removes(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


FOLDER_ATTACKS = [
    FolderAttack(name, change, error, says)
    for name, change, error, says in [
        ("config-missing", _removes("config.json"), _E.ConfigError, "config.json: missing"),
        ("config-not-json", _writes("config.json", "{"), _E.ConfigError, "config.json: not JSON"),
        ("config-a-list", _writes("config.json", "[1]"), _E.ConfigError, "does not start"),
        ("config-key-twice", _writes("config.json", '{"a":1,"a":2}'), _E.ConfigError, "'a'"),
        ("config-nested", _writes("config.json", '{"a":' * 99_999), _E.ConfigError, "deep"),
        ("index-not-json", _writes(INDEX, "weights"), _E.IndexProblem, INDEX),
        ("index-nested", _writes(INDEX, '{"a":' * 99_999), _E.IndexProblem, "deep"),
        ("index-without-map", _writes(INDEX, "{}"), _E.IndexProblem, "weight_map"),
        ("index-map-a-list", _writes(INDEX, '{"weight_map": []}'), _E.IndexProblem, "weight_map"),
        ("index-up", _points_at("../x.safetensors"), _E.IndexProblem, "bare name"),
        ("index-absolute", _points_at("/etc/x.safetensors"), _E.IndexProblem, "bare name"),
        ("index-backslash", _points_at("..\\x.safetensors"), _E.IndexProblem, "bare name"),
        ("index-sub-folder", _points_at("mtp/x.safetensors"), _E.IndexProblem, "bare name"),
        ("index-zero-byte", _points_at("x\0.safetensors"), _E.IndexProblem, "bare name"),
        ("index-other-file", _points_at("config.json"), _E.IndexProblem, "bare name"),
        ("index-a-number", _points_at(7), _E.IndexProblem, "bare name"),
        ("shard-missing", _removes("s2.safetensors"), _E.MissingShard, "s2.safetensors"),
        ("wrong-shard", _points_at("s1.safetensors"), _E.IndexProblem, "s2.safetensors"),
        (
            "exchanged",
            lambda f: write_index(f, {"a": "s2.safetensors"}),
            _E.MisplacedTensor,
            "'a' is in s1.safetensors",
        ),
        (
            "tensor-nowhere",
            lambda f: write_index(f, {"d": "s2.safetensors"}),
            _E.MisplacedTensor,
            "'d' is in no file",
        ),
        ("not-listed", lambda f: write_index(f, {"b": None}), _E.IndexProblem, "'b'"),
        ("stray-shard", _copies("s2.safetensors", "s3.safetensors"), _E.IndexProblem, "s3"),
        ("no-index", _removes(INDEX), _E.IndexProblem, "2 safetensors files"),
        (
            "no-weights",
            _removes(INDEX, "s1.safetensors", "s2.safetensors"),
            _E.IndexProblem,
            "no safetensors file",
        ),
        ("mtp-twice", _copies("s2.safetensors", "mtp/m.safetensors"), _E.DuplicateName, "'c'"),
        ("mtp-empty", lambda f: (f / "mtp").mkdir(), _E.IndexProblem, "mtp"),
        ("mtp-broken", _copies("config.json", "mtp/m.safetensors"), _E.HeaderTooLarge, "mtp"),
        ("shard-a-folder", lambda f: (f / "z.safetensors").mkdir(), _E.IndexProblem, "z."),
    ]
]
