"""What a person sees while a checkpoint loads: the memory plan as a table, then a bar."""

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from emberbox.engine.memory_plan import MemoryPlan


class LoadScreen:
    """A LoadListener of the engine that prints to `console`. Use it as a context manager.

    The bar is for terminals alone; a file or a pipe gets the table, if `has_plan`.
    """

    def __init__(self, console: Console, *, has_plan: bool) -> None:
        self._console, self._has_plan = console, has_plan
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("loading weights", start=False, total=None)

    def __enter__(self) -> "LoadScreen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def planned(self, memory: "MemoryPlan", num_bytes: int) -> None:
        """Show the plan; from here on `num_bytes` are read."""
        if self._has_plan:
            self._console.print(memory_table(memory))
        self._progress.start()
        self._progress.update(self._task, total=num_bytes)
        self._progress.start_task(self._task)

    def read(self, num_bytes: int) -> None:
        """Move the bar."""
        self._progress.advance(self._task, num_bytes)


def memory_table(memory: "MemoryPlan") -> Table:
    """The plan for people: sizes rounded, the sum and what there is in the last line."""
    table = Table(title="memory", title_justify="left", show_footer=True)
    table.add_column("for", "total")
    table.add_column("size", decimal(memory.total), justify="right", no_wrap=True)
    table.add_column("how it came about", f"of {decimal(memory.available_bytes)} available")
    for line in memory.lines:
        table.add_row(line.name, decimal(line.num_bytes), escape(line.note))
    return table
