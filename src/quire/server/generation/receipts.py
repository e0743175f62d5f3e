"""Receipts that the server keeps, and signs if it has a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.protocol.receipts import Receipt, read_key
from quire.server.readings.timeline import Timeline
from quire.server.requests.bounded_store import BoundedStore, BoundedTable
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits

__all__ = ["ReceiptStore"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS receipts (
    id TEXT NOT NULL, tenant TEXT NOT NULL, request_id TEXT NOT NULL, answer_id TEXT NOT NULL,
    made_s REAL NOT NULL, num_bytes INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS receipts_by_request ON receipts (tenant, request_id);
CREATE INDEX IF NOT EXISTS receipts_by_answer ON receipts (tenant, answer_id);
CREATE INDEX IF NOT EXISTS receipts_by_id ON receipts (tenant, id);
CREATE INDEX IF NOT EXISTS receipts_by_age ON receipts (made_s);
"""
_TABLE = BoundedTable("receipts", _SCHEMA, order="made_s")


class ReceiptStore(BoundedStore):
    """Bounded by number, bytes and age. The caller with the most loses its oldest receipt first.
    Each caller's key sees its own alone.

    Safe to share between threads. Calls belong there, since they encode long answers, and may wait
    for another front that writes.
    """

    def __init__(
        self,
        limits: Limits,
        path: Path | None,
        key_file: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """path: see `BoundedStore`. key_file: file of the key that signs. ConfigError if it cannot
        be used."""
        self._key = None if key_file is None else read_key(Path(key_file))
        super().__init__(
            path,
            clock,
            _TABLE,
            max_rows=limits.max_receipts,
            max_bytes=limits.max_receipt_bytes,
        )
        self._receipt_s = limits.receipt_s
        self._lock = threading.Lock()

    def put(self, receipt: Receipt, timeline: Timeline) -> Receipt:
        """Sign a receipt and keep it for the caller of a request. Return it signed."""
        if self._key is not None:
            receipt = receipt.signed(self._key)
        body, now = receipt.to_json().encode(), self._clock()
        row = (
            receipt.id, timeline.tenant, timeline.request_id, timeline.answer_id, now,
            len(body), body,
        )  # fmt: skip
        with self._lock:
            self._database.execute("INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            old = (now - self._receipt_s,)
            self._database.execute("DELETE FROM receipts WHERE made_s < ?", old)
            self._make_room()
        return receipt

    def find(self, name: str, tenant: str) -> list[Receipt]:
        """Return receipts by the id of a receipt, of a request, or of its response, in the order in
        which they were made. RefusedError 404 if there are none."""
        behind_prefix = (name.partition("-")[2], name.partition("_")[2])
        for each in filter(None, (name, *behind_prefix)):
            with self._lock:
                rows = self._database.execute(
                    "SELECT body FROM receipts WHERE tenant = ? AND made_s >= ? AND "
                    "(id = ? OR request_id = ? OR answer_id = ?) ORDER BY rowid",
                    (tenant, self._clock() - self._receipt_s, each, each, each),
                ).fetchall()
            if rows:
                return [msgspec.json.decode(body, type=Receipt) for (body,) in rows]
        raise RefusedError(
            f"There is no receipt of {name[:128]!r}. A request has one if it sets deterministic to "
            "true, when it has ended, for as long as the server keeps it.",
            status=404,
        )
