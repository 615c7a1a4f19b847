"""`emberbox serve PATH`: an OpenAI-compatible server on one checkpoint."""

import argparse
import json
import logging
import os
import signal
from types import FrameType, TracebackType

from rich.console import Console

from emberbox.cli.flags import add_engine_flags, checkpoint_folder, settings_from
from emberbox.settings import EngineSettings, LogSettings, ServeSettings

NAME = "serve"
SUMMARY = "serve a checkpoint to any OpenAI client"
EXAMPLE = """example:
  emberbox serve models/ember-nano --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'

routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/NAME,
GET /health, GET /metrics. Requests are computed together; --max-running says how many.

Before it loads, it shows what will take how much memory, and it refuses what does not fit.
A key for clients comes from the variable EMBERBOX_API_KEY, never from a flag.
With --json nothing of this is shown; one line says when the server is ready:
{"event": "ready", "url": ..., "pid": ..., "model": ...}"""

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("path", type=checkpoint_folder, metavar="PATH", help="checkpoint folder")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="default: 8000; 0 takes a free port")
    parser.add_argument("--model-name", help="name clients use (default: the folder's name)")
    parser.add_argument(
        "--keepalive-seconds", type=float, metavar="S", help="silence before a comment (default 10)"
    )
    parser.add_argument("--max-body-bytes", type=int, metavar="N", help="default: 64 MiB")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; exit code 0 then."""
    settings = settings_from(ServeSettings, args)
    engine_settings = settings_from(EngineSettings, args)
    from emberbox import logs
    from emberbox.cli.loading import LoadScreen
    from emberbox.cli.open_engine import input_modalities, open_llm
    from emberbox.server.app import create_app
    from emberbox.server.listen import bind, is_loopback, serve, url_of
    from emberbox.server.worker import EngineWorker

    logs.set_up(settings_from(LogSettings, args).level)
    screen = LoadScreen(Console(stderr=True, quiet=args.json), has_plan=True)
    try:
        with StopSignals() as stop, bind(settings.host, settings.port) as bound:
            with screen:
                llm = open_llm(args.path, engine_settings, screen)
            with EngineWorker(llm, max_waiting=settings.max_waiting) as worker:
                app = create_app(worker, settings, input_modalities=input_modalities(llm))
                if not settings.api_key and not is_loopback(bound):
                    log.warning("anyone who reaches %s may use it: no API key", settings.host)
                ready = {"event": "ready", "url": url_of(bound), "pid": os.getpid()}
                ready["model"] = settings.model_name or llm.model_id
                text = f"serving {ready['model']} at {ready['url']}/v1 (stop with Ctrl-C)"
                stop.check()
                bound.listen()  # who connects from now on waits, and is not refused
                print(json.dumps(ready) if args.json else text, flush=True)
                stop.check()
                # After its own clean-up uvicorn raises the signal again; as an interrupt it ends.
                serve(app, bound, worker.close)
                stop.check()
    except KeyboardInterrupt:
        log.info("stopped")
    return 0


class StopSignals:
    """SIGINT and SIGTERM as KeyboardInterrupt, and remembered: start-up code may swallow one.

    A context manager, for the main thread; the former handlers come back at its end.
    """

    def __init__(self) -> None:
        # No threading.Event: its lock would hang a handler that interrupts another one.
        self._has_come = False

    def __enter__(self) -> "StopSignals":
        self._former = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt when a signal has come."""
        if self._has_come:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._has_come = True
        raise KeyboardInterrupt
