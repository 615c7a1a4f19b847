"""Every setting of emberbox, checked when it is made. The only file that reads the environment.

A setting comes from a command line flag, else from a variable in `VARIABLES`, else from the default
below. A variable that starts with EMBERBOX_ and is not in the table is an error: a misspelt setting
must not be ignored in silence.
Knows nothing of models, tensors or HTTP.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from emberbox.errors import SettingsError

PREFIX = "EMBERBOX_"
DTYPES = ("auto", "bfloat16", "float32")
CACHE_DTYPES = ("auto", "fp8")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_PORT = 65535
MAX_TOKENS = 2**40

_Settings = TypeVar("_Settings", "EngineSettings", "ServeSettings", "LogSettings", "BuildSettings")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, the setting it fills, and the type its text must have."""

    name: str
    setting: str
    kind: Callable[[str], object]
    doc: str


VARIABLES: tuple[Variable, ...] = (
    Variable("EMBERBOX_DEVICE", "device", str, "auto, cpu, cuda or cuda:N"),
    Variable("EMBERBOX_DTYPE", "dtype", str, "auto, bfloat16 or float32"),
    Variable("EMBERBOX_CACHE_DTYPE", "cache_dtype", str, "auto or fp8"),
    Variable("EMBERBOX_THREADS", "num_threads", int, "CPU threads; 0 chooses by the model's size"),
    Variable("EMBERBOX_HOST", "host", str, "address the server listens on"),
    Variable("EMBERBOX_PORT", "port", int, "port of the server; 0 takes a free one"),
    Variable("EMBERBOX_API_KEY", "api_key", str, "key that clients must send; empty asks for none"),
    Variable("EMBERBOX_KEEPALIVE_SECONDS", "keepalive_seconds", float, "silence before a comment"),
    Variable("EMBERBOX_LOG_LEVEL", "level", str, "debug, info, warning or error"),
    Variable("EMBERBOX_CACHE", "cache", str, "folder of compiled kernels"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Where and how the network runs. `engine.memory_plan` chooses what is None.

    `max_model_len`: prompt and reply of one request, in tokens. `max_running`: requests that are
    computed at once. `cache_tokens`: tokens the cache holds, of all requests together.
    `cache_dtype`: auto keeps latents in the activations' type; fp8 in about half of 16 bits.
    `snapshot_bytes`: memory for points that later prompts can go on from; 0 keeps none.
    `prefill_tokens`: prompt tokens of one step, of all requests together. `verify_weights`: compare
    what is loaded with the folder's digests, if it has them.
    """

    device: str = "auto"
    dtype: str = "auto"
    cache_dtype: str = "auto"
    num_threads: int = 0
    max_model_len: int | None = None
    max_running: int = 8
    cache_tokens: int | None = None
    snapshot_bytes: int | None = None
    prefill_tokens: int = 512
    verify_weights: bool = True

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        named = self.device in ("auto", "cpu", "cuda")
        if not named and not (kind == "cuda" and index.isascii() and index.isdigit()):
            raise SettingsError(
                f"device: {self.device!r} is not a device",
                hint="expected auto, cpu, cuda or cuda:N, for instance cuda:0",
            )
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("cache_dtype", self.cache_dtype, CACHE_DTYPES)
        _in_range("num_threads", self.num_threads, 0, 4096)
        _whole_or_none("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        _whole("max_running", self.max_running, 1, 1024)
        _whole_or_none("cache_tokens", self.cache_tokens, 1, MAX_TOKENS)
        _whole_or_none("snapshot_bytes", self.snapshot_bytes, 0, 2**50)
        _whole("prefill_tokens", self.prefill_tokens, 1, 65536)
        if not isinstance(self.verify_weights, bool):
            raise SettingsError(
                f"verify_weights: {self.verify_weights!r} is not accepted",
                hint="expected True or False",
            )
        if self.cache_tokens is not None and self.cache_tokens < (self.max_model_len or 1):
            raise SettingsError(
                f"cache_tokens: {self.cache_tokens} is less than max_model_len, "
                f"{self.max_model_len}",
                hint="the cache must hold at least one request of full length",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How the server listens and what it accepts. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_name: str | None = None
    keepalive_seconds: float = 10.0
    max_body_bytes: int = 64 * 1024 * 1024
    max_waiting: int = 64

    def __post_init__(self) -> None:
        if not self.host:
            raise SettingsError("host: is empty", hint="expected an address such as 127.0.0.1")
        _in_range("port", self.port, 0, MAX_PORT)
        _in_range("keepalive_seconds", self.keepalive_seconds, 0.01, 3600)
        _in_range("max_body_bytes", self.max_body_bytes, 1024, 2**31)
        _in_range("max_waiting", self.max_waiting, 1, 4096)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise SettingsError(
                "api_key: has characters outside printable ASCII",
                hint="use a key of letters, digits and dashes",
            )
        if self.model_name is not None and not self.model_name.strip():
            raise SettingsError("model_name: is empty", hint="leave it out: the folder names it")

    def __repr__(self) -> str:
        """Without the key, so that it cannot reach a log."""
        shown = ", ".join(
            f"{field.name}={'***' if field.name == 'api_key' and self.api_key else value!r}"
            for field in fields(self)
            for value in (getattr(self, field.name),)
        )
        return f"ServeSettings({shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How much is logged."""

    level: str = "info"

    def __post_init__(self) -> None:
        _one_of("level", self.level, LOG_LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """Where compiled kernels lie; the folder may be copied to a machine without a compiler."""

    cache: str = "~/.cache/emberbox"

    def __post_init__(self) -> None:
        if not self.cache.strip():
            raise SettingsError("cache: is empty", hint="leave it out: ~/.cache/emberbox")


def from_environment(
    kind: type[_Settings],
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> _Settings:
    """Settings of one kind: flags that are not None win over the environment, that over defaults.

    Raises SettingsError for an unknown flag or EMBERBOX_ variable, or a value not accepted.
    """
    environ = os.environ if environ is None else environ
    names = {field.name for field in fields(kind)}
    values = {name: value for name, value in read_variables(environ).items() if name in names}
    for name, value in (flags or {}).items():
        if name not in names:
            raise SettingsError(
                f"{kind.__name__}: no setting is called {name!r}",
                hint=f"settings: {', '.join(sorted(names))}",
            )
        if value is not None:
            values[name] = value
    # The values come from text and flags; __post_init__ is what checks them.
    arguments: dict[str, Any] = values
    return kind(**arguments)


def read_variables(environ: Mapping[str, str]) -> dict[str, object]:
    """Setting name -> value of every variable that is set; an empty one counts as not set."""
    known = {variable.name: variable for variable in VARIABLES}
    values: dict[str, object] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            raise SettingsError(
                f"environment: {name} is not a variable of emberbox",
                hint=f"variables: {', '.join(known)}",
            )
        if environ[name]:
            values[known[name].setting] = _parse(known[name], environ[name])
    return values


def _parse(variable: Variable, text: str) -> object:
    try:
        return variable.kind(text)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}.get(
            variable.kind,  # type: ignore[call-overload]
            "text",
        )
        raise SettingsError(
            f"environment: {variable.name}={text!r} is not {expected}", hint=variable.doc
        ) from None


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(
            f"{name}: {value!r} is not accepted", hint=f"expected one of {', '.join(allowed)}"
        )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise SettingsError(
            f"{name}: {value!r} is not accepted", hint=f"expected a number from {low} to {high}"
        )


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SettingsError(
            f"{name}: {value!r} is not accepted", hint=f"expected a whole number, {low} to {high}"
        )


def _whole_or_none(name: str, value: object, low: int, high: int) -> None:
    if value is not None:
        _whole(name, value, low, high)
