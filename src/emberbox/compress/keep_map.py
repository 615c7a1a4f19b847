"""Which routed experts stay, layer by layer: `[keep]` of a recipe. Knows no tensors.

    [keep]
    file = "kept.json"     # {"3": [0, 2, 5, ...], ...} or the same as TOML: 3 = [0, 2, 5, ...]

    [keep.layers]          # or in the recipe itself
    3 = [0, 2, 5]

    [keep]                 # or so many, those that bear most on the calibration text
    by = "routing-mass"    # see routing_mass.py
    count = 12

Every layer with experts is listed, the MTP layer (the number after the last) among them, and all
keep equally many: `n_routed_experts` is one number. Ids are those of the source, ascending; in the
result they are counted anew.
"""

import json
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberbox.model.config import TextConfig
from emberbox.store.strict_json import JsonProblem, parse_object

MAX_FILE_BYTES = 4 << 20
WAYS = ({"file"}, {"layers"}, {"by", "count"})
BY_MASS = "routing-mass"
KEPT_NAME = "kept.json"  # of a map that was made here


@dataclass(frozen=True, slots=True)
class KeepMap:
    """Layer -> ids of the experts that stay, ascending.

    file, text: name and content of the file it came from, to be stored beside the recipe; where it
    stood in the recipe itself, no name, and the text is the map.
    """

    layers: Mapping[int, tuple[int, ...]]
    file: str | None = None
    text: str = ""

    @property
    def num_experts(self) -> int:
        """How many experts a layer keeps; of a map without `problems`."""
        return len(next(iter(self.layers.values())))

    def problems(self, text: TextConfig, has_mtp: bool) -> Iterator[str]:
        """Why this map does not fit a model."""
        experts = experts_of(text, has_mtp)
        missing = sorted(experts.keys() - self.layers.keys())
        if missing:
            yield f"keep: layers {_listed(missing)} have experts and are not listed"
        for layer, kept in sorted(self.layers.items()):
            if layer not in experts:
                yield f"keep: layer {layer} has no routed experts"
            elif kept[-1] >= experts[layer]:
                yield f"keep: layer {layer} has {experts[layer]} experts, there is no {kept[-1]}"
        counts: dict[int, list[int]] = {}
        for layer, kept in sorted(self.layers.items()):
            counts.setdefault(len(kept), []).append(layer)
        if len(counts) > 1:
            told = "; ".join(f"{n} in layers {_listed(layers)}" for n, layers in counts.items())
            yield f"keep: all layers must keep equally many experts, found {told}"
        if min(counts) < text.num_experts_per_tok:
            yield (
                f"keep: {min(counts)} experts are kept in layer {counts[min(counts)][0]}, a token "
                f"needs {text.num_experts_per_tok}"
            )


@dataclass(frozen=True, slots=True)
class Heaviest:
    """`count` experts of every layer stay; which, only the calibration text tells."""

    count: int

    @property
    def num_experts(self) -> int:
        """How many experts a layer keeps."""
        return self.count

    def problems(self, text: TextConfig, has_mtp: bool) -> Iterator[str]:
        """Why so many cannot stay."""
        least, most = text.num_experts_per_tok, min(experts_of(text, has_mtp).values(), default=0)
        if not least <= self.count <= most:
            yield (
                f"keep.count is {self.count}, expected {least} (a token needs so many) to {most} "
                f"(a layer has no more)"
            )

    def stand_in(self, text: TextConfig, has_mtp: bool) -> KeepMap:
        """A map of the same size, for a plan from headers: the first of every layer."""
        return KeepMap(dict.fromkeys(experts_of(text, has_mtp), tuple(range(self.count))))


def experts_of(text: TextConfig, has_mtp: bool) -> dict[int, int]:
    """Layer -> number of its routed experts; the MTP layer has the number after the last."""
    experts = {n: text.n_routed_experts for n, is_moe in enumerate(text.mlp_is_moe) if is_moe}
    return experts | ({text.num_hidden_layers: text.mtp_experts} if has_mtp else {})


def made_map(layers: Mapping[int, Sequence[int]]) -> KeepMap:
    """A map that came from no file, as one: to be written beside what is made by it."""
    lines = ",\n".join(f'"{layer}": {json.dumps(list(ids))}' for layer, ids in layers.items())
    kept = {layer: tuple(ids) for layer, ids in layers.items()}
    return KeepMap(kept, KEPT_NAME, f"{{\n{lines}\n}}\n")


def read_keep_map(
    table: object, folder: Path | None, problems: list[str]
) -> KeepMap | Heaviest | None:
    """What `table`, the value of `keep`, says; None, and `problems` says why, if it is wrong."""
    if not isinstance(table, dict) or set(table) not in WAYS:
        problems.append("keep: expected one of file, layers, or by and count, and nothing else")
        return None
    if "by" in table:
        return _heaviest(table, problems)
    if "layers" in table:
        layers = _layers(table["layers"], "keep.layers", problems)
        text = json.dumps(table["layers"], sort_keys=True) if layers else ""
        return KeepMap(layers, None, text) if layers else None
    name = table["file"]
    if not isinstance(name, str) or not name.endswith((".json", ".toml")):
        problems.append(f"keep.file is {name!r}, expected the path of a .json or .toml file")
        return None
    path = (folder or Path()) / name
    try:
        text = _read(path)
        data = tomllib.loads(text) if path.suffix == ".toml" else parse_object(text.encode())
    except (OSError, ValueError, RecursionError, JsonProblem) as error:
        problems.append(f"keep.file: {path}: {error}")
        return None
    layers = _layers(data, f"keep.file: {path}", problems)
    return KeepMap(layers, path.name, text) if layers else None


def _heaviest(table: Mapping[str, object], problems: list[str]) -> Heaviest | None:
    by, count = table["by"], table["count"]
    if by != BY_MASS:
        problems.append(f"keep.by is {by!r}, expected {BY_MASS!r}")
    if type(count) is not int or count < 1:
        problems.append(f"keep.count is {count!r}, expected a whole number of experts")
    elif by == BY_MASS:
        return Heaviest(count)
    return None


def _read(path: Path) -> str:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would never end, nor would a device
        raise OSError("not a file")
    if found.st_size > MAX_FILE_BYTES:
        raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _layers(data: object, where: str, problems: list[str]) -> dict[int, tuple[int, ...]]:
    """Checked layer -> ids; empty, and noted, if anything in it is wrong."""
    if not isinstance(data, dict) or not data:
        problems.append(f"{where}: expected lists of expert ids by layer number")
        return {}
    found, num_before = {}, len(problems)
    for key, ids in data.items():
        if not (key.isascii() and key.isdecimal() and str(int(key[:9])) == key):
            problems.append(f"{where}: {key!r} is not the number of a layer")
        elif not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            problems.append(f"{where}: layer {key}: expected a list of expert ids")
        elif not ids or sorted(set(ids)) != ids:
            problems.append(
                f"{where}: layer {key}: expected ascending ids, each once, at least one"
            )
        else:
            found[int(key)] = tuple(ids)
    return found if len(problems) == num_before else {}


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
