"""A conversation and the commands that change it. Knows no server and no terminal.

A command is a line that begins with a slash. Each gives the text to show; what cannot be done is a
RequestError and changes nothing.
"""

import base64
import io
import stat
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from emberbox.chat.decode_image import MAX_FILE_BYTES, to_rgb
from emberbox.cli.chat_client import Reply
from emberbox.errors import RequestError

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation; system text and thinking stay",
    "/think on|off|low|high|max": "whether and how much the model thinks first",
    "/system TEXT": "what the model is told before all; no TEXT takes it away",
    "/image FILE": "send a picture with the next message",
    "/save FILE": "write the conversation into a new file",
    "/quit": "end; so does Ctrl-D",
}
HELP = "\n".join(f"{name:<28}{meaning}" for name, meaning in COMMANDS.items()) + (
    "\nA line that ends with \\ goes on in the next. Ctrl-C stops a reply."
)
# What /think says -> the field reasoning_effort; None leaves it to the model's template.
EFFORTS = {"on": None, "off": "none", "low": "low", "high": "high", "max": "max"}

Message = dict[str, object]


@dataclass(slots=True)
class Conversation:
    """What was said, and how to ask next."""

    inputs: tuple[str, ...] = ("text", "image")
    system: str = ""
    thinking: str = "on"
    turns: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URIs that wait for the next message

    def messages(self, text: str) -> list[Message]:
        """All messages of the next request, the last one `text` with the waiting pictures."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, self._next(text)]

    def effort(self) -> dict[str, object]:
        """The field of the request that says how much to think."""
        effort = EFFORTS[self.thinking]
        return {} if effort is None else {"reasoning_effort": effort}

    def add(self, text: str, reply: Reply) -> None:
        """Take note of a turn. One that was stopped before its text began is taken back."""
        if not reply.content and reply.finish is None:
            return
        answer: Message = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            answer["reasoning_content"] = reply.reasoning
        self.turns += [self._next(text), answer]
        self.images.clear()

    def obey(self, line: str) -> str:
        """Carry out a command other than /quit; the text to show. Raises RequestError."""
        name, _, value = line.strip().partition(" ")
        value = value.strip()
        if name == "/help":
            return HELP
        if name == "/reset":
            self.turns.clear()
            self.images.clear()
            return "forgotten"
        if name == "/think":
            return self.think(value)
        if name == "/system":
            self.system = value
            return "the system text is set" if value else "there is no system text now"
        if name == "/image":
            return self.add_image(value)
        if name == "/save":
            return self.save(value)
        raise RequestError(
            f"{name} is not a command",
            hint="/help lists them; a blank before the slash sends the line as a message",
        )

    def think(self, how: str) -> str:
        """Set how much to think."""
        if not how:
            return f"thinking is {self.thinking}"
        if how not in EFFORTS:
            raise RequestError(f"/think: {how!r} is not known", hint=f"one of {', '.join(EFFORTS)}")
        self.thinking = how
        return f"thinking is {how}"

    def add_image(self, name: str) -> str:
        """Read a picture to see that it is one; it goes with the next message."""
        if "image" not in self.inputs:
            raise RequestError("this model takes no pictures")
        if not name:
            raise RequestError("/image: name a file")
        path = Path(name).expanduser()
        data = _read(path)
        image = to_rgb(data, param=str(path))
        self.images.append(_data_uri(data))
        return f"{path} ({image.width} x {image.height}) goes with the next message"

    def save(self, name: str) -> str:
        """Write everything as text into a file that does not exist yet."""
        if not name:
            raise RequestError("/save: name a file")
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self.transcript())
        except FileExistsError:
            raise RequestError(f"{path}: exists already", hint="choose another name") from None
        except OSError as error:
            raise RequestError(f"{path}: cannot be written: {error.strerror}") from None
        return f"{len(self.turns) // 2} turns written to {path}"

    def transcript(self) -> str:
        """The conversation as Markdown; pictures as a note."""
        blocks = [f"## system\n\n{self.system}"] if self.system else []
        for turn in self.turns:
            if "reasoning_content" in turn:
                blocks.append(f"## {turn['role']}, thinking\n\n{turn['reasoning_content']}")
            blocks.append(f"## {turn['role']}\n\n{_text_of(turn)}")
        return "\n\n".join(blocks) + "\n"

    def _next(self, text: str) -> Message:
        if not self.images:
            return {"role": "user", "content": text}
        parts: list[Message] = [
            {"type": "image_url", "image_url": {"url": uri}} for uri in self.images
        ]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _text_of(turn: Message) -> str:
    content = turn["content"]
    if not isinstance(content, list):
        return str(content)
    return "\n\n".join(part.get("text", "(a picture)") for part in content)


def _data_uri(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as image:
        kind = image.get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _read(path: Path) -> bytes:
    """The bytes of a picture's file. Raises RequestError for what is no file, or too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(f"{path}: is not a file")
        if status.st_size > MAX_FILE_BYTES:
            raise RequestError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path}: cannot be read: {reason}") from None
