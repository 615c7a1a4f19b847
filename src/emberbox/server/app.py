"""Builds the ASGI application: the routes, the API key, and every failure as an answer."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from emberbox.server.failures import MethodNotAllowed, RouteNotFound, Unauthorized
from emberbox.server.routes import Routes, failure_response
from emberbox.server.worker import EngineWorker
from emberbox.settings import ServeSettings

OPEN_PATHS = ("/health",)


def create_app(
    worker: EngineWorker,
    settings: ServeSettings,
    *,
    input_modalities: tuple[str, ...] = ("text", "image"),
) -> ASGIApp:
    """The application over one worker. The caller owns the worker and closes it."""
    routes = Routes(worker, settings, input_modalities)
    table = (
        ("/health", routes.health, "GET"),
        ("/v1/models", routes.models, "GET"),
        ("/v1/models/{name:path}", routes.model_card, "GET"),
        ("/v1/chat/completions", routes.chat_completions, "POST"),
    )
    starlette = Starlette(
        routes=[
            Route(path, answering(endpoint), methods=[method]) for path, endpoint, method in table
        ],
        exception_handlers={HTTPException: _refuse_route},
    )
    # A redirect would send the client to whatever host its own Host header names.
    starlette.router.redirect_slashes = False
    return KeyGuard(starlette, settings.api_key) if settings.api_key else starlette


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
