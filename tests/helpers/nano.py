"""The shipped nano model for tests: loaded once per process."""

from functools import cache
from pathlib import Path

from emberbox.engine.llm import LLM
from emberbox.model.cache import Cache, CacheSize
from emberbox.model.network import Network
from emberbox.settings import EngineSettings

NANO = Path(__file__).parents[2] / "models" / "ember-nano"


@cache
def nano_llm() -> LLM:
    """ember-nano in float32 on the CPU."""
    return LLM(NANO, EngineSettings(dtype="float32", device="cpu"))


def nano_network() -> Network:
    return nano_llm().network


def nano_cache(*, num_pages: int, num_slots: int) -> Cache:
    size = CacheSize(num_pages=num_pages, num_slots=num_slots)
    return nano_network().new_cache(size)
