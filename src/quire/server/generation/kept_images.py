"""Images that requests name and that the server has: files that were uploaded, and images that came
with a uuid before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.base.errors import RequestError, quoted
from quire.server.requests.bounded_store import BoundedStore, BoundedTable
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.text.rendering.media.sources import ImageSource, MediaAccess, StoredFile

__all__ = ["KeptImages", "NamedImages"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS images (
    id TEXT NOT NULL, tenant TEXT NOT NULL, used_s REAL NOT NULL, num_bytes INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (tenant, id)
);
"""
_TABLE = BoundedTable("images", _SCHEMA, order="used_s")


class NamedImages(BoundedStore):
    """Images as they were sent, by the names that their callers gave them. Bounded by number and
    bytes: the caller with the most loses its least recently used image first. Each caller's key
    sees its own alone. Any thread may call it."""

    def __init__(
        self, limits: Limits, path: Path | None, clock: Callable[[], float] = time.time
    ) -> None:
        """path: see `BoundedStore`."""
        super().__init__(
            path,
            clock,
            _TABLE,
            max_rows=limits.max_named_images,
            max_bytes=limits.max_named_image_bytes,
        )
        self._lock = threading.Lock()

    def put(self, name: str, tenant: str, data: bytes) -> None:
        """Keep an image, in place of the one that had the name before."""
        row = (name, tenant, self._clock(), len(data), data)
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?)", row)
            self._make_room()

    def find(self, name: str, tenant: str) -> bytes | None:
        """Return an image, which counts as a use; None if there is none of that name."""
        with self._lock:
            row = self._database.execute(
                "UPDATE images SET used_s = ? WHERE tenant = ? AND id = ? RETURNING body",
                (self._clock(), tenant, name),
            ).fetchone()
        return None if row is None else row[0]


class KeptImages:
    """Reads what parts of requests name. Any thread may call it."""

    def __init__(self, named: NamedImages, path_of: Callable[[str, str], Path]) -> None:
        """path_of: returns the path of a file by its id and its caller. It raises RefusedError if
        there is none."""
        self._named, self._path_of = named, path_of

    def has(self, source: ImageSource) -> bool:
        """Return whether a part names an image that is to be read here."""
        return isinstance(source.value, StoredFile) or source.value is None

    def read(self, source: ImageSource, tenant: str, max_bytes: int) -> bytes:
        """Return the bytes of an image that is kept for this caller, and one more than `max_bytes`
        of a longer one. Raises RequestError, with its place, if there is none."""
        if isinstance(source.value, StoredFile):
            return self._of_file(source.value.file_id, source.place, tenant, max_bytes)
        assert source.uuid is not None, "a part has an image or the name of one"
        found = self._named.find(source.uuid, tenant)
        if found is None:
            raise RequestError(
                f"{source.place} is {quoted(source.uuid)}, and no image of that name is kept: send "
                "the image with its uuid again"
            )
        return found

    def keep(self, sources: Iterable[ImageSource], tenant: str, access: MediaAccess) -> None:
        """Keep images that came with a uuid and proved good. access: reads them once more."""
        for source in sources:
            if source.uuid is not None:
                data = access.read(source)
                assert isinstance(data, bytes), "requests bring no images of Pillow"
                self._named.put(source.uuid, tenant, data)

    def _of_file(self, file_id: str, place: str, tenant: str, max_bytes: int) -> bytes:
        try:
            with self._path_of(file_id, tenant).open("rb") as contents:
                return contents.read(max_bytes + 1)
        except RefusedError as error:
            raise RequestError(f"{place} cannot be read. {error}") from error
        except OSError as error:  # it was deleted in the same moment
            raise RequestError(
                f"{place}: the file {quoted(file_id)} cannot be read ({error.strerror})"
            ) from error
