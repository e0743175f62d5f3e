"""Routes of the page: its files, which anyone may read, and what it shows, which needs a key."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from pathlib import Path
from typing import Any

from starlette.responses import Response

from quire.server.http.events import EventSink, EventStream
from quire.server.openai.answer import encode
from quire.server.routes.live import difference, snapshot
from quire.server.routes.route import EVENTS, Access, Call, Route
from quire.server.routes.services import Services

__all__ = ["FILES", "FILE_HEADERS", "FRAME_S", "MEDIA", "ROUTES", "UI_FOLDER", "record_page"]

FRAME_S = 0.25
"""Seconds between two events of a stream."""

INDEX = "index.html"

UI_FOLDER = Path(__file__).parents[1] / "ui"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = sorted(
    path.relative_to(UI_FOLDER).as_posix() for path in UI_FOLDER.rglob("*") if path.suffix in MEDIA
)
"""Names of the page's files, with their folders below `UI_FOLDER`."""

FILE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of files: browsers load nothing from elsewhere, and ask before they use a copy."""


async def to_the_page(call: Call[None]) -> Response:
    """Lead browsers to the page."""
    return Response(status_code=307, headers={"location": f"{call.services.settings.root_path}/ui"})


async def page_file(call: Call[None]) -> Response:
    """A file of the page; 304 if the browser has it."""
    root = call.services.settings.root_path
    name = call.request.scope["path"].rpartition("/ui")[2].removeprefix("/") or INDEX
    data, tag = _read(name, root)
    headers = {**FILE_HEADERS, "etag": tag}
    if tag in call.request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers={**headers, "content-type": MEDIA[Path(name).suffix]})


@functools.cache
def _read(name: str, root_path: str) -> tuple[bytes, str]:
    """Return the contents of a file, with its links below `root_path`, and their tag."""
    data = (UI_FOLDER / name).read_bytes()
    if name == INDEX:
        data = data.replace(b'"/ui', f'"{root_path}/ui'.encode())
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


async def page_snapshot(call: Call[None]) -> dict[str, Any]:
    """All that the page shows of the engine, and of the requests of the caller's key."""
    return await snapshot(call.services, call.tenant)


async def page_stream(call: Call[None]) -> Response:
    """The snapshot, and then what changes in it, as events. A slow reader gets fewer of them."""

    async def produce(sink: EventSink) -> bytes:
        shown = await snapshot(call.services, call.tenant)
        await sink.start()
        sink.write(_event(encode(shown)))
        await sink.flush()
        while not call.services.backend.is_draining:
            await asyncio.sleep(FRAME_S - time.monotonic() % FRAME_S)  # all viewers at once
            if sink.is_full:
                await sink.flush()
            now = await snapshot(call.services, call.tenant, FRAME_S / 2)
            if now is not shown:
                sink.write(_event(call.services.look.patch(shown, now)))
            shown = now
        return b""

    return EventStream(produce, call.limits.sse_keep_alive_s)


async def record_page(services: Services) -> None:
    """Record the view, for as long as there is a file for it."""
    recorder, shown = services.page_recorder, None
    while recorder.is_open:
        now = await snapshot(services, None, FRAME_S / 2)
        if now is not shown:
            recorder.add(now if shown is None else difference(shown, now))
        shown = now
        await asyncio.sleep(FRAME_S)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _file(path: str) -> Route[None, Any]:
    media = MEDIA[Path(path).suffix or ".html"]
    return Route("GET", path, page_file, media=media, access=Access.PAGE, is_listed=False)


ROUTES: tuple[Route[Any, Any], ...] = (
    Route("GET", "/", to_the_page, access=Access.PAGE, is_listed=False),
    _file("/ui"),
    *(_file(f"/ui/{name}") for name in FILES if name != INDEX),
    Route("GET", "/ui/api/snapshot", page_snapshot, access=Access.VIEWERS, is_listed=False),
    Route(
        "GET",
        "/ui/api/stream",
        page_stream,
        media=EVENTS,
        access=Access.VIEWERS,
        is_listed=False,
    ),
)
