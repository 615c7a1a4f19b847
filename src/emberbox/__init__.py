"""emberbox runs GLM-5.3-Flash on one small box, and proves how well.

Importing this package costs nothing: each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberbox.engine.llm import LLM
    from emberbox.engine.request import SamplingParams
    from emberbox.store.checkpoint import Checkpoint, open_checkpoint

__version__ = "0.1.0"

__all__ = ["LLM", "Checkpoint", "SamplingParams", "__version__", "open_checkpoint"]

_HOMES = {
    "Checkpoint": "emberbox.store.checkpoint",
    "LLM": "emberbox.engine.llm",
    "SamplingParams": "emberbox.engine.request",
    "open_checkpoint": "emberbox.store.checkpoint",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
