"""Forms with files, as browsers and clients upload them (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.server.requests.errors import RefusedError

__all__ = ["FormPart", "read_form"]

MAX_PARTS = 16
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_NAME = re.compile(rb'[;\s]name="([^"]*)"')
_FILENAME = re.compile(rb'[;\s]filename="([^"]*)"')


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field. filename: None if it is no file."""

    filename: str | None
    data: bytes

    @property
    def text(self) -> str:
        """Return the value of a field that is no file."""
        return self.data.decode("utf-8", "replace")


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Return the fields by name. Raises RefusedError for anything but such a form."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise RefusedError(
            f"Content-Type is {kind[:80]!r}. Send a form, as multipart/form-data.", status=415
        )
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise RefusedError("Content-Type has no boundary, by which parts of a form are told apart.")
    mark = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
    _, *pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 1)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise RefusedError(
            f"The form ends early, or has more than {MAX_PARTS} parts. Send all of it, with a last "
            "boundary."
        )
    parts: dict[str, FormPart] = {}
    for piece in pieces[:-1]:
        head, is_there, data = piece.partition(b"\r\n\r\n")
        name, filename = _NAME.search(head), _FILENAME.search(head)
        if not is_there or name is None:
            raise RefusedError("A part of the form has no name. Give it a Content-Disposition.")
        shown = None if filename is None else filename[1].decode("utf-8", "replace")
        parts[name[1].decode("utf-8", "replace")] = FormPart(shown, data)
    return parts
