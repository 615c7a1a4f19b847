"""Open a folder of weights: config, index, and where every tensor lies; then read tensors.

A checkpoint is one folder, or two: the trunk and a sub-folder `mtp/` that holds the layer for
multi-token prediction with tensors under their released names. Each folder has one safetensors
file, or `model.safetensors.index.json` and the shards it names. Every safetensors file in a folder
must be accounted for. Where a folder records digests of its tensors, what is read is held to them.
Knows no torch, and not what a tensor means.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from emberbox.errors import (
    CheckpointError,
    ConfigError,
    DuplicateName,
    IndexProblem,
    MisplacedTensor,
    MissingShard,
    TruncatedFile,
    WrongSize,
)
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.digests import read_digests, require_same
from emberbox.store.safetensors_header import TensorInfo, read_header
from emberbox.store.strict_json import JsonObject, JsonProblem, read_object

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
MTP_FOLDER = "mtp"

_SHARD_PATTERN = re.compile(r".*-\d+-of-\d+\.safetensors")
_INCOMPLETE = "the download is not complete, or files of two checkpoints are mixed"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint. `tensors` holds trunk and MTP layer together, by released name.

    `config` is the parsed config.json of the trunk; `mtp_config` that of `mtp/`, None without one.
    `digests`: what the bytes of a tensor should be (digests.py), of those that are verified.
    """

    folder: Path
    config: JsonObject
    tensors: Mapping[str, TensorInfo]
    mtp_config: JsonObject | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def read_into(self, info: TensorInfo, buffer: Buffer) -> None:
        """Fill `buffer` with the data of `info`; safe from several threads.

        The buffer must be writable, contiguous and of exactly info.num_bytes bytes, else WrongSize
        (or Python's own TypeError). Raises TruncatedFile if the file became shorter, DamagedTensor
        if the bytes are not those of its digest.
        """
        self.read_as_it_is(info, buffer)
        expected = self.digests.get(info.name)
        if expected is not None:
            require_same(info, expected, hashlib.sha256(byte_view(buffer)).hexdigest())

    def read_as_it_is(self, info: TensorInfo, buffer: Buffer) -> None:
        """The same without comparing digests: for readers that do so themselves."""
        view = byte_view(buffer)
        if view.nbytes != info.num_bytes:
            raise WrongSize(
                f"{info.file}: tensor {info.name!r} has {info.num_bytes} bytes, "
                f"the buffer to read into {view.nbytes}"
            )
        if info.num_bytes:
            _read_exactly(info, view)


def open_checkpoint(folder: str | Path, *, verify: bool = True) -> Checkpoint:
    """Read config.json, the index and every header under `folder`, and check them together.

    Without `verify` digests are left alone, and tensors are read as they are. Raises ConfigError,
    the IndexProblem family, the HeaderError family, or CheckpointError if there is no such folder,
    it cannot be read, or its digests do not fit its tensors.
    """
    try:
        return _open(Path(folder), verify=verify)
    except OSError as error:  # no permission
        where = error.filename or folder
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error


def _open(folder: Path, *, verify: bool) -> Checkpoint:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder", hint="give the folder of config.json")
    config = _read_config(folder / CONFIG_NAME)
    tensors = _read_folder(folder)
    digests = read_digests(folder, tensors, folder) if verify else {}
    mtp_folder, mtp_config = folder / MTP_FOLDER, None
    if mtp_folder.is_dir():
        drafter = _read_folder(mtp_folder)
        tensors = _merge([tensors, drafter])
        digests |= read_digests(mtp_folder, drafter, folder) if verify else {}
        if (mtp_folder / CONFIG_NAME).exists():
            mtp_config = _read_config(mtp_folder / CONFIG_NAME)
    table = MappingProxyType(tensors)
    return Checkpoint(folder, config, table, mtp_config, MappingProxyType(digests))


def _read_exactly(info: TensorInfo, view: memoryview) -> None:
    position = 0
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.start)
            # One call reads at most 2 GiB on Linux, and may always read less than asked.
            while position < len(view):
                count = file.readinto(view[position:])
                if not count:
                    break
                position += count
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error.strerror}") from error
    if position < len(view):
        raise TruncatedFile(
            f"{info.file}: tensor {info.name!r} ends after {position} of {info.num_bytes} bytes: "
            f"the file changed after its header was read",
            hint="do not write to a checkpoint that is being loaded",
        )


