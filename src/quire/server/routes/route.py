"""Routes as rows of a table, with their inputs, outputs, needs and callers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.server.generation.backend import Ready
from quire.server.http.events import EventSink, EventStream, error_event, while_connected
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import GenerationRequest
from quire.server.requests.errors import ErrorReply, RefusedError
from quire.server.requests.limits import Limits
from quire.server.routes.services import Services

__all__ = [
    "AFTER", "BYTES", "EVENTS", "JSON", "LIMIT", "TEXT", "Access", "Answer", "Call", "Deleted",
    "Needs", "Query", "Route", "page_size", "respond",
]  # fmt: skip

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
BYTES = "application/octet-stream"

MAX_PAGE = 100

Body = TypeVar("Body")
Made = TypeVar("Made")
Result = TypeVar("Result")


class Access(Enum):
    """Callers of a route. CALLERS: holders of a key, if the server has keys. ENGINE_CONTROL: the
    same, where `enable_engine_control` opens the route. PAGE: anyone, where `ui` opens it. VIEWERS:
    holders of a key, where `ui` opens it."""

    ANYONE = auto()
    CALLERS = auto()
    ENGINE_CONTROL = auto()
    PAGE = auto()
    VIEWERS = auto()


class Needs(Enum):
    """Needs of a route before it reads a body. ENGINE: one that serves. ROOM: the same, and room
    for one more request. FILES: a server that keeps files."""

    NOTHING = auto()
    ENGINE = auto()
    ROOM = auto()
    FILES = auto()


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter of a query. schema: JSON schema, with the default."""

    name: str
    schema: Mapping[str, Any]

    def of(self, request: Request) -> str | None:
        """Return what the request gives, or else the default, or None without one."""
        default = self.schema.get("default")
        return request.query_params.get(self.name, None if default is None else str(default))


AFTER = Query("after", {"type": "string"})
LIMIT = Query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20})


@dataclass(frozen=True, slots=True)
class Call(Generic[Body]):
    """One request to a route. body: decoded, None if the route takes none. data: its bytes.
    engine: None if the route needs none."""

    services: Services
    request: Request
    body: Body
    data: bytes
    engine: Ready | None

    @property
    def ready(self) -> Ready:
        """The engine that the route needs."""
        assert self.engine is not None, "the route does not say that it needs an engine"
        return self.engine

    @property
    def limits(self) -> Limits:
        return self.services.settings.limits

    @property
    def tenant(self) -> str:
        """Name of the caller's key."""
        return self.request.state.tenant

    @property
    def weight(self) -> float:
        """Share of the caller's key."""
        return self.request.state.weight

    def part(self, name: str) -> str:
        """Return a part of the path."""
        return self.request.path_params[name]

    async def attended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, which is cancelled if the client leaves first."""
        return await while_connected(self.request.receive, work)


@dataclass(frozen=True, slots=True)
class Route(Generic[Body, Made]):
    """One row. Decoding, statuses, schema, `Allow` and guards follow from it.

    handler: a function, with the name and the words that the schema shows. It returns an object to
    send as JSON, a text, or a response of its own. body: decoded from JSON. answer: None for an
    object without fixed fields. media: type of the answer; `streams` if it can also be events.
    statuses: statuses with the answer. refuses: statuses of errors beside those that follow from
    the other fields. form: schema of a body that is a form, which the handler reads. may_lack_body:
    True if no body counts as an empty object. is_listed: True if the schema has it.
    """

    method: str
    path: str
    handler: Callable[[Call[Body]], Awaitable[Made | Response]]
    body: type[Body] | None = None
    answer: type[Made] | None = None
    needs: Needs = Needs.NOTHING
    access: Access = Access.CALLERS
    query: tuple[Query, ...] = ()
    form: Mapping[str, Any] | None = None
    media: str = JSON
    streams: bool = False
    statuses: tuple[int, ...] = (200,)
    refuses: tuple[int, ...] = ()
    may_lack_body: bool = False
    is_listed: bool = True

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def words(self) -> str:
        """Description of the route, in one sentence or more."""
        return inspect.getdoc(self.handler) or ""

    @property
    def is_literal(self) -> bool:
        """True if its path has no part that varies."""
        return "{" not in self.path

    @property
    def is_hot(self) -> bool:
        """True if it is called past the application's router: routes with a body take most of the
        load."""
        return self.body is not None and self.is_literal


class Deleted(msgspec.Struct, kw_only=True):
    """Answer of routes that delete something."""

    id: str
    object: str | UnsetType = UNSET
    deleted: bool


def page_size(request: Request) -> int:
    """Return how many items of a list are asked for."""
    asked = LIMIT.of(request) or ""
    is_number = len(asked) <= len(str(MAX_PAGE)) and asked.isascii() and asked.isdecimal()
    if not (is_number and 1 <= int(asked) <= MAX_PAGE):
        raise RefusedError(f"limit is {asked[:80]!r}. Send 1 to {MAX_PAGE}.", param="limit")
    return int(asked)


class Answer(Protocol):
    """The answer to one request."""

    async def whole(self) -> bytes:
        """Return the JSON body."""
        ...

    async def stream(self, sink: EventSink, /) -> bytes:
        """Start the sink, write events, and return the last ones."""
        ...


async def respond(
    call: Call[Any],
    body: GenerationRequest,
    new_answer: Callable[[Timeline], Answer],
    fault: Callable[[ErrorReply], bytes] = error_event,
) -> Response:
    """Return an answer that is generated, in the form that the request asks for. fault: writes an
    error within a stream."""
    services, request = call.services, call.request
    if body.stream:

        async def produce(sink: EventSink) -> bytes:
            with services.recorded(request, body) as timeline:
                return await new_answer(timeline).stream(sink)

        return EventStream(produce, call.limits.sse_keep_alive_s, fault)
    with services.recorded(request, body) as timeline:
        return Response(await call.attended(new_answer(timeline).whole()), media_type=JSON)
