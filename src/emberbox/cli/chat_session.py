"""How a chat looks: typed at a terminal, read from a pipe, or as lines of JSON for machines."""

import argparse
import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from emberbox.cli.chat_client import ChatClient, Piece, Reply, ReplyStream
from emberbox.cli.chat_state import Conversation
from emberbox.errors import EmberboxError, RequestError

QUIT = "/quit"
PROMPT, CONTINUED = "> ", "... "
# What a model writes must not steer the terminal: control characters but tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation with one server. `options`: fields of every request."""

    client: ChatClient
    conversation: Conversation
    options: Mapping[str, object]

    @contextlib.contextmanager
    def ask(self, text: str) -> Iterator[ReplyStream]:
        """The reply to `text`; who asks adds it to the conversation."""
        options = {**self.options, **self.conversation.effort()}
        with self.client.ask(self.conversation.messages(text), options) as stream:
            yield stream

    def answer(self, text: str) -> Reply:
        """A whole turn."""
        with self.ask(text) as stream:
            for _ in stream:
                pass
        self.conversation.add(text, stream.reply())
        return stream.reply()


def open_session(client: ChatClient, args: argparse.Namespace) -> Session:
    """A session as the flags say. Raises RequestError for a picture that cannot be sent."""
    conversation = Conversation(
        inputs=tuple(client.inputs), system=args.system or "", thinking=args.think
    )
    for name in args.image or ():
        conversation.add_image(name)
    named = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options = {name: value for name, value in named.items() if value is not None}
    return Session(client, conversation, options)


def answer_all(session: Session) -> None:
    """Everything on standard input is one question; the answer alone is printed, as it comes."""
    question = _checked(sys.stdin.buffer.read()).strip()
    if not question:
        raise RequestError("standard input holds no question", hint="echo QUESTION | emberbox chat")
    show = _visible if sys.stdout.isatty() else str
    with session.ask(question) as stream:
        for piece in stream:
            if not piece.is_reasoning:
                print(show(piece.text), end="", flush=True)
    print()
    if stream.reply().finish == "length":
        print("the answer was cut at the limit of its tokens", file=sys.stderr)


def answer_lines(session: Session) -> None:
    """Every line on standard input is a turn of one conversation and makes one line of JSON."""
    for line in sys.stdin.buffer:
        text = _checked(line).strip()
        if text:
            print(json.dumps(session.answer(text).to_dict()), flush=True)


def talk(session: Session) -> None:
    """Read, answer, until Ctrl-D or /quit. Ctrl-C stops a reply, or drops what is typed."""
    with contextlib.suppress(ImportError):  # not on every system; input() edits lines with it
        import readline  # noqa: F401
    # Where a shell started us in the background, Ctrl-C is ignored until someone asks for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    screen = _Screen(Console(highlight=False, soft_wrap=True))
    screen.note(f"{session.client.model} at {session.client.url}; /help lists the commands")
    while True:
        try:
            line = _read_line()
            if line.strip() == QUIT:
                return
            if line.startswith("/"):
                screen.note(session.conversation.obey(line))
            elif line.strip():
                _turn(session, line.strip(), screen)
        except KeyboardInterrupt:
            screen.note("\n(Ctrl-D or /quit ends the chat)")
        except EOFError:
            screen.note("")
            return
        except EmberboxError as error:
            screen.error(error)


def _turn(session: Session, text: str, screen: "_Screen") -> None:
    """One reply on the screen. An interrupt ends it on the server too; what came is kept."""
    stream: ReplyStream | None = None
    try:
        with session.ask(text) as stream:
            for piece in stream:
                screen.show(piece)
    except KeyboardInterrupt:
        pass
    finally:
        screen.end_reply()
    if stream is None:
        screen.note("stopped")
        return
    reply = stream.reply()
    session.conversation.add(text, reply)
    screen.note(reply.speed())


class _Screen:
    """Prints for a person: thoughts and notes dim, the answer plain."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: Piece | None = None

    def show(self, piece: Piece) -> None:
        """One piece of a reply; where the thought ends the answer begins on a line of its own."""
        if self._last is None and piece.is_reasoning:
            self._out("thinking: ", dim=True)
        if self._last is not None and self._last.is_reasoning != piece.is_reasoning:
            self._out("\n", dim=False)
        self._out(_visible(piece.text), dim=piece.is_reasoning)
        self._last = piece

    def end_reply(self) -> None:
        """The cursor at the beginning of a line."""
        if self._last is not None:
            self._out("\n", dim=False)
        self._last = None

    def note(self, text: str) -> None:
        """A line about the chat, not of it."""
        self._out(f"{_visible(text)}\n", dim=True)

    def error(self, error: EmberboxError) -> None:
        """What went wrong and what to do; the chat goes on."""
        self._console.print("error:", style="bold red", end=" ")
        self._out(f"{_visible(error.message)}\n", dim=False)
        if error.hint:
            self._out(f"hint: {_visible(error.hint)}\n", dim=False)

    def _out(self, text: str, *, dim: bool) -> None:
        self._console.out(text, end="", style="dim" if dim else None, highlight=False)


def _read_line() -> str:
    """What is typed, with the lines that a backslash at the end joins to it."""
    try:
        lines = [input(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(CONTINUED))
    except UnicodeDecodeError as error:
        return _checked(error.object)
    return _checked("\n".join(lines).encode("utf-8", "surrogateescape"))


def _checked(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError("the input is not UTF-8") from None


def _visible(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
