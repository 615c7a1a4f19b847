"""What tests do on the wire below an HTTP client: raw connections, events of a stream, waiting."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import httpx

HI = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[dict]:
    """The JSON of every event; the last line must be [DONE]."""
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def eventually(is_true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def together(calls: Iterable[tuple]) -> None:
    """Run (function, argument...) tuples at the same time, to their end."""
    threads = [threading.Thread(target=call, args=args) for call, *args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def raw_request(url: str, body: dict, path: str = "/v1/chat/completions") -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        received += (part := connection.recv(65536))
        assert part, f"closed before {mark!r}: {received[-200:]!r}"
    return received


def read_all(connection: socket.socket) -> bytes:
    """What a server sends until the end of its chunked answer; closes the connection."""
    with connection:
        return read_until(connection, b"\r\n0\r\n\r\n")
