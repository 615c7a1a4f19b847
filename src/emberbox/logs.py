"""Sets up standard logging for the command line. A program that imports emberbox keeps its own.

Every module logs to `logging.getLogger(__name__)`. Keys and prompts are never logged.
"""

import logging
import sys
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def set_up(level: str, stream: TextIO | None = None) -> None:
    """Log from `level` upwards ("debug", "info", "warning", "error"), to standard error."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("emberbox").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING" if level == "info" else level.upper())
