"""Builds the ASGI application: the routes, the API key, request ids, and failures as answers."""

import hmac
import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberbox.server.failures import MethodNotAllowed, RouteNotFound, Unauthorized
from emberbox.server.metrics import Metrics
from emberbox.server.routes import Routes, failure_response
from emberbox.server.worker import EngineWorker
from emberbox.settings import ServeSettings

OPEN_PATHS = ("/health",)
MODEL_PATH = "/v1/models/"
REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)


def create_app(
    worker: EngineWorker,
    settings: ServeSettings,
    *,
    input_modalities: tuple[str, ...] = ("text", "image", "video"),
) -> ASGIApp:
    """The application over one worker. The caller owns the worker and closes it."""
    metrics = Metrics(worker)
    routes = Routes(worker, settings, input_modalities, metrics)
    table = (
        ("/health", routes.health, "GET"),
        ("/metrics", routes.metrics, "GET"),
        ("/v1/models", routes.models, "GET"),
        (MODEL_PATH + "{name:path}", routes.model_card, "GET"),
        ("/v1/chat/completions", routes.chat_completions, "POST"),
        ("/v1/completions", routes.completions, "POST"),
    )
    starlette = Starlette(
        routes=[
            Route(path, answering(endpoint), methods=[method]) for path, endpoint, method in table
        ],
        exception_handlers={HTTPException: _refuse_route},
    )
    # A redirect would send the client to whatever host its own Host header names.
    starlette.router.redirect_slashes = False
    app: ASGIApp = KeyGuard(starlette, settings.api_key) if settings.api_key else starlette
    return Observer(app, metrics, frozenset(path for path, _, _ in table))


def answering(
    endpoint: Callable[[Request], Awaitable[ASGIApp]],
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint with every exception turned into an answer in the wire's error shape."""

    async def answer(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception as error:
            return failure_response(error)

    # Starlette sends whatever ASGI application an endpoint returns; its types name Response alone.
    return answer  # type: ignore[return-value]


async def _refuse_route(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path or a wrong method."""
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, HTTPException) and error.status_code == 405:
        text = f"{request.method} is not allowed on {request.url.path!r}"
        hint = f"allowed: {headers.get('Allow', 'nothing')}"
        return failure_response(MethodNotAllowed(text, hint=hint), headers)
    return failure_response(RouteNotFound(f"there is no route {request.url.path!r}"), headers)


class KeyGuard:
    """Refuses every request without the key, but for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._expected):
                refusal = Unauthorized(
                    "the API key is missing or wrong",
                    hint="send the header Authorization: Bearer KEY",
                )
                await failure_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Observer:
    """Outermost: gives every answer its X-Request-Id and counts it by route and status code."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex.encode()

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
                route = self._route(scope["path"])
                self._metrics.http_requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_observed)

    def _route(self, path: str) -> str:
        """One of our own routes, or "other": a label must not grow with what clients send."""
        if path in self._paths:
            return path
        return MODEL_PATH + "{name}" if path.startswith(MODEL_PATH) else "other"
