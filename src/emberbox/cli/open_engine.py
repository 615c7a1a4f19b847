"""Loads a checkpoint for a verb: settings in, a ready LLM out."""

from pathlib import Path
from typing import TYPE_CHECKING

from emberbox.cli.flags import as_flags
from emberbox.errors import CheckpointError, MemoryRefused
from emberbox.settings import EngineSettings

if TYPE_CHECKING:
    from emberbox.engine.llm import LLM
    from emberbox.engine.loading import LoadListener

# The shortest prompt that runs every part once, so that the first user waits for nothing else.
WARM_UP_MESSAGES = [{"role": "user", "content": "Hello"}]


def open_llm(
    folder: Path, settings: EngineSettings, listener: "LoadListener | None" = None
) -> "LLM":
    """The LLM in `folder`, warmed up by one token; `listener` hears how it is loaded.

    Raises CheckpointError, EnvironmentProblem; MemoryRefused with a hint that names flags.
    """
    if not _is_folder(folder):
        raise CheckpointError(
            f"{folder}: there is no such folder",
            hint="expected a checkpoint folder with config.json and safetensors files; "
            "the address of a server begins with http://",
        )
    from emberbox.engine.llm import LLM
    from emberbox.engine.request import SamplingParams

    try:
        llm = LLM(folder, settings, listener=listener)
    except MemoryRefused as refused:
        raise MemoryRefused(refused.message, hint=as_flags(refused.hint)) from None
    llm.chat(WARM_UP_MESSAGES, SamplingParams(max_tokens=1))
    return llm


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name too long
        return False


def input_modalities(llm: "LLM") -> tuple[str, ...]:
    """What the model takes: text, and images and clips when it has a vision tower."""
    return ("text",) if llm.config.vision is None else ("text", "image", "video")
