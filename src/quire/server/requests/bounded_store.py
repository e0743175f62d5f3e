"""Tables of what the server keeps for its callers, bounded by number and bytes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.server.requests.databases import open_database

__all__ = ["BoundedStore", "BoundedTable", "count_rows"]

_EVICT = """
DELETE FROM {table} WHERE rowid = (
    SELECT rowid FROM {table} WHERE id != ? OR tenant != ? ORDER BY {order} LIMIT 1
) RETURNING {columns}
"""
_HAS_LESS = "tenant != (SELECT tenant FROM {table} GROUP BY tenant ORDER BY {most} DESC LIMIT 1)"


@dataclass(frozen=True, slots=True)
class BoundedTable:
    """A table in SQL; its columns have an `id`, a `tenant` and `num_bytes`. order: terms that sort
    the rows, the first to make room first; `{has_less}` is true for rows of any caller but the one
    with the most. evicted: columns of deleted rows that are of use."""

    name: str
    schema: str
    order: str
    evicted: str = "id"


class BoundedStore:
    """One table in SQLite: in memory, or, for several fronts, in a file that all share. The caller
    with the most loses rows first."""

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float],
        table: BoundedTable,
        *,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        """path: file that several fronts share; None for memory."""
        self._clock = clock
        self._database = open_database(path, table.schema, is_lasting=False)
        self._table = table
        self._max_rows, self._max_bytes = max_rows, max_bytes

    def close(self) -> None:
        self._database.close()

    @property
    def num_kept(self) -> int:
        return count_rows(self._database, self._table.name)[0]

    @property
    def num_bytes(self) -> int:
        return count_rows(self._database, self._table.name)[1]

    def _make_room(self, spared: tuple[str, str] = ("", "")) -> list[tuple[Any, ...]]:
        """Delete rows until the bounds hold, and return the columns of theirs that are of use.
        spared: id and tenant of a row that stays."""
        table = self._table
        deleted: list[tuple[Any, ...]] = []
        while True:
            count, size = count_rows(self._database, self._table.name)
            if count > self._max_rows:
                most = "count(*)"
            elif size > self._max_bytes:
                most = "sum(num_bytes)"
            else:
                return deleted
            has_less = _HAS_LESS.format(table=table.name, most=most)
            order = table.order.format(has_less=has_less)
            evict = _EVICT.format(table=table.name, order=order, columns=table.evicted)
            rows = self._database.execute(evict, spared).fetchall()
            if not rows:
                return deleted
            deleted += rows


def count_rows(
    database: sqlite3.Connection, table: str, where: str = "", given: Sequence[str] = ()
) -> tuple[int, int]:
    """Return the number of a table's rows and the sum of their `num_bytes`. where: an SQL clause
    with the values `given`."""
    return database.execute(
        f"SELECT count(*), ifnull(sum(num_bytes), 0) FROM {table}{where}", given
    ).fetchone()
