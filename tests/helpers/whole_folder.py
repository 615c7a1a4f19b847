"""Small folders of three tensors with what their bytes are compared with."""

from pathlib import Path

from emberbox.store.checksums import SUMS_NAME, digest_file, sums_text, visible_files
from emberbox.store.digests import write_digests
from tests.attacks.builder import honest_folder


def plain_folder(tmp_path: Path) -> Path:
    """Tensors a and b in s1.safetensors, c in s2.safetensors, index and config."""
    folder = tmp_path / "plain"
    honest_folder(folder)
    return folder


def whole_folder(tmp_path: Path) -> Path:
    """The same with digests and SHA256SUMS."""
    folder = plain_folder(tmp_path)
    write_digests(folder)
    write_sums(folder)
    return folder


def write_sums(folder: Path) -> None:
    """SHA256SUMS of what is there now."""
    names = visible_files(folder) - {SUMS_NAME}
    sums = {name: digest_file(folder / name).sha256 for name in names}
    (folder / SUMS_NAME).write_text(sums_text(sums), "utf-8")
