"""tensors.sha256.json: what the bytes of every tensor of a folder should be, so that damage has a
name.

An object {tensor name: first 32 hex digits of the sha256 of its stored bytes} of all tensors in the
folder's safetensors files, not of those in `mtp/`. SHA256SUMS, where there is one, covers the file.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from emberbox.errors import CheckpointError, DamagedTensor
from emberbox.store.checksums import (
    SUMS_NAME,
    OnBytes,
    digest_file,
    hash_next,
    listed_sha256,
    require_regular,
)
from emberbox.store.durable import write_file
from emberbox.store.safetensors_header import TensorInfo, read_header
from emberbox.store.strict_json import JsonProblem, read_object

DIGESTS_NAME = "tensors.sha256.json"
DIGITS = 32  # 128 bits: no damage meets them by chance

_MADE_AGAIN = (
    f"fetch {DIGESTS_NAME} again; without it, and without its line in {SUMS_NAME}, "
    "the folder loads unverified"
)


def shortened(sha256: str) -> str:
    """The digest of a tensor, from all 64 digits."""
    return sha256[:DIGITS]


def digests_json(digests: Mapping[str, str]) -> bytes:
    """The text of the file (tensor name -> digest)."""
    return (json.dumps(dict(sorted(digests.items())), indent=0, ensure_ascii=False) + "\n").encode()


def write_digests(folder: Path) -> None:
    """Read every tensor of the folder's safetensors files, and write what was found.

    For writers that keep no digests of their own. Raises the HeaderError family, CheckpointError or
    OSError.
    """
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        digests |= digest_shard(path, list(read_header(path).values()))[1]
    draft = folder / f".{DIGESTS_NAME}.partial"
    write_file(draft, [digests_json(digests)])
    draft.replace(folder / DIGESTS_NAME)


def digest_shard(
    path: Path, infos: Sequence[TensorInfo], on_bytes: OnBytes = lambda _: None
) -> tuple[str, dict[str, str]]:
    """sha256 of the file, and the digest of each of `infos`, in one pass.

    `infos` are all that its header describes. Raises CheckpointError or OSError.
    """
    require_regular(path)
    whole, digests, position = hashlib.sha256(), {}, 0
    with path.open("rb", buffering=0) as file:
        for info in sorted(infos, key=lambda info: (info.start, info.stop)):
            hash_next(file, info.start - position, [whole], on_bytes)
            part = hashlib.sha256()
            hash_next(file, info.num_bytes, [whole, part], on_bytes)
            digests[info.name], position = shortened(part.hexdigest()), info.stop
    return whole.hexdigest(), digests


def read_digests(folder: Path, names: Iterable[str], top: Path) -> dict[str, str]:
    """The digests of `folder`, which are of exactly these tensors; none if it records none.

    The file must be what SHA256SUMS of `top`, that is `folder` or its parent, says. Raises
    CheckpointError.
    """
    path = folder / DIGESTS_NAME
    expected = listed_sha256(top, path.relative_to(top).as_posix())
    if expected is None and not path.exists():
        return {}
    listed = listed_digests(path, expected)
    _require_names(path, set(names), listed)
    return {name: digest for name, digest in listed.items() if digest is not None}


def listed_digests(path: Path, expected: str | None) -> dict[str, str | None]:
    """What the file says, whatever tensors there are; None where it is not of the form.

    expected: its sha256, if that is known. Raises CheckpointError, also if there is no such file.
    """
    if not path.exists():
        by = f", {SUMS_NAME} lists it" if expected else ""
        raise CheckpointError(f"{path}: missing{by}", hint=_MADE_AGAIN)
    _require_listed(path, expected)
    try:
        found = read_object(path)
    except JsonProblem as problem:
        raise CheckpointError(f"{path}: {problem}", hint=_MADE_AGAIN) from problem
    return {n: v if isinstance(v, str) and _fits(v) else None for n, v in found.items()}


def misfits(listed: Mapping[str, str | None], names: set[str]) -> dict[str, list[str]]:
    """What of a list of digests does not fit tensors of these names: words -> names of tensors."""
    found = {
        f"is not {DIGITS} hex digits": {name for name in listed if listed[name] is None},
        "has a digest, and is in no file": listed.keys() - names,
        "is in the folder, and has no digest": names - listed.keys(),
    }
    return {what: sorted(wrong) for what, wrong in found.items() if wrong}


def require_same(info: TensorInfo, expected: str, sha256: str) -> None:
    """Raises DamagedTensor unless the bytes of `info`, with this sha256, are those expected."""
    found = shortened(sha256)
    if found != expected:
        raise DamagedTensor(
            f"{info.file}: tensor {info.name!r} is damaged: the sha256 of its {info.num_bytes} "
            f"bytes begins with {found}, expected {expected} by {DIGESTS_NAME}",
            hint="fetch or make this file again; `emberbox verify` lists all that is damaged",
        )


def _require_listed(path: Path, expected: str | None) -> None:
    if expected is None:
        return
    try:
        found = digest_file(path).sha256
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if found != expected:
        raise CheckpointError(
            f"{path}: is damaged: sha256 {found}, expected {expected} by {SUMS_NAME}",
            hint=_MADE_AGAIN,
        )


def _require_names(path: Path, names: set[str], listed: Mapping[str, str | None]) -> None:
    """Every tensor has a digest, and every digest a tensor."""
    problems = [
        f"tensor {name!r} {what}"
        for what, wrong in misfits(listed, names).items()
        for name in wrong
    ]
    if problems:
        lines = problems[0] if len(problems) == 1 else "".join(f"\n  - {p}" for p in problems)
        raise CheckpointError(
            f"{path}: does not fit the tensors beside it: {lines}",
            hint="files of two checkpoints are mixed: fetch the folder again, or remove this file "
            "if it came from another",
        )


def _fits(text: str) -> bool:
    return len(text) == DIGITS and all(letter in "0123456789abcdef" for letter in text)
