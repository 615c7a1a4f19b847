"""Checks a conversation in OpenAI's shape and brings it into the one shape templates are given.

Every refusal is a RequestError whose `param` is the path of the field, for example
`messages[2].content[0].type`.
Loads no picture: pictures are listed as `MediaRef`, in the order their placeholders will have.
Knows no tokens and no template.

Read: roles system, developer (becomes system), user, assistant, tool; `content` as text, null (for
assistant and tool) or a list of parts; `reasoning_content` (or `reasoning`); `tool_calls`. Other
keys are ignored. Results of one round of calls are put in the order of the calls, for the prompt
shows no ids.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emberbox.chat.template_text import whole_unicode
from emberbox.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image")
VIDEO_PARTS = ("video",)
# Levels of lists and objects in tool arguments and tool schemas; what walks them is recursive.
MAX_DEPTH = 64
# Frames per second of a clip: a picture in 100 seconds to the fastest cameras.
MIN_FPS, MAX_FPS = 0.01, 1000.0

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A picture or clip as the caller gave it, not yet looked at.

    kind: "image" or "video". source: an image's data URI, bytes or PIL image; for a video a tuple
    of such frames. fps: frames per second of a video, None if unknown. param: path for errors.
    """

    kind: str
    source: object
    param: str
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages for a template, and their media in the order of the placeholders."""

    messages: tuple[Message, ...]
    media: tuple[MediaRef, ...]


def check_messages(messages: object) -> Conversation:
    """Raises RequestError naming the first field that is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages: expected a list, got {_kind(messages)}", param="messages")
    if not messages:
        raise RequestError("messages: the list is empty", param="messages")
    checked: list[tuple[Message, list[MediaRef]]] = []
    open_calls: list[str | None] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        entry, media = _check_message(message, path)
        if entry["role"] == "tool":
            _check_answers_call(entry, open_calls, path)
        else:
            open_calls = [call.get("id") for call in entry.get("tool_calls", [])]
        checked.append((entry, media))
    ordered = _results_in_call_order(checked)
    return Conversation(
        tuple(entry for entry, _ in ordered), tuple(ref for _, media in ordered for ref in media)
    )


def check_fps(fps: float, param: str) -> None:
    """Raises RequestError for a rate out of range; NaN is in no range."""
    if not MIN_FPS <= fps <= MAX_FPS:
        shown = str(fps) if isinstance(fps, float) or abs(fps) < 10**9 else "an integer beyond that"
        raise RequestError(
            f"{param}: expected {MIN_FPS} to {MAX_FPS:.0f} frames per second, got {shown}",
            param=param,
        )


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Function tools, wrapped (`{"type": "function", "function": …}`) or bare; none is None."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools: expected a list, got {_kind(tools)}", param="tools")
    return [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def _check_tool(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{path}: expected an object, got {_kind(tool)}", param=path)
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{path}.type: {kind!r} is not supported; expected 'function'", param=f"{path}.type"
        )
    inner = f"{path}.function" if "function" in tool else path
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise RequestError(f"{inner}: expected an object, got {_kind(function)}", param=inner)
    _required_text(function, "name", inner)
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise RequestError(f"{inner}.parameters: expected an object", param=f"{inner}.parameters")
    _check_json(tool, path)
    return dict(tool)


def _check_message(message: object, path: str) -> tuple[Message, list[MediaRef]]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path}: expected an object, got {_kind(message)}", param=path)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{path}.role: {role!r} is unknown; expected one of {', '.join(ROLES)}",
            param=f"{path}.role",
        )
    entry: Message = {"role": "system" if role == "developer" else role}
    may_be_null = role in ("assistant", "tool")
    entry["content"], media = _check_content(message.get("content"), f"{path}.content", may_be_null)
    if role == "assistant":
        entry |= _check_assistant(message, path)
    elif message.get("tool_calls"):
        raise RequestError(
            f"{path}.tool_calls: only an assistant message may call tools",
            param=f"{path}.tool_calls",
        )
    if role == "tool" and message.get("tool_call_id") is not None:
        entry["tool_call_id"] = _required_text(message, "tool_call_id", path)
    return entry, media


def _check_content(content: object, path: str, may_be_null: bool) -> tuple[Any, list[MediaRef]]:
    """Text stays text; a list without pictures becomes text, one with pictures stays a list."""
    if isinstance(content, str):
        return whole_unicode(content), []
    if content is None:
        if may_be_null:
            return "", []
        raise RequestError(f"{path}: null, expected text or a list of parts", param=path)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{path}: expected text or a list of parts, got {_kind(content)}", param=path
        )
    parts: list[dict[str, str]] = []
    media: list[MediaRef] = []
    for index, part in enumerate(content):
        checked = _check_part(part, f"{path}[{index}]")
        if isinstance(checked, MediaRef):
            media.append(checked)
            parts.append({"type": checked.kind})
        else:
            parts.append({"type": "text", "text": checked})
    if not media:
        return "".join(part["text"] for part in parts), []
    return parts, media


def _check_part(part: object, path: str) -> str | MediaRef:
    if not isinstance(part, Mapping):
        raise RequestError(f"{path}: expected an object, got {_kind(part)}", param=path)
    kind = part.get("type")
    if kind in TEXT_PARTS:
        return _required_text(part, "text", path, may_be_empty=True)
    if kind in ("image_url", "input_image"):
        return _image_address(part, path)
    if kind == "image":
        if part.get("image") is None:
            raise RequestError(f"{path}.image: missing", param=f"{path}.image")
        return MediaRef("image", part["image"], f"{path}.image")
    if kind in VIDEO_PARTS:
        return _video(part, path)
    known = ", ".join(TEXT_PARTS + IMAGE_PARTS + VIDEO_PARTS)
    raise RequestError(
        f"{path}.type: {kind!r} is not supported; expected one of {known}", param=f"{path}.type"
    )


