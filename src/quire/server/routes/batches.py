"""Routes of stored files, and of batches over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from quire.server.batches.lines import BATCH_ROUTES
from quire.server.batches.store import BatchStore, KeptBatch, KeptFile
from quire.server.http.body import BodyDecoder
from quire.server.http.multipart import FormPart, FormReader
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.requests.errors import RefusedError
from quire.server.requests.pooling_bodies import BatchRequest
from quire.server.routes.respond import JSON
from quire.server.routes.services import Services

__all__ = ["batches_router"]

Kept = TypeVar("Kept", KeptFile, KeptBatch)

MAX_PAGE = 100
MAX_METADATA = 16
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


_PAGE: dict[str, Any] = {
    "parameters": [
        {"name": "after", "in": "query", "schema": {"type": "string"}},
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20},
        },
    ]
}
_PURPOSE = {"name": "purpose", "in": "query", "schema": {"type": "string"}}


def batches_router(services: Services) -> APIRouter:
    """A caller sees the files and batches of its own key."""
    router = APIRouter(tags=["Batches"])
    _add_files(services, router)
    _add_batches(services, router)
    return router


def _store(services: Services) -> BatchStore:
    if services.batches is None:
        raise RefusedError(
            "This server keeps no files. Start it with --data-dir FOLDER.", status=404
        )
    return services.batches


def _add_files(services: Services, router: APIRouter) -> None:
    @router.post("/v1/files", openapi_extra=_FORM)
    async def upload_file(request: Request) -> Response:
        """Keep a file with a request in each line, for a batch."""
        form = FormReader(request.headers.get("content-type", ""), large="file")
        with _store(services).new_file(request.state.tenant) as new:

            def take(data: bytes) -> None:
                form.feed(data)
                # The last part may not be whole yet.
                if "purpose" in form.parts and next(reversed(form.parts)) == "file":
                    _check_purpose(form.parts["purpose"].text)
                if "file" in form.parts:
                    new.write(form.parts["file"].take())

            await services.bodies.read_upload(request, take)
            parts = form.end()
            _check_names(parts)
            file = _part(parts, "file")
            purpose = _part(parts, "purpose").text
            _check_purpose(purpose)
            if not new.num_bytes:
                raise RefusedError("The file is empty. Send a request in each line.", param="file")
            found = new.keep(file.filename or "file", purpose)
        return Response(encode(found), media_type=JSON)

    @router.get("/v1/files", openapi_extra={"parameters": [*_PAGE["parameters"], _PURPOSE]})
    async def list_files(request: Request) -> Response:
        """The files that are kept, newest first."""
        found = _store(services).list_files(request.state.tenant)
        if purpose := request.query_params.get("purpose"):
            found = [each for each in found if each.purpose == purpose]
        return Response(encode(_page(found, request)), media_type=JSON)

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Response:
        """Facts of a file."""
        found = _store(services).find_file(file_id, request.state.tenant)
        return Response(encode(found), media_type=JSON)

    @router.get("/v1/files/{file_id}/content")
    async def file_content(request: Request, file_id: str) -> Response:
        """The contents of a file."""
        found = _store(services).find_file(file_id, request.state.tenant)
        return FileResponse(_store(services).path(found.id), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Forget a file."""
        _store(services).delete_file(file_id, request.state.tenant)
        return Response(encode({"id": file_id, "object": "file", "deleted": True}), media_type=JSON)


def _add_batches(services: Services, router: APIRouter) -> None:
    limits = services.settings.limits
    decoder: BodyDecoder[BatchRequest] = BodyDecoder(BatchRequest, limits)

    @router.post("/v1/batches", openapi_extra=body_of(BatchRequest))
    async def create_batch(request: Request) -> Response:
        """Have the requests of a file answered with what other requests leave."""
        kept = _store(services)
        body = await decoder.decode(await services.bodies.read(request))
        _check(body, limits.max_label_chars)
        state = request.state
        found = kept.add_batch(
            body.endpoint, body.input_file_id, body.metadata, state.tenant, state.weight
        )
        return Response(encode(found), media_type=JSON)

    @router.get("/v1/batches", openapi_extra=_PAGE)
    async def list_batches(request: Request) -> Response:
        """The batches of this caller, newest first."""
        found = _store(services).list_batches(request.state.tenant)
        return Response(encode(_page(found, request)), media_type=JSON)

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        """Progress of a batch."""
        found = _store(services).find_batch(batch_id, request.state.tenant)
        return Response(encode(found), media_type=JSON)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """End a batch; what has been answered is kept."""
        found = _store(services).cancel_batch(batch_id, request.state.tenant)
        return Response(encode(found), media_type=JSON)


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
    if purpose != "batch":
        raise RefusedError(
            f"purpose is {purpose[:80]!r}. This server keeps files for batches: send 'batch'.",
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


def _page(found: list[Kept], request: Request) -> dict[str, Any]:
    """Return one page of a list, after the id `after`, with at most `limit` items."""
    after, asked = request.query_params.get("after"), request.query_params.get("limit", "20")
    is_number = len(asked) <= len(str(MAX_PAGE)) and asked.isascii() and asked.isdecimal()
    if not (is_number and 1 <= int(asked) <= MAX_PAGE):
        raise RefusedError(f"limit is {asked[:80]!r}. Send 1 to {MAX_PAGE}.", param="limit")
    if after is not None:
        ids = [each.id for each in found]
        if after not in ids:
            raise RefusedError(f"after is {after[:80]!r}, which is not there.", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: int(asked)]
    return {
        "object": "list",
        "data": [msgspec.to_builtins(each) for each in page],
        "has_more": len(page) < len(found),
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }
