"""Flags that several verbs share, and how they become settings."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from emberbox.settings import (
    DTYPES,
    LOG_LEVELS,
    EngineSettings,
    LogSettings,
    ServeSettings,
    from_environment,
)

_Settings = TypeVar("_Settings", EngineSettings, ServeSettings, LogSettings)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """--device, --dtype, --threads, --log-level."""
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the activations (default: auto)")
    parser.add_argument(
        "--threads",
        dest="num_threads",
        type=int,
        metavar="N",
        help="CPU threads (default: by the model's size)",
    )
    parser.add_argument("--log-level", dest="level", choices=LOG_LEVELS, help="default: info")


def checkpoint_folder(text: str) -> Path:
    """The type of a PATH argument; empty text, which `Path` takes for this folder, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def settings_from(kind: type[_Settings], args: argparse.Namespace) -> _Settings:
    """Settings of one kind from the flags that were given, the environment, and the defaults."""
    names = {field.name for field in fields(kind)}
    return from_environment(kind, {k: v for k, v in vars(args).items() if k in names})
