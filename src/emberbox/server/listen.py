"""Binds a port and runs the application on it with uvicorn, in this thread or in another.

The port is bound before anything else happens, so that a port in use is known at once and port 0
can be reported. Who connects is refused until the socket listens, and waits from then until the
application runs. Knows no engine.
"""

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from emberbox.errors import EnvironmentProblem

IDLE_CONNECTION_SECONDS = 75
GRACE_SECONDS = 3.0  # for replies under way when the server is told to stop
SHUTDOWN_SECONDS = 8  # for all connections; beyond it they are cut
START_SECONDS = 30.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. It does not listen yet: whoever announces its address calls `listen` first.

    Raises EnvironmentProblem when it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # no host name (a..b) is a UnicodeError
        raise _cannot_listen(host, port, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address a client on this machine uses, such as http://127.0.0.1:8000."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def serve(app: ASGIApp, bound: socket.socket, end_requests: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Replies that are under way then have `GRACE_SECONDS` to end; `end_requests` is called after
    that, from another thread, so that who is left gets an error and not silence.
    """
    _GracefulServer(_config(app), end_requests).run(sockets=[bound])


class _GracefulServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, end_requests: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is open, then the server."""
        ending = asyncio.create_task(self._end_after_grace())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_after_grace(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await asyncio.to_thread(self._end_requests)


class BackgroundServer:
    """The application in a thread, for demonstrations and tests. Use as a context manager."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        self.url = url_of(bound)
        self._server = uvicorn.Server(_config(app))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [bound]}, name="emberbox-http", daemon=True
        )

    def __enter__(self) -> "BackgroundServer":
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise EnvironmentProblem(f"{self.url}: the server did not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(SHUTDOWN_SECONDS + 5)


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> EnvironmentProblem:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return EnvironmentProblem(
        f"cannot listen on {host} port {port}: {reason}",
        hint="choose another --host or --port; --port 0 takes a free one",
    )
