"""Serves a checkpoint in this process on a free port of this machine, for `demo` and `chat`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emberbox.cli.open_engine import input_modalities, open_llm
from emberbox.server.app import create_app
from emberbox.server.listen import BackgroundServer, bind
from emberbox.server.worker import EngineWorker
from emberbox.settings import EngineSettings, ServeSettings

if TYPE_CHECKING:
    from emberbox.cli.loading import LoadScreen


@contextmanager
def local_server(folder: Path, settings: EngineSettings, screen: "LoadScreen") -> Iterator[str]:
    """The address of a server on `folder`, such as http://127.0.0.1:40123, while it runs.

    Nobody else on the machine is told the port, and it asks for no key. Raises what `open_llm`
    raises.
    """
    serve_settings = ServeSettings(port=0)
    with screen:
        llm = open_llm(folder, settings, screen)
    with EngineWorker(llm, max_waiting=serve_settings.max_waiting) as worker:
        app = create_app(worker, serve_settings, input_modalities=input_modalities(llm))
        bound = bind(serve_settings.host, serve_settings.port)
        with BackgroundServer(app, bound) as server:
            yield server.url
