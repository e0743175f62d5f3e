"""Tables of what the server keeps for its callers, bounded by number and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.server.requests.databases import open_database

__all__ = ["BoundedStore", "BoundedTable"]

_TOTALS = """
CREATE TABLE IF NOT EXISTS {name}_totals (
    tenant TEXT PRIMARY KEY, num_rows INTEGER NOT NULL, num_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS {name}_came AFTER INSERT ON {name} BEGIN
    INSERT INTO {name}_totals SELECT new.tenant, 0, 0
        WHERE NOT EXISTS (SELECT 1 FROM {name}_totals WHERE tenant = new.tenant);
    UPDATE {name}_totals SET num_rows = num_rows + 1, num_bytes = num_bytes + new.num_bytes
        WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS {name}_changed AFTER UPDATE OF num_bytes ON {name} BEGIN
    UPDATE {name}_totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes
        WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS {name}_went AFTER DELETE ON {name} BEGIN
    UPDATE {name}_totals SET num_rows = num_rows - 1, num_bytes = num_bytes - old.num_bytes
        WHERE tenant = old.tenant;
    DELETE FROM {name}_totals WHERE tenant = old.tenant AND num_rows = 0;
END;
CREATE INDEX IF NOT EXISTS {name}_by_order ON {name} (tenant, {order});
"""
_EVICT = """
DELETE FROM {name} WHERE rowid = (
    SELECT rowid FROM {name}
    WHERE tenant = ?1 AND {condition} AND NOT (id = ?2 AND tenant = ?3) ORDER BY {order} LIMIT 1
) RETURNING {evicted}
"""


@dataclass(frozen=True, slots=True)
class BoundedTable:
    """A table in SQL; its columns have an `id`, a `tenant` and `num_bytes`. order: columns that
    sort the rows of a caller, the first to make room first. last: condition of rows that make room
    after all others. evicted: columns of deleted rows that are of use."""

    name: str
    schema: str
    order: str
    last: str = "false"
    evicted: str = "id"

    @property
    def script(self) -> str:
        """SQL that creates the table, and what makes a call take as long for many rows as for
        few: totals of each caller, and an index."""
        return self.schema + _TOTALS.format(name=self.name, order=self.order)

    @property
    def evictions(self) -> list[str]:
        """SQL that deletes the first row of a caller, and SQL for those that go last. Parameters:
        the caller; id and caller of a row that stays."""
        return [
            _EVICT.format(
                name=self.name, condition=condition, order=self.order, evicted=self.evicted
            )
            for condition in (f"NOT ({self.last})", f"({self.last})")
        ]


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
        self._database = open_database(path, table.script, is_lasting=False)
        # A row that is replaced counts as deleted.
        self._database.execute("PRAGMA recursive_triggers = ON")
        self._totals, self._evictions = f"{table.name}_totals", table.evictions
        self._max_rows, self._max_bytes = max_rows, max_bytes

    def close(self) -> None:
        self._database.close()

    @property
    def num_kept(self) -> int:
        return self._sizes()[0]

    @property
    def num_bytes(self) -> int:
        return self._sizes()[1]

    def _sizes(self) -> tuple[int, int]:
        """Return the number of rows and the sum of their bytes."""
        return self._database.execute(
            f"SELECT ifnull(sum(num_rows), 0), ifnull(sum(num_bytes), 0) FROM {self._totals}"
        ).fetchone()

    def _make_room(self, spared: tuple[str, str] = ("", "")) -> list[tuple[Any, ...]]:
        """Delete rows until the bounds hold, and return the columns of theirs that are of use.
        spared: id and tenant of a row that stays."""
        deleted: list[tuple[Any, ...]] = []
        while True:
            num_rows, num_bytes = self._sizes()
            if num_rows > self._max_rows:
                evicted = self._evict_one("num_rows", spared)
            elif num_bytes > self._max_bytes:
                evicted = self._evict_one("num_bytes", spared)
            else:
                return deleted
            if not evicted:
                return deleted
            deleted += evicted

    def _evict_one(self, most: str, spared: tuple[str, str]) -> list[tuple[Any, ...]]:
        """Delete a row of the caller with the most, or of the next one if that has none to give.
        most: column of the totals."""
        callers: list[tuple[str]] = self._database.execute(
            f"SELECT tenant FROM {self._totals} ORDER BY {most} DESC, tenant"
        ).fetchall()
        for evict in self._evictions:
            for (tenant,) in callers:
                if rows := self._database.execute(evict, (tenant, *spared)).fetchall():
                    return rows
        return []
