"""The checkpoint's chat template: messages in, a prompt whose special tokens are its own out.

The template is code from the checkpoint and runs in jinja's sandbox; what messages hold is data
and can neither be run nor become a special token (`template_text`). The sandbox bounds what a
template reaches, not how long it runs or how much it writes: a template is trusted to end. Knows no
token ids.

Thinking off is done here, since the released template has no switch for it (architecture.md 9):
effort becomes `low` and the open `<think>` of the generation prompt is closed at once.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from emberbox.chat.messages import Conversation, check_messages, check_tools
from emberbox.chat.template_text import TemplateText, TokenGuard, remove_mark
from emberbox.chat.tokenizer import TOKENIZER_FILE, read_tokenizer_json, special_tokens_of
from emberbox.errors import CheckpointError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
REASONING_EFFORTS = ("low", "high", "max")

# Placeholder the template must write for each picture or clip.
PLACEHOLDERS = {"image": "<|image|>", "video": "<|video|>"}

# Not handed to templates: these make long text out of one number.
_NO_GLOBALS = ("lipsum", "cycler", "joiner")
_NO_FILTERS = ("center", "format", "indent", "wordwrap")

# Names under which the render hands the guard to the `tojson` filter.
_MARK, _GUARD = "emberbox_mark", "emberbox_guard"


class ChatTemplate:
    """Immutable once open; may be used from several threads."""

    def __init__(self, source: str, special_tokens: Collection[str], where: str) -> None:
        self._guard = TokenGuard(special_tokens)
        self._name = Path(where).name  # for clients, whom the server's folders do not concern
        # Both blank options are what templates in the wild are written for.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        for name in _NO_GLOBALS:
            del environment.globals[name]
        for name in _NO_FILTERS:
            del environment.filters[name]
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{where}: not a valid template: {error}") from error

    @classmethod
    def open(cls, folder: Path) -> "ChatTemplate":
        """Reads the template and the special tokens of a checkpoint folder.

        The template is `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json`.
        Raises CheckpointError when it is missing or cannot be compiled.
        """
        source, path = _read_source(Path(folder))
        tokenizer_path = Path(folder) / TOKENIZER_FILE
        special = special_tokens_of(read_tokenizer_json(tokenizer_path), tokenizer_path)
        return cls(source, special, str(path))

    def render(
        self,
        messages: Conversation | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,  # noqa: ANN401  (checked by name in render_text)
    ) -> str:
        """`render_text` as one string, to be read by people. Not to be tokenised: see there."""
        return self.render_text(messages, tools, add_generation_prompt, **variables).text

    def render_text(
        self,
        messages: Conversation | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> TemplateText:
        """The prompt, for `Tokenizer.encode_template`.

        reasoning_effort: low, high or max; None leaves it to the template (max). enable_thinking:
        False closes the reasoning before it begins; None is True. clear_thinking: True leaves out
        the reasoning before the last user turn; None is the template's default (keep all).
        A last assistant message with `add_generation_prompt=False` is a beginning to be continued.
        Raises RequestError for bad messages, tools or options, or when the template refuses them.
        """
        _check_options(reasoning_effort, enable_thinking, clear_thinking)
        conversation = messages if isinstance(messages, Conversation) else check_messages(messages)
        thinks = enable_thinking is not False
        variables: dict[str, Any] = {
            "messages": list(conversation.messages),
            "tools": check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": thinks,
            "reasoning_effort": reasoning_effort if thinks else "low",
            "clear_thinking": clear_thinking,
        }
        rendered, mark = self._run({k: v for k, v in variables.items() if v is not None})
        if add_generation_prompt and not thinks and rendered.endswith("<think>"):
            rendered += "</think>"
        text = self._guard.runs(rendered, mark)
        self._check_placeholders(text, conversation)
        return text

    def _run(self, variables: dict[str, Any]) -> tuple[str, str]:
        """The rendered text and the mark that protects what messages spell in it."""
        try:
            mark = self._guard.choose_mark([variables["messages"], variables.get("tools")])
            protected = dict(variables)
            protected["messages"] = [self._protect_message(m, mark) for m in variables["messages"]]
            if "tools" in variables:
                protected["tools"] = self._guard.protect_all(variables["tools"], mark)
            return self._template.render({**protected, _MARK: mark, _GUARD: self._guard}), mark
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template ({self._name}) refuses the messages: {error}",
                param="messages",
            ) from error
        except (
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise RequestError(
                f"the chat template ({self._name}) cannot render these messages: {error}",
                param="messages",
                hint="the template may need another form of message; try plain text content",
            ) from error

    def _protect_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """All that was written by others; the words that the checks fixed (roles, types) stay."""
        protected = {"role": message["role"]}
        for name, value in message.items():
            if name == "content" and isinstance(value, list):
                protected[name] = [
                    part | {k: self._guard.protect(v, mark) for k, v in part.items() if k == "text"}
                    for part in value
                ]
            elif name != "role":
                protected[name] = self._guard.protect_all(value, mark)
        return protected

    def _check_placeholders(self, text: TemplateText, conversation: Conversation) -> None:
        """A template that drops a picture, or says it cannot see, is refused by name."""
        for kind, token in PLACEHOLDERS.items():
            given = [ref.param for ref in conversation.media if ref.kind == kind]
            if given and text.count(token) != len(given):
                raise RequestError(
                    f"{given[0]}: the chat template ({self._name}) wrote {text.count(token)} "
                    f"{token} for {len(given)} {kind}(s)",
                    param=given[0],
                    hint=f"use a checkpoint whose template shows each {kind} in this role",
                )


def _check_options(
    reasoning_effort: object, enable_thinking: object, clear_thinking: object
) -> None:
    if reasoning_effort is not None and reasoning_effort not in REASONING_EFFORTS:
        raise RequestError(
            f"reasoning_effort: {reasoning_effort!r} is unknown; expected one of "
            f"{', '.join(REASONING_EFFORTS)}",
            param="reasoning_effort",
        )
    switches = {"enable_thinking": enable_thinking, "clear_thinking": clear_thinking}
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name}: {value!r} is not true or false", param=name)


def _read_source(folder: Path) -> tuple[str, Path]:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not readable as UTF-8: {error}") from error
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        source = read_tokenizer_json(config_path).get("chat_template")
        if isinstance(source, str):
            return source, config_path
    raise CheckpointError(
        f"{folder}: no chat template ({TEMPLATE_FILE}, or chat_template in tokenizer_config.json)",
        hint="copy the template of the model beside its weights",
    )


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,  # noqa: ANN401  (whatever the template hands over)
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as templates of this family expect it.

    Marks are taken out first and put back into the result: an escaped mark would be lost.
    """
    mark, guard = context[_MARK], context[_GUARD]
    text = json.dumps(
        remove_mark(value, mark),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        allow_nan=False,
    )
    protected: str = guard.protect_inside(text, mark)
    return protected


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
