"""The Responses API over a WebSocket (Open Responses of 2026-04-24): one response after the other,
each as a request that the server makes of itself, whose events are messages.

What is not stored can be gone on from on its own connection, as long as it is the last.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.body import BytesInFlight
from quire.server.http.body_shape import check_shape_by_turns
from quire.server.http.gate import CALLER, InternalCaller
from quire.server.http.websocket import WebSocket
from quire.server.requests.errors import ErrorReply, RefusedError
from quire.server.requests.limits import Limits
from quire.server.requests.places import Fields
from quire.server.responses.store import StoredResponse

__all__ = ["LOCAL_RESPONSES", "LocalResponses", "LocalStore", "SocketResponse"]

LOCAL_RESPONSES = "quire.local_responses"
"""Key of the `LocalResponses` in the scope of a request that came over a WebSocket."""

MAX_AGE_S = 3600.0
"""Age at which a connection ends, when its last response is complete."""

_PATH = "/v1/responses"
_MAX_SHOWN = 200
_FAILED = ("response.failed", "error")
_OF_SOCKETS = ("type", "background", "stream_options")
_CODES = {
    400: "invalid_request", 401: "invalid_api_key", 403: "permission_denied", 404: "not_found",
    413: "request_too_large", 429: "rate_limit_exceeded", 503: "server_overloaded",
}  # fmt: skip


class _Head(msgspec.Struct):
    """Fields of a message that the connection itself reads."""

    type: Literal["response.create"]
    background: bool | None = None
    previous_response_id: str | None = None


class LocalResponses:
    """The last response of one connection, if it is kept nowhere else."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: bound of a conversation; a longer one is not kept."""
        self._max_bytes = max_bytes
        self._items: list[Fields] = []
        self._last: StoredResponse | None = None

    def keep(self, response: StoredResponse, items: list[Fields]) -> None:
        """Keep a response in place of the one before it. items: items of the conversation up to its
        output."""
        kept = [*items, *response.body["output"]]
        is_short = len(msgspec.json.encode(kept)) <= self._max_bytes
        self._last, self._items = (response, kept) if is_short else (None, [])

    def conversation(self, response_id: str) -> tuple[list[Fields], StoredResponse] | None:
        """Return all items up to the end of a response, and the response; None if it is not
        here."""
        last = self._last
        return None if last is None or last.id != response_id else (self._items, last)

    def forget(self, response_id: object) -> None:
        """Forget a response if it is here: to go on from it has failed."""
        if self._last is not None and self._last.id == response_id:
            self._last, self._items = None, []


class LocalStore:
    """A `KeepsResponses` for one response, of which nothing else is stored."""

    def __init__(self, local: LocalResponses, items: list[Fields]) -> None:
        """items: items of the conversation up to its output."""
        self._local = local
        self._items = items

    def put(self, response: StoredResponse, tenant: str) -> None:  # noqa: ARG002  one's own
        """Keep it for the connection, unless it has failed."""
        if response.body["status"] != "failed":
            self._local.keep(response, self._items)

    def is_wanted(self, response_id: str) -> bool:  # noqa: ARG002  there is no other front
        """It always is."""
        return True


class SocketResponse(Response):
    """Serves a WebSocket until the client leaves."""

    def __init__(
        self, app: ASGIApp, socket: WebSocket, limits: Limits, in_flight: BytesInFlight
    ) -> None:
        """app: answers requests. in_flight: counts the bytes held of messages."""
        super().__init__()
        self._app = app
        self._socket = socket
        self._limits = limits
        self._in_flight = in_flight
        self._local = LocalResponses(limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        state = scope["state"]
        caller = InternalCaller(state["tenant"], state["weight"], is_spare=False)
        await self._socket.accept(send, self._in_flight)
        end = time.monotonic() + MAX_AGE_S
        pinging = asyncio.create_task(self._socket.keep_alive(self._limits.sse_keep_alive_s))
        try:
            while (message := await self._next_message(end)) is not None:
                await self._serve(message, caller)
        finally:
            pinging.cancel()
            self._socket.close()

    async def _next_message(self, end: float) -> bytes | None:
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                return await self._socket.receive()
        except TimeoutError:
            await self._refuse(
                400,
                f"A connection lasts {MAX_AGE_S:.0f} s. Open a new one, and send the whole "
                "conversation, or go on from a stored response.",
                code="websocket_connection_limit_reached",
            )
            return None

    async def _serve(self, message: bytes, caller: InternalCaller) -> None:
        """Answer one message."""
        await asyncio.sleep(0)  # for other tasks, however fast this client is refused
        try:
            await check_shape_by_turns(message, self._limits)
            fields = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
            head = msgspec.json.decode(message, type=_Head)
        except RefusedError as error:
            await self._refuse(error.status, str(error), error.param)
            return
        except (msgspec.DecodeError, RecursionError) as error:
            why = str(error)[:_MAX_SHOWN]
            await self._refuse(400, f'{why}. Send a JSON object with the type "response.create".')
            return
        if head.background:
            await self._refuse(400, "background is not offered on a WebSocket.", "background")
            return
        body = {name: value for name, value in fields.items() if name not in _OF_SOCKETS}
        turn = _Turn(self._socket, msgspec.json.encode({**body, "stream": True}))
        await self._app(self._scope(len(turn.body), caller), turn.receive, turn)
        if turn.status != 200:
            reply = turn.reply
            await self._refuse(turn.status, reply["message"], reply.get("param"))
        if turn.has_failed:
            self._local.forget(head.previous_response_id)

    def _scope(self, num_bytes: int, caller: InternalCaller) -> Scope:
        return {
            CALLER: caller,
            LOCAL_RESPONSES: self._local,
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": _PATH,
            "raw_path": _PATH.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(num_bytes).encode()),
            ],
            "client": None,
            "server": None,
        }

    async def _refuse(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        """Send the event of an error that ends no connection."""
        if code is None and param == "previous_response_id" and status == 404:
            status, code = 400, "previous_response_not_found"
        error: Fields = {
            **msgspec.json.decode(ErrorReply(status, message, param).body)["error"],
            "code": code or _CODES.get(status, "server_error"),
        }
        event = {"type": "error", "sequence_number": 0, "status": status, "error": error}
        await self._socket.send(msgspec.json.encode(event))


class _Turn:
    """Answer to one message: its events go to the socket. body: body of the request. has_failed:
    it ended without a response, or with a failed one."""

    def __init__(self, socket: WebSocket, body: bytes) -> None:
        self._socket = socket
        self._held = b""
        self._is_sent = False
        self.body = body
        self.status = 0
        self.has_failed = True

    @property
    def reply(self) -> Fields:
        """The error of an answer that is no stream."""
        try:
            return msgspec.json.decode(self._held)["error"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return {"message": "The server has failed. Its log says why."}

    async def receive(self) -> Message:
        """The body, and then that the client has left."""
        if self._is_sent:
            await self._socket.lost.wait()
            return {"type": "http.disconnect"}
        self._is_sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def __call__(self, message: Message) -> None:
        """Take a part of the answer, as `Send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._held += message.get("body", b"")
            if self.status == 200:
                await self._pass_on()

    async def _pass_on(self) -> None:
        *blocks, self._held = self._held.split(b"\n\n")
        for block in blocks:
            name, _, data = block.partition(b"\ndata: ")
            if name.startswith(b"event: "):  # no comment, and not [DONE]
                self.has_failed = name.removeprefix(b"event: ").decode() in _FAILED
                await self._socket.send(data)
