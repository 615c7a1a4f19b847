"""A progress bar of work that goes through stages, on a terminal."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class StageBar:
    """The stage, how far it is and the time left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, stage: str, done: int, total: int, said: str = "") -> None:
        """A stage begins, or goes on. said: in place of its name."""
        if self._task is None or stage != self._stage:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=total)
            self._stage = stage
        self._progress.update(self._task, description=said or stage, completed=done)
