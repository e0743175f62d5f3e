"""Responses that the server keeps, so that a later request may go on from them.

They lie in SQLite: in memory, or, where several fronts serve, in a file that all of them have.
Every call takes some hundred microseconds, so that it is made within the event loop.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.requests.places import Fields

__all__ = ["ResponseStore", "StoredResponse"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used_s REAL NOT NULL,
    num_bytes INTEGER NOT NULL, status TEXT NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL,
    token_ids BLOB
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used_s, num_bytes);
"""
BUSY_S = 5.0
_UNFINISHED = ("queued", "in_progress")


class StoredResponse(msgspec.Struct):
    """body: the response as it was given. input: the items of its request, with ids. token_ids: of
    its prompt and output, if they are known. previous: the id of the one before it."""

    id: str
    previous: str | None
    body: Fields
    input: list[Fields]
    token_ids: list[int] | None = None

    @property
    def is_unfinished(self) -> bool:
        return self.body["status"] in _UNFINISHED


class ResponseStore:
    """Bounded by number, bytes and age; what was used least recently goes first. Each caller's key
    sees its own alone."""

    def __init__(
        self, limits: Limits, path: Path | None, clock: Callable[[], float] = time.time
    ) -> None:
        """path: of the file that several fronts share; None for memory."""
        self._limits = limits
        self._clock = clock
        self._database = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    @property
    def num_kept(self) -> int:
        return self._total()[0]

    @property
    def num_bytes(self) -> int:
        return self._total()[1]

    def _total(self) -> tuple[int, int]:
        row = self._database.execute("SELECT count(*), ifnull(sum(num_bytes), 0) FROM responses")
        return row.fetchone()

    def put(self, response: StoredResponse, tenant: str) -> None:
        """Keep a response, in place of what it was before."""
        body, items = msgspec.json.encode(response.body), msgspec.json.encode(response.input)
        tokens = None if response.token_ids is None else msgspec.msgpack.encode(response.token_ids)
        size = len(body) + len(items) + len(tokens or b"")
        now = self._clock()
        self._database.execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                response.id, tenant, response.previous, now, size, response.body["status"], body,
                items, tokens,
            ),
        )  # fmt: skip
        self._evict(now)

    def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response, which counts as a use. RefusedError 404 if it is not there."""
        now = self._clock()
        row = self._database.execute(
            "UPDATE responses SET used_s = ? WHERE id = ? AND tenant = ? AND used_s >= ? "
            "RETURNING id, previous, body, input, token_ids",
            (now, response_id, tenant, now - self._limits.stored_response_s),
        ).fetchone()
        if row is None:
            raise _missing(response_id)
        tokens = None if row[4] is None else msgspec.msgpack.decode(row[4], type=list[int])
        body: Any = msgspec.json.decode(row[2])
        return StoredResponse(row[0], row[1], body, msgspec.json.decode(row[3]), tokens)

    def delete(self, response_id: str, tenant: str) -> None:
        """RefusedError 404 if it is not there."""
        found = self._database.execute(
            "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING id", (response_id, tenant)
        ).fetchone()
        if found is None:
            raise _missing(response_id)

    def is_wanted(self, response_id: str) -> bool:
        """Return whether a response that is being made is still to be made: it is neither deleted
        nor cancelled, by whatever front."""
        row = self._database.execute(
            "SELECT status FROM responses WHERE id = ?", (response_id,)
        ).fetchone()
        return row is not None and row[0] in _UNFINISHED

    def conversation(self, response_id: str, tenant: str) -> tuple[list[Fields], StoredResponse]:
        """Return all items up to the end of a response, and the response. RefusedError if a part of
        them is not there any more, or the response is not complete."""
        last = self.find(response_id, tenant)
        if last.is_unfinished:
            raise RefusedError(
                f"previous_response_id {response_id[:80]!r} is {last.body['status']}. Wait until "
                "it is complete.",
                param="previous_response_id",
            )
        turns = [last]
        while (before := turns[-1].previous) is not None:
            turns.append(self.find(before, tenant))
        items = [item for turn in reversed(turns) for item in (*turn.input, *turn.body["output"])]
        return items, last

    def _evict(self, now: float) -> None:
        limits = self._limits
        self._database.execute(
            "DELETE FROM responses WHERE used_s < ?", (now - limits.stored_response_s,)
        )
        while True:
            count, size = self._total()
            if count <= limits.max_stored_responses and size <= limits.max_stored_bytes:
                return
            self._database.execute(
                "DELETE FROM responses WHERE id = "
                "(SELECT id FROM responses ORDER BY used_s, rowid LIMIT 1)"
            )


def _missing(response_id: str) -> RefusedError:
    return RefusedError(
        f"There is no response {response_id[:80]!r}. It was made by another key, was not stored, "
        "is deleted, or has made room for newer ones.",
        status=404,
        param="response_id",
    )
