"""What can be found out before a measurement begins: whether artifacts and panel fit each other,
and whether the result can be written. Reads headers, configs and tokenizers; no weights.
"""

import lzma
import os
import re
from collections.abc import Mapping
from pathlib import Path

from emberbox.errors import MeasureError
from emberbox.measure.documents import canonical_json, read_file, require_free
from emberbox.measure.lanes import Lane
from emberbox.measure.panel import Panel, Window
from emberbox.measure.record import MAX_POSITIONS
from emberbox.measure.record import SCHEMA as RECORD_SCHEMA
from emberbox.measure.schema import label
from emberbox.model.config import Glm5NextConfig
from emberbox.model.weights import assign
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.checksums import digest_file
from emberbox.store.strict_json import JsonProblem, parse_object

TOKENIZER_NAME = "tokenizer.json"
MAX_RECEIPT_BYTES = 64 << 20
MAX_NAME_BYTES = 185  # a record's name, and one on the way, are longer by 40
XZ_BEGIN_BYTES = 64 << 10  # of a record, to see that it is one
MAX_XZ_BYTES = 256 << 20  # of memory: a record's own setting takes 65 MB

_NAME = re.compile(r"[\w+-][\w.+-]{0,180}\.json")


def check_artifacts(folders: Mapping[str, Path], panel: Panel, lane: Lane) -> Glm5NextConfig:
    """The config of the reference. `folders`: "reference" and "candidate".

    Raises MeasureError that says what does not fit: vocabularies, the panel's tokens, the length of
    a window, tokenizers. CheckpointError for a broken folder, MemoryRefused.
    """
    if panel.num_positions > MAX_POSITIONS:
        raise MeasureError(
            f"panel {panel.name}: {panel.num_positions:,} positions, at most {MAX_POSITIONS:,}"
        )
    configs = {name: _config(folder) for name, folder in folders.items()}
    reference, candidate = configs["reference"], configs["candidate"]
    sizes = reference.text.vocab_size, candidate.text.vocab_size
    if sizes[0] != sizes[1]:
        raise MeasureError(
            f"vocabularies differ: {folders['reference']} has {sizes[0]} tokens, "
            f"{folders['candidate']} has {sizes[1]}",
            hint="only models of one vocabulary can be compared",
        )
    for name, config in configs.items():
        for window in panel.windows:
            _check_window(panel, window, config, f"the {name}")
    for folder in folders.values():
        _check_tokenizer(folder, panel)
    for folder in folders.values():
        lane.require_memory(folder)
    return reference


def check_output(path: Path, schema: str, *, beside: Path, may_replace: bool = False) -> None:
    """See that a receipt can be written to `path` and its record `beside` it.

    What lies there is kept, unless it `may_replace` a receipt of this schema and a record. Raises
    MeasureError.
    """
    if not _NAME.fullmatch(path.name) or len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise MeasureError(
            f"{path}: not the name of a receipt",
            hint=f"letters, digits, - and _, then .json; at most {MAX_NAME_BYTES} bytes",
        )
    if not _is_folder(path.parent):
        raise MeasureError(f"{path}: there is no folder {path.parent}", hint="make it first")
    if not os.access(path.parent, os.W_OK):
        raise MeasureError(f"{path}: the folder {path.parent} cannot be written")
    if _is_there(path) and _schema(path) != schema:
        raise MeasureError(
            f"{path}: is there already, and is not a receipt of fidelity", hint="give another name"
        )
    if _is_there(beside) and not _is_record(beside):
        raise MeasureError(
            f"{beside}: is there already, and is not a record", hint="give another name"
        )
    require_free(path, beside, may_replace=may_replace)


def check_command(command: str) -> None:
    """See that a receipt can hold the line that measures again. Raises MeasureError."""
    for problem in label(command, "command"):
        raise MeasureError(
            f"a receipt cannot hold this command: {problem}", hint="give paths of plain text"
        )


def _config(folder: Path) -> Glm5NextConfig:
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assign(config, checkpoint.tensors)
    return config


def _check_window(panel: Panel, window: Window, config: Glm5NextConfig, whose: str) -> None:
    where, text = f"panel {panel.name}, window {window.id!r}", config.text
    largest = max(window.token_ids)
    if largest >= text.vocab_size:
        raise MeasureError(
            f"{where}: token {largest} is outside the vocabulary of {whose}, {text.vocab_size}",
            hint="the panel was made for another model",
        )
    if len(window.token_ids) > text.max_position_embeddings:
        raise MeasureError(
            f"{where}: {len(window.token_ids)} tokens, the context of {whose} holds "
            f"{text.max_position_embeddings}"
        )
    media = {config.image_token_id, config.video_token_id}.intersection(window.token_ids)
    if media:
        raise MeasureError(f"{where}: token {min(media)} stands for a picture; panels are text")


def _check_tokenizer(folder: Path, panel: Panel) -> None:
    if panel.tokenizer_sha256 is None:
        return
    path = folder / TOKENIZER_NAME
    try:
        found = digest_file(path).sha256
    except OSError as error:
        raise MeasureError(
            f"{path}: cannot be read ({error.strerror}); panel {panel.name} is of the tokenizer "
            f"with sha256 {panel.tokenizer_sha256}"
        ) from error
    if found != panel.tokenizer_sha256:
        raise MeasureError(
            f"{path}: sha256 {found}; panel {panel.name} is of the tokenizer with sha256 "
            f"{panel.tokenizer_sha256}",
            hint="token ids of one tokenizer mean nothing to another",
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long for the disk
        return False


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_record(path: Path) -> bool:
    """Whether it begins as every record does."""
    begin = canonical_json({"schema": RECORD_SCHEMA}).removesuffix(b"}")
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_BYTES)
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return unpacker.decompress(file.read(XZ_BEGIN_BYTES), max_length=len(begin)) == begin
    except (OSError, lzma.LZMAError):
        return False


def _schema(path: Path) -> object:
    """What the file says it is; None if it says nothing."""
    try:
        return parse_object(read_file(path, MAX_RECEIPT_BYTES).strip()).get("schema")
    except (MeasureError, JsonProblem):
        return None
