"""Sends requests to the application without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from quire.server.http.gate import CALLER, InternalCaller

__all__ = ["Called", "call"]


@dataclass(slots=True)
class Called:
    """An answer of the application."""

    status: int = 0
    request_id: str = ""
    body: bytes = b""


async def call(
    app: ASGIApp, path: str, body: bytes, caller: InternalCaller | None = None
) -> Called:
    """Post JSON to a route, and return its whole answer. Cancelling this call ends the request.
    caller: the identity behind the gate; None to pass the gate like any client."""
    scope: Scope = {
        CALLER: caller,
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    found = Called()
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # this client never leaves
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.status = message["status"]
            headers = dict(message.get("headers", ()))
            found.request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            found.body += message.get("body", b"")

    await app(scope, receive, send)
    return found
