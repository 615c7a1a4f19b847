"""What holds for every test: no network but loopback, few threads, poisoned memory for ops."""

import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

OPS_TESTS = Path(__file__).parent / "ops"

settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("night", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def _is_loopback(address: object) -> bool:
    if not isinstance(address, tuple):
        return True  # a Unix socket's path
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """What a test's `main` set up for the command line ends with the test."""
    loggers = [logging.getLogger(name) for name in ("", "emberbox", "uvicorn")]
    before = [(logger, logger.level, logger.disabled, logger.propagate) for logger in loggers]
    yield
    for logger, level, disabled, propagate in before:
        logger.setLevel(level)
        logger.disabled, logger.propagate = disabled, propagate


@pytest.fixture(autouse=True, scope="session")
def _only_loopback() -> Iterator[None]:
    """A connection to anything but this machine is an error, whoever opens it."""
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex"):
        original = getattr(socket.socket, name)

        def connect(
            self: socket.socket, address: object, original: Callable[..., object] = original
        ) -> object:
            if not _is_loopback(address):
                raise PermissionError(f"tests may not connect to {address!r}")
            return original(self, address)

        patch.setattr(socket.socket, name, connect)
    yield
    patch.undo()


def _poisoned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = create(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            # Not every 8-bit float can be filled directly; all bits set is NaN in each of them.
            if tensor.element_size() == 1:
                tensor.view(torch.uint8).fill_(0xFF)
            else:
                tensor.fill_(float("nan"))
        return tensor

    return poisoned


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty and its relatives hand out reads as NaN: an element nobody wrote shows."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def _poison_in_ops(request: pytest.FixtureRequest) -> None:
    """Every test of an op runs with poisoned memory; others ask for `poison_empty`."""
    if request.path.is_relative_to(OPS_TESTS):
        request.getfixturevalue("poison_empty")
