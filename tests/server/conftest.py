"""Live servers for the tests of this folder: a scripted engine, or one that can talk."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from emberbox.server.app import create_app
from emberbox.server.listen import BackgroundServer, bind
from emberbox.server.worker import Engine, EngineWorker
from emberbox.settings import EngineSettings, ServeSettings
from tests.server.scripted import ScriptedEngine

NANO = Path(__file__).resolve().parents[2] / "models" / "ember-nano"


class Live:
    """A running server and the clients of it."""

    def __init__(self, url: str, worker: EngineWorker, http: httpx.Client, client: OpenAI):
        self.url, self.worker, self.http, self.client = url, worker, http, client

    def post(self, **fields: object) -> httpx.Response:
        fields.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.http.post("/v1/chat/completions", json=fields)

    def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def error(self, response: httpx.Response) -> dict[str, str | None]:
        body = response.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["code"], str)
        return body["error"]

    def metric(self, name: str) -> float:
        """The value of a metric's line, its labels included in the name."""
        lines = self.http.get("/metrics").text.splitlines()
        (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
        return float(value)


@contextmanager
def running(engine: Engine, settings: ServeSettings) -> Iterator[Live]:
    with ExitStack() as stack:
        worker = stack.enter_context(EngineWorker(engine, max_waiting=settings.max_waiting))
        bound = bind("127.0.0.1", 0)
        server = stack.enter_context(BackgroundServer(create_app(worker, settings), bound))
        http = stack.enter_context(httpx.Client(base_url=server.url, trust_env=False, timeout=30))
        transport = stack.enter_context(DefaultHttpxClient(trust_env=False, timeout=60))
        client = OpenAI(
            base_url=f"{server.url}/v1",
            api_key=settings.api_key or "none",
            http_client=transport,
            max_retries=0,
        )
        yield Live(server.url, worker, http, client)


@pytest.fixture
def start() -> Iterator[Callable[..., Live]]:
    """Start a server on an engine with the given settings; it ends with the test."""
    with ExitStack() as stack:

        def start(engine: Engine, **settings: object) -> Live:
            settings.setdefault("port", 0)
            return stack.enter_context(running(engine, ServeSettings(**settings)))

        yield start


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    """A server whose engine says "Hello" to everything, for requests that never reach it."""
    with running(ScriptedEngine(), ServeSettings(port=0, max_body_bytes=1_000_000)) as live:
        yield live


@pytest.fixture(scope="session")
def nano() -> Iterator[Live]:
    """The shipped model behind a server."""
    with running(nano_engine(), ServeSettings(port=0, keepalive_seconds=0.2)) as live:
        yield live


def nano_engine() -> Engine:
    """The shipped model, loaded."""
    from emberbox.engine.llm import LLM

    return LLM(NANO, EngineSettings(device="cpu"))


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The address of a server of the shipped model that takes bodies of a megabyte."""
    settings = ServeSettings(port=0, keepalive_seconds=0.2, max_body_bytes=1_000_000)
    with running(nano_engine(), settings) as live:
        yield live.url


@pytest.fixture(scope="session")
def http(server_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of that server."""
    with httpx.Client(base_url=server_url, trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def client(server_url: str) -> Iterator[OpenAI]:
    """The client people use, on that server."""
    with DefaultHttpxClient(trust_env=False, timeout=120) as transport:
        yield OpenAI(
            base_url=f"{server_url}/v1", api_key="none", http_client=transport, max_retries=0
        )
