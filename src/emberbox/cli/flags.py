"""Flags that several verbs share, and how they become settings."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from emberbox.settings import (
    CACHE_DTYPES,
    DTYPES,
    LOG_LEVELS,
    EngineSettings,
    LogSettings,
    ServeSettings,
    from_environment,
)

_Settings = TypeVar("_Settings", EngineSettings, ServeSettings, LogSettings)

MEMORY_FLAGS = (
    ("--max-model-len", "TOKENS", "of a prompt and its reply (default: the model's, if it fits)"),
    ("--max-running", "N", "requests computed at once (default: 8)"),
    ("--cache-tokens", "TOKENS", "the cache holds, all requests together (default: what fits)"),
    ("--snapshot-bytes", "BYTES", "to keep prompts for reuse; 0 keeps none (default: up to 2 GB)"),
    ("--prefill-tokens", "TOKENS", "of prompts in one step (default: 512)"),
)

# What the flags below fill of EngineSettings.
ENGINE_FIELDS = tuple(field.name for field in fields(EngineSettings))


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """--device, --dtype, --cache-dtype, --threads, --log-level, --no-verify, and those of memory
    and batching."""
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the activations (default: auto)")
    parser.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="of the cached latents: that of the activations, or 8 bits (default: auto)",
    )
    parser.add_argument(
        "--threads",
        dest="num_threads",
        type=int,
        metavar="N",
        help="CPU threads (default: by the model's size)",
    )
    parser.add_argument("--log-level", dest="level", choices=LOG_LEVELS, help="default: info")
    parser.add_argument(
        "--no-verify",
        dest="verify_weights",
        action="store_const",
        const=False,
        help="load weights without comparing them with the folder's digests",
    )
    for flag, unit, text in MEMORY_FLAGS:
        parser.add_argument(flag, type=int, metavar=unit, help=text)


def as_flags(text: str) -> str:
    """The same text with the settings of memory named as their flags are."""
    for flag, _, _ in MEMORY_FLAGS:
        text = text.replace(flag.strip("-").replace("-", "_"), flag)
    return text


def checkpoint_folder(text: str) -> Path:
    """The type of a PATH argument; empty text, which `Path` takes for this folder, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def settings_from(kind: type[_Settings], args: argparse.Namespace) -> _Settings:
    """Settings of one kind from the flags that were given, the environment, and the defaults."""
    names = {field.name for field in fields(kind)}
    return from_environment(kind, {k: v for k, v in vars(args).items() if k in names})
