"""How every failure looks on the wire: one table from exception types to status, type and code.

The body is the OpenAI shape, {"error": {"message", "type", "param", "code"}}; codes are strings.
Holds the exceptions that only a server can raise; knows no route.
"""

import logging
import traceback
from dataclasses import dataclass

import msgspec

from emberbox.errors import (
    CheckpointError,
    ContextLengthError,
    EmberboxError,
    EnvironmentProblem,
    MeasureError,
    NonFiniteLogits,
    OpError,
    RequestError,
    SettingsError,
)

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER = "server_error"
# Of one traceback in the log, in letters: a client must not fill the disk by repeating a request.
MAX_TRACEBACK = 8000
# Of a message and of a field's name on the wire: both may quote what the client sent.
MAX_MESSAGE = 2000
MAX_PARAM = 200


class UnsupportedParameter(RequestError):
    """A field that would change the output and that this server does not implement."""

    code = "unsupported_parameter"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    code = "model_not_found"


class InvalidJson(RequestError):
    """The body is not a JSON object in UTF-8."""

    code = "invalid_json"


class BodyTooLarge(RequestError):
    """The body exceeds the limit of the server."""

    code = "body_too_large"


class RouteNotFound(RequestError):
    """No such path."""

    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    code = "method_not_allowed"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class EngineStopped(EmberboxError):
    """The engine thread has ended; no request can be served."""


class TooManyWaiting(EmberboxError):
    """The queue of the server is full."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one exception type, and those below it, becomes. `code` None: the exception's own."""

    exception: type[EmberboxError]
    status: int
    type: str
    code: str | None


# The nearest type in an exception's ancestry decides, so the order does not matter.
RULES: tuple[Rule, ...] = (
    Rule(RequestError, 400, INVALID, None),
    Rule(ContextLengthError, 400, INVALID, None),
    Rule(UnsupportedParameter, 400, INVALID, None),
    Rule(InvalidJson, 400, INVALID, None),
    Rule(Unauthorized, 401, "authentication_error", None),
    Rule(ModelNotFound, 404, INVALID, None),
    Rule(RouteNotFound, 404, INVALID, None),
    Rule(MethodNotAllowed, 405, INVALID, None),
    Rule(BodyTooLarge, 413, INVALID, None),
    Rule(SettingsError, 500, SERVER, "settings_error"),
    Rule(CheckpointError, 500, SERVER, "checkpoint_error"),
    Rule(MeasureError, 500, SERVER, "measure_error"),
    Rule(OpError, 500, SERVER, "op_error"),
    Rule(NonFiniteLogits, 500, SERVER, "non_finite_logits"),
    Rule(EnvironmentProblem, 503, SERVER, "environment_problem"),
    Rule(EngineStopped, 503, SERVER, "engine_stopped"),
    Rule(TooManyWaiting, 503, SERVER, "server_overloaded"),
)
_BY_TYPE: dict[type, Rule] = {rule.exception: rule for rule in RULES}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object. `param` names the field at fault, such as messages[0].content."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of an error event in a stream."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure ready for the wire."""

    status: int
    body: ErrorBody

    def to_json(self) -> bytes:
        """The body as JSON bytes."""
        return msgspec.json.encode(self.body)


def to_failure(error: BaseException) -> Failure:
    """The wire form of `error`. What is not ours is a 500 that tells nothing; the log has it."""
    rule = next((_BY_TYPE[kind] for kind in type(error).__mro__ if kind in _BY_TYPE), None)
    if rule is None or not isinstance(error, EmberboxError):
        name = type(error).__name__
        log.error("unexpected %s while serving a request\n%s", name, _traceback_of(error))
        text = "the server failed on this request; its log says why"
        return Failure(500, ErrorBody(ErrorDetail(text, SERVER, None, "internal_error")))
    message = error.message if not error.hint else f"{error.message} ({error.hint})"
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError) else (rule.code or "internal_error")
    detail = ErrorDetail(_cut(message, MAX_MESSAGE), rule.type, param and param[:MAX_PARAM], code)
    return Failure(rule.status, ErrorBody(detail))


def _traceback_of(error: BaseException) -> str:
    return _cut("".join(traceback.format_exception(error)).rstrip(), MAX_TRACEBACK)


def _cut(text: str, most: int) -> str:
    """The text; of a long one the beginning and, since it names the place, more of the end."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 4], text[-(most * 3 // 4) :]
    return f"{head}\n[{len(text) - len(head) - len(tail)} letters left out]\n{tail}"
