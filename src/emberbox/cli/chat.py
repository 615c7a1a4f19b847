"""`emberbox chat`: talk to a running server, or to a checkpoint that it serves itself meanwhile."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console

from emberbox.cli.flags import ENGINE_FIELDS, add_engine_flags, checkpoint_folder, settings_from
from emberbox.errors import SettingsError
from emberbox.settings import EngineSettings, LogSettings, ServeSettings

if TYPE_CHECKING:
    from emberbox.cli.chat_client import ChatClient

NAME = "chat"
SUMMARY = "talk to a running server, or to a checkpoint, in the terminal"
EXAMPLE = """example:
  emberbox chat                        # the server of `emberbox serve` on this machine
  emberbox chat http://10.0.0.7:8000   # another one; the variable EMBERBOX_API_KEY is its key
  emberbox chat models/ember-nano      # a checkpoint, served by this process meanwhile
  echo "Count from 3 to 9." | emberbox chat models/ember-nano

In the terminal /help lists the commands, Ctrl-C stops a reply, Ctrl-D ends the chat. From a pipe
everything is one question and the answer alone is printed; with --json each line is a turn of one
conversation and makes one line of JSON. Needs the package openai."""

SCHEMES = ("http://", "https://")
THINKING = ("on", "off", "low", "high", "max")
ANY_ADDRESS = ("0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument(
        "target",
        type=_target,
        nargs="?",
        metavar="URL_OR_PATH",
        help="a server's address, or a checkpoint folder (default: the server on this machine)",
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all")
    parser.add_argument("--think", choices=THINKING, default="on", help="default: on")
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="a picture for the first message; may be repeated",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the server's")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of one reply, thought included"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input; exit code 0 then."""
    engine_settings = settings_from(EngineSettings, args)
    serve_settings = settings_from(ServeSettings, args)
    log_settings = settings_from(LogSettings, args)
    url = _url_of(args, serve_settings)
    from emberbox import logs
    from emberbox.cli import chat_session

    logs.set_up(log_settings.level if args.level else "warning")
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and not args.json
    with _client(args, url, serve_settings.api_key, engine_settings) as client:
        session = chat_session.open_session(client, args)
        if is_interactive:
            chat_session.talk(session)
        elif args.json:
            chat_session.answer_lines(session)
        else:
            chat_session.answer_all(session)
    return 0


@contextmanager
def _client(
    args: argparse.Namespace, url: str | None, api_key: str | None, settings: EngineSettings
) -> Iterator["ChatClient"]:
    """A client of the server at `url`, or without one of a server on the folder, in here."""
    from emberbox.cli.chat_client import connect, need_openai

    need_openai()
    if url is not None:
        with connect(url, api_key) as client:
            yield client
        return
    from emberbox.cli.loading import LoadScreen
    from emberbox.cli.local_server import local_server

    screen = LoadScreen(Console(stderr=True, quiet=args.json), has_plan=False)
    folder = checkpoint_folder(args.target)
    with local_server(folder, settings, screen) as own, connect(own, None) as client:
        yield client


def _url_of(args: argparse.Namespace, settings: ServeSettings) -> str | None:
    """The server to ask, None for a folder. Raises SettingsError for flags that only a folder
    has a use for."""
    if args.target is not None and not args.target.startswith(SCHEMES):
        return None
    given = [name for name in ENGINE_FIELDS if getattr(args, name, None) is not None]
    if given:
        raise SettingsError(
            f"{', '.join(given)}: a running server has its own",
            hint="leave it out, or name a checkpoint folder instead of a server",
        )
    if args.target is not None:
        url: str = args.target
        return url
    host = "127.0.0.1" if settings.host in ANY_ADDRESS else settings.host
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _target(text: str) -> str:
    """An address or a folder; empty text and half an address are neither."""
    checkpoint_folder(text)
    try:
        is_whole = not text.startswith(SCHEMES) or bool(urlsplit(text).hostname)
    except ValueError:  # such as half an IPv6 address
        is_whole = False
    if not is_whole:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; such as http://127.0.0.1:8000")
    return text
