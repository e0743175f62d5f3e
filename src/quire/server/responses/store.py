"""Responses that the server keeps, so that a later request can continue from them.

A call takes some hundred microseconds, so it is made in the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire.server.requests.bounded_store import BoundedStore, BoundedTable
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.requests.places import Fields

__all__ = ["KeepsResponses", "ResponseStore", "StoredResponse"]

_UNFINISHED = ("queued", "in_progress")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used_s REAL NOT NULL,
    alive_s REAL NOT NULL, num_bytes INTEGER NOT NULL, num_item_bytes INTEGER NOT NULL,
    status TEXT NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL, token_ids BLOB
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (used_s);
"""
_TABLE = BoundedTable("responses", _SCHEMA, order="used_s", last=f"status IN {_UNFINISHED}")
_CHAIN = """
WITH RECURSIVE chain (previous, size) AS (
    SELECT previous, num_item_bytes FROM responses WHERE id = ? AND tenant = ?
    UNION ALL
    SELECT each.previous, each.num_item_bytes FROM responses AS each, chain
    WHERE each.id = chain.previous AND each.tenant = ?
) SELECT sum(size) FROM chain
"""
LOST_S = 30.0
"""Seconds without a sign of life after which the front that makes a response counts as ended."""
_LOST = "The process that made the response has ended. Send the request again."


class StoredResponse(msgspec.Struct):
    """body: response sent to the client. input: the items of its request, with ids. token_ids: ids
    of its prompt and output, if known. previous: id of the response before it."""

    id: str
    previous: str | None
    body: Fields
    input: list[Fields]
    token_ids: list[int] | None = None

    @property
    def is_unfinished(self) -> bool:
        return self.body["status"] in _UNFINISHED


class _Output(msgspec.Struct):
    """Output of a response; other fields are skipped."""

    output: list[Fields]


class KeepsResponses(Protocol):
    """Takes responses while they are made, and when they are complete."""

    def put(self, response: StoredResponse, tenant: str) -> None:
        """Keep a response, in place of what it was before."""
        ...

    def is_wanted(self, response_id: str) -> bool:
        """Return whether a response that is being made is still to be made."""
        ...


class ResponseStore(BoundedStore):
    """Bounded by number, bytes and age. The caller with the most loses its least recently used
    response first, and responses in progress last. Each caller's key sees its own alone."""

    def __init__(
        self, limits: Limits, path: Path | None, clock: Callable[[], float] = time.time
    ) -> None:
        """path: see `BoundedStore`."""
        super().__init__(
            path,
            clock,
            _TABLE,
            max_rows=limits.max_stored_responses,
            max_bytes=limits.max_stored_bytes,
        )
        self._limits = limits

    def put(self, response: StoredResponse, tenant: str) -> None:
        """Keep a response, or replace its earlier state."""
        body, items = msgspec.json.encode(response.body), msgspec.json.encode(response.input)
        tokens = None if response.token_ids is None else msgspec.msgpack.encode(response.token_ids)
        size = len(body) + len(items) + len(tokens or b"")
        item_size = len(items) + len(msgspec.json.encode(response.body["output"]))
        now = self._clock()
        self._database.execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                response.id, tenant, response.previous, now, now, size, item_size,
                response.body["status"], body, items, tokens,
            ),
        )  # fmt: skip
        self._database.execute(
            "DELETE FROM responses WHERE used_s < ?", (now - self._limits.stored_response_s,)
        )
        self._make_room()

    def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response, which counts as a use. One in progress whose front is gone
        is returned as failed. Raises RefusedError 404 if there is none."""
        columns = "previous, body, input, token_ids, alive_s"
        previous, encoded, items, tokens, alive_s = self._use(columns, response_id, tenant)
        tokens = None if tokens is None else msgspec.msgpack.decode(tokens, type=list[int])
        body: Any = msgspec.json.decode(encoded)
        found = StoredResponse(response_id, previous, body, msgspec.json.decode(items), tokens)
        if found.is_unfinished and self._clock() - alive_s > LOST_S:
            body["status"] = "failed"
            body["error"] = {"code": "server_error", "message": _LOST}
        return found

    def _use(self, columns: str, response_id: str, tenant: str) -> tuple[Any, ...]:
        """Return columns of a response, which counts as a use. Raises RefusedError 404 if there is
        none."""
        now = self._clock()
        row = self._database.execute(
            "UPDATE responses SET used_s = ? WHERE id = ? AND tenant = ? AND used_s >= ? "
            f"RETURNING {columns}",
            (now, response_id, tenant, now - self._limits.stored_response_s),
        ).fetchone()
        if row is None:
            raise _missing(response_id)
        return row

    def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response. Raises RefusedError 404 if there is none."""
        found = self._database.execute(
            "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING id", (response_id, tenant)
        ).fetchone()
        if found is None:
            raise _missing(response_id)

    def is_wanted(self, response_id: str) -> bool:
        """Return True if a response in progress is still wanted, neither deleted nor cancelled by
        any front. The call is also the sign of life of the front that makes it."""
        row = self._database.execute(
            "UPDATE responses SET alive_s = ? WHERE id = ? AND status IN (?, ?) RETURNING id",
            (self._clock(), response_id, *_UNFINISHED),
        ).fetchone()
        return row is not None

    def conversation(self, response_id: str, tenant: str) -> tuple[list[Fields], StoredResponse]:
        """Return all items up to the end of a response, and the response. Raises RefusedError if
        some of them are gone, together they are too long, or the response is not complete."""
        last = self.find(response_id, tenant)
        if last.is_unfinished:
            raise RefusedError(
                f"previous_response_id {response_id[:80]!r} is {last.body['status']}. Wait until "
                "it is complete.",
                param="previous_response_id",
            )
        self._check_length(response_id, tenant)
        turns, before = [[*last.input, *last.body["output"]]], last.previous
        while before is not None:
            before, items = self._turn(before, tenant)
            turns.append(items)
        return [item for turn in reversed(turns) for item in turn], last

    def _check_length(self, response_id: str, tenant: str) -> None:
        """Raise RefusedError for a conversation that no request could bring."""
        (size,) = self._database.execute(_CHAIN, (response_id, tenant, tenant)).fetchone()
        most = self._limits.max_body_bytes
        if size > most:
            raise RefusedError(
                f"The conversation up to {response_id[:80]!r} has {size} bytes, but this server "
                f"takes {most} (max_body_bytes). Send the part that matters as input, without "
                "previous_response_id.",
                param="previous_response_id",
            )

    def output(self, response_id: str, tenant: str) -> tuple[list[Fields], int]:
        """Return the output of a response, and the bytes of its items with those of its input;
        counts as a use. Errors as in `find`."""
        body, size = self._use("body, num_item_bytes", response_id, tenant)
        return msgspec.json.decode(body, type=_Output).output, size

    def _turn(self, response_id: str, tenant: str) -> tuple[str | None, list[Fields]]:
        """Return the response before one, and the items of this one; counts as a use. Errors as in
        `find`."""
        previous, body, items = self._use("previous, body, input", response_id, tenant)
        output = msgspec.json.decode(body, type=_Output).output
        return previous, [*msgspec.json.decode(items), *output]


def _missing(response_id: str) -> RefusedError:
    return RefusedError(
        f"There is no response {response_id[:80]!r}. It was made by another key, was not stored, "
        "is deleted, or has made room for newer ones.",
        status=404,
        param="response_id",
    )