def _read_config(path: Path) -> JsonObject:
    if not path.exists():
        raise ConfigError(f"{path}: missing", hint="a checkpoint folder has a config.json")
    try:
        return read_object(path)
    except JsonProblem as problem:
        raise ConfigError(f"{path}: {problem}") from problem


def _read_folder(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of one folder, sub-folders aside."""
    on_disk = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX_NAME).exists():
        weight_map = read_index(folder / INDEX_NAME)
        _check_shards(folder, set(weight_map.values()), set(on_disk))
        tensors = _read_files(folder, on_disk)
        _check_places(folder / INDEX_NAME, weight_map, tensors)
        return tensors
    if not on_disk:
        raise IndexProblem(f"{folder}: no safetensors file", hint="fetch the weights")
    if len(on_disk) > 1:
        raise IndexProblem(
            f"{folder}: {len(on_disk)} safetensors files ({_listed(on_disk)}) and no {INDEX_NAME}",
            hint=_INCOMPLETE,
        )
    if _SHARD_PATTERN.fullmatch(on_disk[0]):
        raise MissingShard(
            f"{folder}: {on_disk[0]} is one shard of several; the others and {INDEX_NAME} are not "
            f"there",
            hint=_INCOMPLETE,
        )
    return read_header(folder / on_disk[0])


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name of the index at `path`. Raises IndexProblem."""
    try:
        index = read_object(path)
    except JsonProblem as problem:
        raise IndexProblem(f"{path}: {problem}") from problem
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise IndexProblem(f"{path}: weight_map is not an object")
    for name, shard in weight_map.items():
        if not _is_shard_name(shard):
            raise IndexProblem(
                f"{path}: tensor {name!r} is said to be in {str(shard)[:200]!r}; expected the bare "
                f"name of a .safetensors file in the same folder"
            )
    return weight_map


def _is_shard_name(shard: object) -> bool:
    return (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and shard.isprintable()
        and not any(mark in shard for mark in ("/", "\\"))
    )


def _check_shards(folder: Path, listed: set[str], on_disk: set[str]) -> None:
    missing, stray = sorted(listed - on_disk), sorted(on_disk - listed)
    if missing:
        raise MissingShard(
            f"{folder}: the index lists {len(listed)} files, {len(missing)} are not there: "
            f"{_listed(missing)}",
            hint=_INCOMPLETE,
        )
    if stray:
        raise IndexProblem(
            f"{folder}: {len(stray)} safetensors files are not in {INDEX_NAME}: {_listed(stray)}",
            hint="move them away, or complete the index",
        )


def _read_files(folder: Path, names: Iterable[str]) -> dict[str, TensorInfo]:
    return _merge(read_header(folder / name) for name in names)


def _merge(groups: Iterable[Mapping[str, TensorInfo]]) -> dict[str, TensorInfo]:
    """All tensors of all groups. Raises DuplicateName naming every tensor that is in two."""
    tensors: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for group in groups:
        for name, info in group.items():
            if name in tensors:
                twice.append(f"tensor {name!r} is in {tensors[name].file} and in {info.file}")
            else:
                tensors[name] = info
    if twice:
        raise DuplicateName("; ".join(twice), hint=_INCOMPLETE)
    return tensors


def _check_places(
    index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    misplaced = [
        f"{name!r} is in {_place(name, tensors)}, not in {shard}"
        for name, shard in weight_map.items()
        if name not in tensors or tensors[name].file.name != shard
    ]
    if misplaced:
        raise MisplacedTensor(
            f"{index}: {len(misplaced)} tensors are not where it says: {_listed(misplaced)}",
            hint=_INCOMPLETE,
        )
    unlisted = [
        f"{name!r} in {i.file.name}" for name, i in tensors.items() if name not in weight_map
    ]
    if unlisted:
        raise IndexProblem(
            f"{index}: does not list {len(unlisted)} tensors: {_listed(unlisted)}", hint=_INCOMPLETE
        )


def _place(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    return tensors[name].file.name if name in tensors else "no file"


def _listed(items: list[str]) -> str:
    """All of them: a refusal names every fault, a long one costs a line each."""
    return ", ".join(items) if len(items) <= 5 else "".join(f"\n  - {item}" for item in items)
