"""Routes of stored files, and of batches over them.

A caller sees the files and batches of its own key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import FileResponse, Response

from quire.server.batches.lines import BATCH_ROUTES
from quire.server.batches.store import BATCH_PURPOSE, KeptBatch, KeptFile
from quire.server.http.multipart import FormPart, FormReader
from quire.server.requests.errors import RefusedError
from quire.server.requests.pooling_bodies import BatchRequest
from quire.server.routes.route import (
    AFTER,
    BYTES,
    LIMIT,
    Call,
    Deleted,
    Needs,
    Query,
    Route,
    page_size,
)

__all__ = ["MAX_METADATA", "ROUTES"]

Kept = TypeVar("Kept", KeptFile, KeptBatch)

MAX_METADATA = 16
_PURPOSES = (BATCH_PURPOSE, "vision", "user_data")
"""Uses of files: requests in lines, and images, which clients name by either of the others."""

_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(_PURPOSES)},
    },
}
_PURPOSE = Query("purpose", {"type": "string"})


class Page(msgspec.Struct, Generic[Kept], kw_only=True):
    """One page of a list."""

    object: str = "list"
    data: list[Kept]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def upload_file(call: Call[None]) -> KeptFile:
    """Keep a file: a request in each line, for a batch, or an image."""
    form = FormReader(call.request.headers.get("content-type", ""), large="file")
    with call.services.files().new_file(call.tenant) as new:

        def take(data: bytes) -> None:
            form.feed(data)
            # The last part may not be whole yet.
            if "purpose" in form.parts and next(reversed(form.parts)) == "file":
                _check_purpose(form.parts["purpose"].text)
            if "file" in form.parts:
                new.write(form.parts["file"].take())

        await call.services.bodies.read_upload(call.request, take)
        parts = form.end()
        _check_names(parts)
        file = _part(parts, "file")
        purpose = _part(parts, "purpose").text
        _check_purpose(purpose)
        if not new.num_bytes:
            raise RefusedError("The file is empty. Send one with contents.", param="file")
        return new.keep(file.filename or "file", purpose)


async def list_files(call: Call[None]) -> Page[KeptFile]:
    """The files that are kept, newest first."""
    found = call.services.files().list_files(call.tenant)
    if purpose := _PURPOSE.of(call.request):
        found = [each for each in found if each.purpose == purpose]
    return _page(found, call)


async def retrieve_file(call: Call[None]) -> KeptFile:
    """Facts of a file."""
    return call.services.files().find_file(call.part("file_id"), call.tenant)


async def file_content(call: Call[None]) -> Response:
    """The contents of a file."""
    files = call.services.files()
    found = files.find_file(call.part("file_id"), call.tenant)
    return FileResponse(files.path(found.id), media_type=BYTES)


async def delete_file(call: Call[None]) -> Deleted:
    """Forget a file."""
    file_id = call.part("file_id")
    call.services.files().delete_file(file_id, call.tenant)
    return Deleted(id=file_id, object="file", deleted=True)


async def create_batch(call: Call[BatchRequest]) -> KeptBatch:
    """Have the requests of a file answered with what other requests leave."""
    body = call.body
    _check(body, call.limits.max_label_chars)
    return call.services.files().add_batch(
        body.endpoint, body.input_file_id, body.metadata, call.tenant, call.weight
    )


async def list_batches(call: Call[None]) -> Page[KeptBatch]:
    """The batches of this caller, newest first."""
    return _page(call.services.files().list_batches(call.tenant), call)


async def retrieve_batch(call: Call[None]) -> KeptBatch:
    """Progress of a batch."""
    return call.services.files().find_batch(call.part("batch_id"), call.tenant)


async def cancel_batch(call: Call[None]) -> KeptBatch:
    """End a batch; what has been answered is kept."""
    return call.services.files().cancel_batch(call.part("batch_id"), call.tenant)


def _check_names(parts: Iterable[str]) -> None:
    """Refuse fields without an effect. A file is kept until it is deleted."""
    for name in parts:
        if name not in ("file", "purpose"):
            raise RefusedError(
                f"The form has a field {name[:80]!r}, which this server does not know. Leave it "
                "out: files are kept until they are deleted.",
                param=name[:80],
            )


def _part(parts: dict[str, FormPart], name: str) -> FormPart:
    if name not in parts:
        raise RefusedError(f"The form has no field {name!r}. Send it.", param=name)
    return parts[name]


def _check_purpose(purpose: str) -> None:
    if purpose not in _PURPOSES:
        raise RefusedError(
            f"purpose is {purpose[:80]!r}. This server keeps files for batches, and images: send "
            f"one of {', '.join(_PURPOSES)}.",
            param="purpose",
        )


def _check(body: BatchRequest, max_label_chars: int) -> None:
    if body.endpoint not in BATCH_ROUTES:
        raise RefusedError(
            f"endpoint is {body.endpoint[:80]!r}. Use one of {', '.join(BATCH_ROUTES)}.",
            param="endpoint",
        )
    if body.completion_window not in (None, "24h"):
        raise RefusedError(
            f"completion_window is {body.completion_window[:80]!r}. Send '24h'.",
            param="completion_window",
        )
    metadata = body.metadata or {}
    longest = max((len(part) for pair in metadata.items() for part in pair), default=0)
    if len(metadata) > MAX_METADATA or longest > 4 * max_label_chars:
        raise RefusedError(
            f"metadata has {len(metadata)} entries of up to {longest} characters, but may have "
            f"{MAX_METADATA} of {4 * max_label_chars}.",
            param="metadata",
        )


def _page(found: list[Kept], call: Call[None]) -> Page[Kept]:
    """Return one page of a list, after the id `after`, with at most `limit` items."""
    after, size = AFTER.of(call.request), page_size(call.request)
    if after is not None:
        ids = [each.id for each in found]
        if after not in ids:
            raise RefusedError(f"after is {after[:80]!r}, which is not there.", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[:size]
    return Page(
        data=page,
        has_more=len(page) < len(found),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"

ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        "POST",
        "/v1/files",
        upload_file,
        answer=KeptFile,
        needs=Needs.FILES,
        form=_FORM,
        refuses=(507,),
    ),
    Route(
        "GET",
        "/v1/files",
        list_files,
        answer=Page[KeptFile],
        needs=Needs.FILES,
        query=(AFTER, LIMIT, _PURPOSE),
        refuses=(400,),
    ),
    Route("GET", _FILE, retrieve_file, answer=KeptFile, needs=Needs.FILES, refuses=(400,)),
    Route("GET", f"{_FILE}/content", file_content, needs=Needs.FILES, media=BYTES, refuses=(400,)),
    Route("DELETE", _FILE, delete_file, answer=Deleted, needs=Needs.FILES, refuses=(400,)),
    Route(
        "POST",
        "/v1/batches",
        create_batch,
        BatchRequest,
        KeptBatch,
        needs=Needs.FILES,
        refuses=(507,),
    ),
    Route(
        "GET",
        "/v1/batches",
        list_batches,
        answer=Page[KeptBatch],
        needs=Needs.FILES,
        query=(AFTER, LIMIT),
        refuses=(400,),
    ),
    Route("GET", _BATCH, retrieve_batch, answer=KeptBatch, needs=Needs.FILES, refuses=(400,)),
    Route(
        "POST",
        f"{_BATCH}/cancel",
        cancel_batch,
        answer=KeptBatch,
        needs=Needs.FILES,
        refuses=(400, 507),
    ),
)
