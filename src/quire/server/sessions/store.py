"""Conversations by the names that clients give them, with the tokens that the engine knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.server.requests.bounded_store import BoundedStore, BoundedTable
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.requests.places import Fields

__all__ = [
    "INSERT_SESSION",
    "SESSIONS_SCHEMA",
    "SESSION_COLUMNS",
    "PinnedSession",
    "Session",
    "SessionKey",
    "SessionStore",
]

SessionKey = tuple[str, str]
"""Id and tenant."""

SESSIONS_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT NOT NULL, tenant TEXT NOT NULL, version INTEGER NOT NULL, used_s REAL NOT NULL,
    created_s REAL NOT NULL, expires_s REAL NOT NULL, ttl_s REAL NOT NULL,
    pinned INTEGER NOT NULL, num_bytes INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (tenant, id)
);
"""
_TABLE = BoundedTable(
    "sessions",
    SESSIONS_SCHEMA + "CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_s);",
    order="pinned, used_s",
    evicted="id, tenant, pinned",
)

SESSION_COLUMNS = (
    "id, tenant, version, used_s, created_s, expires_s, ttl_s, pinned, num_bytes, body"
)
INSERT_SESSION = (
    f"INSERT OR REPLACE INTO sessions ({SESSION_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


class Session(msgspec.Struct):
    """A conversation up to its last answer. messages: all messages, in the form of chats.
    token_ids: ids of its prompt and the answer. salt: salt of its cached prefixes. version: number
    of its turns. ttl_s: seconds for which it is kept without use."""

    id: str
    salt: str = ""
    messages: list[Fields] = msgspec.field(default_factory=list[Fields])
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    version: int = 0
    ttl_s: float = 0.0
    created_s: float = 0.0
    is_pinned: bool = False


class PinnedSession(NamedTuple):
    """expires_s: seconds since 1970."""

    session: Session
    expires_s: float


class SessionStore(BoundedStore):
    """Bounded by number, bytes and age. The caller with the most loses its least recently used
    conversation first, and pinned ones last. Each caller's key sees its own alone."""

    def __init__(
        self, limits: Limits, path: Path | None, clock: Callable[[], float] = time.time
    ) -> None:
        """path: see `BoundedStore`."""
        super().__init__(
            path,
            clock,
            _TABLE,
            max_rows=limits.max_sessions,
            max_bytes=limits.max_session_bytes,
        )
        self._session_s = limits.session_s
        self._evicted: list[SessionKey] = []
        """Pinned conversations."""
        self.on_change: Callable[[SessionKey], None] = lambda _: None
        """Told of each conversation that is another one now, or gone; not of those that expire."""

    def find(self, session_id: str, tenant: str) -> Session | None:
        """Return a conversation, which counts as a use; None if there is none of that name."""
        now = self._clock()
        row = self._database.execute(
            "UPDATE sessions SET used_s = ? WHERE tenant = ? AND id = ? AND expires_s > ? "
            "RETURNING body, pinned, ttl_s",
            (now, tenant, session_id, now),
        ).fetchone()
        return None if row is None else _session(*row)

    def required(self, session_id: str, tenant: str) -> Session:
        """Return a conversation. Raises RefusedError 404 if there is none."""
        found = self.find(session_id, tenant)
        if found is None:
            raise _missing(session_id)
        return found

    def pinned(self, session_id: str, tenant: str) -> PinnedSession | None:
        """Return a pinned conversation, which is no use of it; None if there is none."""
        row = self._database.execute(
            "SELECT body, pinned, ttl_s, expires_s FROM sessions "
            "WHERE tenant = ? AND id = ? AND pinned AND expires_s > ?",
            (tenant, session_id, self._clock()),
        ).fetchone()
        return None if row is None else PinnedSession(_session(*row[:3]), row[3])

    def unpin(self, found: PinnedSession, tenant: str) -> bool:
        """Let a conversation be pinned no more. Returns False, and changes nothing, if it is not
        what was found any more."""
        row = self._database.execute(
            "UPDATE sessions SET pinned = 0 WHERE tenant = ? AND id = ? AND pinned AND "
            "version = ? AND expires_s = ? RETURNING id",
            (tenant, found.session.id, found.session.version, found.expires_s),
        ).fetchone()
        self.on_change((found.session.id, tenant))
        return row is not None

    def seconds_left(self, found: PinnedSession) -> float:
        return max(0.0, found.expires_s - self._clock())

    def take_evicted(self) -> list[SessionKey]:
        """Return pinned conversations that have made room since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def put(self, session: Session, tenant: str) -> bool:
        """Keep a conversation after a turn. Returns False, and changes nothing, if another turn of
        it has ended meanwhile or it was deleted. The pin and the ttl that it has by now stay."""
        now = self._clock()
        was, session.version = session.version, session.version + 1
        if was:
            body = msgspec.msgpack.encode(session)
            row = self._database.execute(
                "UPDATE sessions SET version = ?, used_s = ?, expires_s = ? + ttl_s, "
                "num_bytes = ?, body = ? WHERE tenant = ? AND id = ? AND version = ? AND "
                "created_s = ? RETURNING pinned, ttl_s",
                (
                    session.version, now, now, len(body), body, tenant, session.id, was,
                    session.created_s,
                ),
            ).fetchone()  # fmt: skip
            if row is not None:
                session.is_pinned, session.ttl_s = bool(row[0]), row[1]
        else:
            session.created_s, session.ttl_s = now, session.ttl_s or self._session_s
            row = self._insert(session, tenant, now)
        self._database.execute("DELETE FROM sessions WHERE expires_s <= ?", (now,))
        self._evict((session.id, tenant))
        self.on_change((session.id, tenant))
        return row is not None

    def _evict(self, spared: SessionKey = ("", "")) -> None:
        """Make room. `spared` stays."""
        for session_id, tenant, is_pinned in self._make_room(spared):
            self.on_change((session_id, tenant))
            if is_pinned:
                self._evicted.append((session_id, tenant))

    def row(self, key: SessionKey) -> tuple[Any, ...] | None:
        """Return the row of a conversation as `restore` takes it; None if it is gone. Any thread
        may call it."""
        return self._database.execute(
            f"SELECT {SESSION_COLUMNS} FROM sessions WHERE id = ? AND tenant = ? AND expires_s > ?",
            (*key, self._clock()),
        ).fetchone()

    def restore(self, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Take in rows of an earlier server, before any conversation of this one: all of them, or
        none if one cannot be taken in (sqlite3.Error). Returns False, and changes nothing, if
        another front has done so."""
        with self._database as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE IF NOT EXISTS restored (once INTEGER UNIQUE)")
            is_first = database.execute(
                "INSERT INTO restored VALUES (1) ON CONFLICT DO NOTHING RETURNING once"
            ).fetchone()
            if is_first:
                database.executemany(INSERT_SESSION, rows)
        self._evict()
        return bool(is_first)

    def all_pinned(self) -> list[tuple[Session, str]]:
        """Return all pinned conversations, and whose they are."""
        rows = self._database.execute(
            "SELECT body, pinned, ttl_s, tenant FROM sessions WHERE pinned AND expires_s > ?",
            (self._clock(),),
        )
        return [(_session(*row), tenant) for *row, tenant in rows]

    def _insert(self, session: Session, tenant: str, now: float) -> object:
        """Insert a conversation. Returns None if there is one of that name."""
        body = msgspec.msgpack.encode(session)
        return self._database.execute(
            "INSERT INTO sessions (id, tenant, version, used_s, created_s, expires_s, ttl_s, "
            "pinned, num_bytes, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (tenant, id) DO UPDATE SET version = excluded.version, "
            "used_s = excluded.used_s, created_s = excluded.created_s, "
            "expires_s = excluded.expires_s, ttl_s = excluded.ttl_s, pinned = excluded.pinned, "
            "num_bytes = excluded.num_bytes, body = excluded.body "
            "WHERE sessions.expires_s <= ? RETURNING id",
            (
                session.id, tenant, session.version, now, now, now + session.ttl_s, session.ttl_s,
                session.is_pinned, len(body), body, now,
            ),
        ).fetchone()  # fmt: skip

    def change(
        self,
        session_id: str,
        tenant: str,
        *,
        is_pinned: bool | None = None,
        ttl_s: float | None = None,
    ) -> Session:
        """Change how long it is kept, or its pin; None leaves a value unchanged. Raises
        RefusedError 404 if there is none."""
        now = self._clock()
        row = self._database.execute(
            "UPDATE sessions SET used_s = ?1, pinned = ifnull(?2, pinned), "
            "ttl_s = ifnull(?3, ttl_s), expires_s = ?1 + ifnull(?3, ttl_s) "
            "WHERE tenant = ?4 AND id = ?5 AND expires_s > ?1 RETURNING body, pinned, ttl_s",
            (now, is_pinned, ttl_s, tenant, session_id),
        ).fetchone()
        if row is None:
            raise _missing(session_id)
        self.on_change((session_id, tenant))
        return _session(*row)

    def delete(self, session_id: str, tenant: str) -> None:
        """Delete a conversation. Raises RefusedError 404 if there is none."""
        self.required(session_id, tenant)
        self._database.execute(
            "DELETE FROM sessions WHERE tenant = ? AND id = ?", (tenant, session_id)
        )
        self.on_change((session_id, tenant))

    def listed(self, tenant: str) -> list[tuple[Session, float]]:
        """Return the caller's conversations, last used first, with the seconds until they
        expire."""
        now = self._clock()
        rows = self._database.execute(
            "SELECT body, pinned, ttl_s, expires_s FROM sessions "
            "WHERE tenant = ? AND expires_s > ? ORDER BY used_s DESC",
            (tenant, now),
        )
        return [
            (_session(body, pinned, ttl_s), expires_s - now)
            for body, pinned, ttl_s, expires_s in rows
        ]


def _session(body: bytes, pinned: int, ttl_s: float) -> Session:
    """Return the conversation of its last turn with its present pin and ttl."""
    session = msgspec.msgpack.decode(body, type=Session)
    session.is_pinned, session.ttl_s = bool(pinned), ttl_s
    return session


def _missing(session_id: str) -> RefusedError:
    return RefusedError(
        f"There is no session {session_id[:80]!r} of this key. It has expired, is deleted, or has "
        "made room for newer ones.",
        status=404,
        param="session_id",
    )
