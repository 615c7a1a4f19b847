"""What is seen of a load: the engine tells its listener, the screen shows it."""

import io

import torch
from rich.console import Console

from emberbox.cli.loading import LoadScreen
from emberbox.engine.llm import LLM
from emberbox.engine.memory_plan import MemoryLine, MemoryPlan
from emberbox.settings import EngineSettings
from tests.cli.test_cli import NANO

PLAN = MemoryPlan(
    lines=(MemoryLine("weights", 47_000_000, "once loaded"), MemoryLine("vision", 5_000, "[none]")),
    available_bytes=8_000_000_000,
    num_pages=1,
    num_slots=1,
    num_snapshots=0,
    max_model_len=64,
    prefill_tokens=64,
)


class Listener:
    def __init__(self):
        self.plans, self.sizes = [], []

    def planned(self, memory, num_bytes):
        assert self.sizes == []
        self.plans.append((memory, num_bytes))

    def read(self, num_bytes):
        self.sizes.append(num_bytes)


def test_a_listener_hears_the_plan_and_then_every_byte_that_was_announced():
    listener = Listener()
    llm = LLM(NANO, EngineSettings(device="cpu"), listener=listener)
    ((memory, announced),) = listener.plans
    assert memory is llm.memory
    assert announced == sum(listener.sizes) > 20_000_000
    assert llm.network.embedding.dtype == torch.float32


def shown(*, is_terminal: bool, has_plan: bool = True, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, quiet=quiet)
    with LoadScreen(console, has_plan=has_plan) as screen:
        screen.planned(PLAN, 100)
        screen.read(60)
        screen.read(40)
    return out.getvalue()


def test_a_file_gets_the_table_with_its_sum_and_no_bar():
    text = shown(is_terminal=False)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["weights", "47.0 MB", "once loaded"] in rows
    assert ["total", "47.0 MB", "of 8.0 GB available"] in rows
    assert "loading" not in text


def test_a_terminal_gets_a_bar_too_that_fills():
    text = shown(is_terminal=True)
    assert "loading weights" in text
    assert "100/100 bytes" in text


def test_where_the_plan_is_not_wanted_a_file_gets_nothing():
    assert shown(is_terminal=False, has_plan=False) == ""
    assert shown(is_terminal=False, quiet=True) == shown(is_terminal=True, quiet=True) == ""


def test_a_note_in_brackets_is_not_taken_for_markup():
    assert "[none]" in shown(is_terminal=False)
