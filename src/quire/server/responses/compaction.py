"""POST /v1/responses/compact: replaces a conversation by a summary that the model writes.

The summary goes to the client in an opaque form. A later request brings it back, and it is read as
what it was: the answer to a question of the user's.
"""

from __future__ import annotations

import secrets

import msgspec

from quire.server.generation.sealed import seal
from quire.server.requests.errors import RefusedError
from quire.server.requests.places import Fields
from quire.server.requests.responses_bodies import CompactRequest, ResponsesRequest
from quire.server.responses.answer import Response, ResponseUsage
from quire.server.responses.conversation import SUMMARY_QUESTION

__all__ = ["Compaction", "compacted", "summary_request"]

_KEPT_ROLES = ("system", "developer")
"""Roles whose messages stay unchanged: instructions must not be retold in other words."""


class Compaction(msgspec.Struct):
    """A conversation in few items."""

    id: str
    created_at: int
    output: list[Fields]
    usage: ResponseUsage
    object: str = "response.compaction"


def summary_request(body: CompactRequest) -> ResponsesRequest:
    """Return the request that has the model write a summary. Raises RefusedError for a session."""
    if body.session_id is not None:
        raise RefusedError(
            "session_id is given, but a summary is no turn of a conversation. Send its items.",
            param="session_id",
        )
    given = body.input or []
    before = [{"role": "user", "content": given}] if isinstance(given, str) else given
    request = ResponsesRequest(
        model=body.model,
        input=[*before, {"role": "user", "content": SUMMARY_QUESTION}],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=False,
    )
    for name in CompactRequest.__struct_fields__:
        if name not in ("model", "input"):
            setattr(request, name, getattr(body, name))
    return request


def compacted(response: Response, usage: ResponseUsage, items: list[Fields]) -> Compaction:
    """Make the answer from the response to `summary_request`. items: items of the whole
    conversation, with ids. Raises RefusedError if there is no usable summary."""
    parts = [
        part["text"]
        for item in response.output
        if item["type"] == "message"
        for part in item["content"]
    ]
    if response.status != "completed" or not any(parts):
        raise RefusedError(
            "The summary did not fit behind the conversation. Send fewer items.", param="input"
        )
    kept = [
        {"status": "completed", **item}
        for item in items
        if item.get("type") == "message" and item.get("role") in _KEPT_ROLES
    ]
    name = secrets.token_hex(16)
    summary: Fields = {
        "id": f"cmp_{name}", "type": "compaction", "encrypted_content": seal("".join(parts))
    }  # fmt: skip
    return Compaction(f"resp_{name}", response.created_at, [*kept, summary], usage)
