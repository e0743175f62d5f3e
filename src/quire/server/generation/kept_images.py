"""Images that requests name and that the server has: uploaded files of their callers."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import RequestError, quoted
from quire.rendering.media.sources import ImageSource, StoredFile
from quire.server.batches.store import BatchStore
from quire.server.requests.errors import RefusedError

__all__ = ["KeptImages"]


class KeptImages:
    """Reads what parts of requests name. Any thread may call it."""

    def __init__(self, files: Callable[[], BatchStore]) -> None:
        """files: returns the store of files, or raises RefusedError if there is none."""
        self._files = files

    def read(self, source: ImageSource, tenant: str, max_bytes: int) -> bytes:
        """Return the bytes of an image that is kept for this caller, and one more than `max_bytes`
        of a longer one. Raises RequestError, with its place, if there is none."""
        assert isinstance(source.value, StoredFile), "other images come with the request"
        return self._of_file(source.value.file_id, source.place, tenant, max_bytes)

    def _of_file(self, file_id: str, place: str, tenant: str, max_bytes: int) -> bytes:
        try:
            store = self._files()
            path = store.path(store.find_file(file_id, tenant).id)
            with path.open("rb") as contents:
                return contents.read(max_bytes + 1)
        except RefusedError as error:
            raise RequestError(f"{place} cannot be read. {error}") from error
        except OSError as error:  # it was deleted in the same moment
            raise RequestError(
                f"{place}: the file {quoted(file_id)} cannot be read ({error.strerror})"
            ) from error