def _image_address(part: Mapping[str, Any], path: str) -> MediaRef:
    """`image_url` as an object with `url` (chat completions) or as text (responses)."""
    where, address = f"{path}.image_url", part.get("image_url")
    if isinstance(address, Mapping):
        where, address = f"{where}.url", address.get("url")
    if not isinstance(address, str):
        raise RequestError(f"{where}: expected a data: URI, got {_kind(address)}", param=where)
    return MediaRef("image", address, where)


def _video(part: Mapping[str, Any], path: str) -> MediaRef:
    """`video` holds the frames, each like an image; `fps` is their rate."""
    frames, fps = part.get("video"), part.get("fps")
    if not isinstance(frames, Sequence) or isinstance(frames, str | bytes):
        raise RequestError(
            f"{path}.video: expected a list of frames, got {_kind(frames)}", param=f"{path}.video"
        )
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float)):
        raise RequestError(f"{path}.fps: expected a number, got {_kind(fps)}", param=f"{path}.fps")
    if fps is not None:
        check_fps(fps, f"{path}.fps")
    return MediaRef("video", tuple(frames), f"{path}.video", fps=fps)


def _check_assistant(message: Mapping[str, Any], path: str) -> Message:
    found: Message = {}
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(
                f"{path}.{name}: expected text, got {_kind(value)}", param=f"{path}.{name}"
            )
        if value and "reasoning_content" not in found:
            found["reasoning_content"] = whole_unicode(value)
    if message.get("function_call") is not None:
        raise RequestError(
            f"{path}.function_call: not supported; use tool_calls", param=f"{path}.function_call"
        )
    calls = message.get("tool_calls")
    if calls is None:
        return found
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(
            f"{path}.tool_calls: expected a list, got {_kind(calls)}", param=f"{path}.tool_calls"
        )
    checked = [_check_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found | ({"tool_calls": checked} if checked else {})


def _check_call(call: object, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{path}: expected an object, got {_kind(call)}", param=path)
    if call.get("type", "function") != "function":
        raise RequestError(
            f"{path}.type: {call['type']!r} is not supported; expected 'function'",
            param=f"{path}.type",
        )
    function = call.get("function")
    where = f"{path}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}: expected an object, got {_kind(function)}", param=where)
    name = _required_text(function, "name", where)
    arguments = _parse_arguments(function.get("arguments"), f"{where}.arguments")
    checked: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if call.get("id") is not None:
        checked["id"] = _required_text(call, "id", path)
    return checked


def _parse_arguments(arguments: object, path: str) -> dict[str, Any]:
    """Arguments as an object, or as the JSON text of one; none or empty text means no arguments."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{path}: not JSON ({error}); expected the text of a JSON object", param=path
            ) from error
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise RequestError(f"{path}: expected a JSON object, got {_kind(arguments)}", param=path)
    _check_json(arguments, path)
    return dict(arguments)


def _check_json(value: object, path: str, depth: int = 1) -> None:
    """Refuses what nests deeper than `MAX_DEPTH` (a cycle does) and numbers JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{path}: holds a number that is not finite", param=path)
    if not isinstance(value, Mapping | list | tuple):
        return
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{path}: nests more than {MAX_DEPTH} levels deep", param=path, hint="flatten it"
        )
    for item in value.values() if isinstance(value, Mapping) else value:
        _check_json(item, path, depth + 1)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


def _check_answers_call(entry: Message, open_calls: Sequence[str | None], path: str) -> None:
    if not open_calls:
        raise RequestError(
            f"{path}.role: a tool message must follow an assistant message with tool_calls",
            param=f"{path}.role",
        )
    call_id = entry.get("tool_call_id")
    if call_id is not None and any(open_calls) and call_id not in open_calls:
        raise RequestError(
            f"{path}.tool_call_id: {call_id!r} is none of the calls before it "
            f"({', '.join(str(known) for known in open_calls)})",
            param=f"{path}.tool_call_id",
        )


def _results_in_call_order(
    checked: list[tuple[Message, list[MediaRef]]],
) -> list[tuple[Message, list[MediaRef]]]:
    """Each run of tool messages sorted by the place of its call; without ids the order stays."""
    ordered: list[tuple[Message, list[MediaRef]]] = []
    places: dict[str, int] = {}
    run: list[tuple[Message, list[MediaRef]]] = []
    for entry, media in checked:
        if entry["role"] == "tool":
            run.append((entry, media))
            continue
        ordered += sorted(run, key=lambda item: places.get(item[0].get("tool_call_id", ""), 0))
        run = []
        calls = entry.get("tool_calls", [])
        places = {call["id"]: place for place, call in enumerate(calls) if "id" in call}
        ordered.append((entry, media))
    return ordered + sorted(run, key=lambda item: places.get(item[0].get("tool_call_id", ""), 0))


def _required_text(
    holder: Mapping[str, Any], name: str, path: str, *, may_be_empty: bool = False
) -> str:
    value = holder.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        found = "empty text" if value == "" else _kind(value)
        raise RequestError(f"{path}.{name}: expected text, got {found}", param=f"{path}.{name}")
    return whole_unicode(value)


def _kind(value: object) -> str:
    """The JSON word for a value's type."""
    names = {type(None): "null", bool: "true or false", str: "text", int: "a number"}
    names |= {float: "a number", list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
