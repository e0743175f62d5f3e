"""Forms with files, as browsers and clients upload them (RFC 7578), read while they come."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quire.server.requests.errors import RefusedError

__all__ = ["FormPart", "FormReader"]

MAX_PARTS = 16
MAX_FIELD_BYTES = 2**16
MAX_HEAD_BYTES = 2**14
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_NAME = re.compile(rb'[;\s]name="([^"]*)"')
_FILENAME = re.compile(rb'[;\s]filename="([^"]*)"')
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(slots=True)
class FormPart:
    """One field. filename: None if it is no file. data: bytes that have come and were not taken."""

    filename: str | None
    data: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """Return the value of a field that is no file."""
        return self.data.decode("utf-8", "replace")

    def take(self) -> bytes:
        """Return the data, which the part forgets."""
        data = bytes(self.data)
        self.data.clear()
        return data


class FormReader:
    """Takes the body of a form piece by piece. parts: fields by name, the last one not whole yet.

    All methods raise RefusedError if the body is no such form.
    """

    def __init__(self, content_type: str, large: str) -> None:
        """large: name of the field that may be long; take its data as they come."""
        kind = content_type.partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise RefusedError(
                f"Content-Type is {kind[:80]!r}. Send a form, as multipart/form-data.", status=415
            )
        found = _BOUNDARY.search(content_type)
        if found is None:
            raise RefusedError(
                "Content-Type has no boundary, by which parts of a form are told apart."
            )
        self.parts: dict[str, FormPart] = {}
        self._large = large
        self._mark = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        self._held = bytearray(b"\r\n")
        self._name: str | None = None  # of the part whose data come
        self._in_head = self._has_ended = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes. What follows the end is left out."""
        if self._has_ended:
            return
        self._held += data
        while self._read_head() if self._in_head else self._read_data():
            pass
        if self._has_ended:
            self._held.clear()

    def end(self) -> dict[str, FormPart]:
        """The body is over: return all parts."""
        if not self._has_ended:
            raise RefusedError(
                "The form ends early. Send all of it, with a last boundary behind the parts."
            )
        return self.parts

    def _read_data(self) -> bool:
        """Read on to the next boundary. Return whether it is there; what may be its beginning is
        held."""
        at = self._held.find(self._mark)
        end = at if at >= 0 else max(0, len(self._held) - len(self._mark) + 1)
        if self._name is not None:
            data = self.parts[self._name].data
            data += memoryview(self._held)[:end]
            if self._name != self._large and len(data) > MAX_FIELD_BYTES:
                raise RefusedError(
                    f"The field {self._name[:80]!r} of the form has more than {MAX_FIELD_BYTES} "
                    f"bytes. Only {self._large!r} may have more.",
                    param=self._name[:80],
                )
        del self._held[: end if at < 0 else end + len(self._mark)]
        self._in_head = at >= 0
        return self._in_head

    def _read_head(self) -> bool:
        """Read what stands between a boundary and the data of its part. Return whether it is all
        there, and not the end of the form."""
        self._has_ended = self._held.startswith(b"--")
        if self._has_ended:
            return False
        head, is_there, _ = self._held[: MAX_HEAD_BYTES + len(_END_OF_HEAD)].partition(_END_OF_HEAD)
        name, filename = _NAME.search(head), _FILENAME.search(head)
        if self._mark in head or len(head) > MAX_HEAD_BYTES or (is_there and name is None):
            raise RefusedError("A part of the form has no name. Give it a Content-Disposition.")
        if not is_there or name is None:
            return False
        self._begin(name[1], None if filename is None else filename[1])
        del self._held[: len(head) + len(_END_OF_HEAD)]
        self._in_head = False
        return True

    def _begin(self, name: bytes, filename: bytes | None) -> None:
        self._name = name.decode("utf-8", "replace")
        if self._name in self.parts or len(self.parts) == MAX_PARTS:
            raise RefusedError(
                f"The form has more than {MAX_PARTS} parts, or two of one name "
                f"({self._name[:80]!r}). Send each field once."
            )
        shown = None if filename is None else filename.decode("utf-8", "replace")
        self.parts[self._name] = FormPart(shown)
