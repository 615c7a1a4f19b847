"""The progress bar of `emberbox compress`: how far it is, of what, and how long it will take."""

import io
import re
import time

from rich.console import Console

from emberbox.cli.compress import _Bar
from emberbox.compress.pipeline import Progress


def test_a_terminal_sees_unit_share_and_time_left():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with _Bar(console) as bar:
        for done in (0, 250, 500):
            bar.written(Progress("layer-007", done, 1000))
            time.sleep(0.15)
        bar.verified(3, 4)
        bar.written(Progress("layer-008", 750, 1000))
    text = screen.getvalue()
    assert "layer-008" in text
    assert "75 %" in text
    assert re.search(r"\d:\d\d:\d\d", text)


def test_what_is_no_terminal_sees_nothing():
    screen = io.StringIO()
    with _Bar(Console(file=screen)) as bar:
        bar.written(Progress("layer-007", 1, 2))
    assert screen.getvalue() == ""
