"""Images that requests name: objects of a program, bytes, files, and data: and file: URLs."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import urllib.parse
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from quire.base.errors import RequestError, quoted

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "ImageSource",
    "MediaAccess",
    "RowsSource",
    "StoredFile",
    "is_pillow",
    "is_remote",
    "path_or_url",
]

_GRID_LAYOUTS = {12: "<3i", 24: "<3q"}
"""Layouts of 3 integers by their bytes, of 32 and 64 bits."""

DETAILS = (None, "auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that the server keeps for its caller, by its id."""

    file_id: str


@dataclass(frozen=True, slots=True)
class RowsSource:
    """An image as rows of the model's encoder, which its client computed. data: file with a tensor,
    as bytes or in base64. grid: `image_grid_thw` as it was given, a list of 3 numbers or base64 of
    a file with such a tensor; None without."""

    data: str | bytes
    grid: object = None

    def read(self, place: str, max_bytes: int) -> tuple[bytes, tuple[int, ...] | None]:
        """Return the file and the grid. place: path in the request. RequestError, which names it,
        for what is no base64, has over `max_bytes` bytes, or is no grid."""
        if len(self.data) > 4 * (max_bytes // 3 + 1):
            raise RequestError(
                f"{place} has {len(self.data):,} characters, and images of all requests may take "
                f"{max_bytes:,} bytes (image_memory): send fewer rows"
            )
        data = self.data if isinstance(self.data, bytes) else _of_base64(self.data, place)
        return data, None if self.grid is None else _grid_of(self.grid, f"{place}.image_grid_thw")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as it was given. place: its path in the request. value: an image of Pillow, bytes, a
    path, the text of a URL, or a file of the server; None for the image that had the uuid before.
    detail: "low" for few tokens, where the model knows a way. uuid: caller's name for the image."""

    place: str
    value: object
    detail: str | None = None
    uuid: str | None = None


def is_pillow(value: object) -> TypeGuard[Image.Image]:
    """Return whether it is an image of Pillow, which need not be imported for the answer."""
    return any(kind.__module__ == "PIL.Image" for kind in type(value).__mro__)


def is_remote(value: object) -> bool:
    """Return whether it is a URL that has to be fetched."""
    return isinstance(value, str) and value[:8].lower().startswith(("http:", "https:"))


class MediaAccess:
    """Reads what requests name, within bounds."""

    def __init__(
        self,
        max_bytes: int,
        max_pixels: int,
        local_folder: Path | None = None,
        fetch: Callable[[str, str], bytes] | None = None,
    ) -> None:
        """max_bytes, max_pixels: bounds of one image. local_folder: folder of the files that URLs
        may name; None for no files. fetch: reader of http: and https: URLs, which takes the place
        in the request too; None to refuse them."""
        self.max_bytes, self.max_pixels = max_bytes, max_pixels
        self._folder = None if local_folder is None else local_folder.resolve()
        self._fetch = fetch

    def read(self, source: ImageSource) -> bytes | Image.Image:
        """Return the bytes of an image, or an image of Pillow as it is. Raises RequestError, which
        names the place, for what cannot be read or may not be."""
        value, place = source.value, source.place
        if source.detail not in DETAILS:
            raise RequestError(
                f"{place} has the detail {quoted(source.detail)}: give one of "
                f"{', '.join(filter(None, DETAILS))}"
            )
        if is_pillow(value) or isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(cast("bytearray | memoryview[int]", value))
        if isinstance(value, Path):
            return self._of_file(value, place, str(value))
        if isinstance(value, str):
            return self._of_url(value, place)
        if isinstance(value, StoredFile):
            raise RequestError(
                f"{place} names the file {quoted(value.file_id)}, but no files are kept here: send "
                "the image as a data: URL"
            )
        if value is None and source.uuid is not None:
            raise RequestError(
                f"{place} is {quoted(source.uuid)}, but images are not kept by their uuid here: "
                "send the image"
            )
        raise RequestError(
            f"{place} is {quoted(value)}: give an image of Pillow, bytes, a path or a URL"
        )

    def _of_url(self, url: str, place: str) -> bytes:
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self._of_data(url, place)
        if scheme == "file":
            return self._of_local(url, place)
        if not is_remote(url):
            raise RequestError(
                f"{place} is {quoted(url)}: give a data: URL with the bytes of the image in base64"
            )
        return self.fetch(url, place)

    def fetch(self, url: str, place: str) -> bytes:
        """Read an http: or https: URL. RequestError if none are read, or this one is not."""
        if self._fetch is None:
            raise RequestError(
                f"{place} names {quoted(url)}, but nothing is fetched here: send the image as a "
                "data: URL, or start with allowed_media_domains"
            )
        return self._fetch(url, place)

    def _of_data(self, url: str, place: str) -> bytes:
        header, comma, data = url.partition(",")
        if not comma:
            raise RequestError(f"{place} is {quoted(url)}, a data: URL without data")
        if len(data) > 3 * self.max_bytes:  # %AB is the longest way to write a byte
            raise self._too_long(place, len(data))
        if not header.lower().endswith(";base64"):
            return urllib.parse.unquote_to_bytes(data)
        if len(data) > 4 * (self.max_bytes // 3 + 1):
            raise self._too_long(place, len(data))
        return _of_base64(data, place)

    def _too_long(self, place: str, num_chars: int) -> RequestError:
        return RequestError(
            f"{place} has {num_chars} characters of data, and an image has at most "
            f"{self.max_bytes} bytes (max_image_bytes): send a smaller one"
        )

    def _of_local(self, url: str, place: str) -> bytes:
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.parse.unquote(parts.path))
        if self._folder is None:
            raise RequestError(
                f"{place} names {quoted(url)}, but no files are read here: send the image as a "
                "data: URL, or start with allowed_local_media_path"
            )
        if parts.netloc not in ("", "localhost") or "\0" in str(path):
            raise RequestError(f"{place} names {quoted(url)}: give a file of this machine")
        path = path.resolve()
        if not path.is_relative_to(self._folder):
            raise RequestError(
                f"{place} names {quoted(url)}, which is outside of allowed_local_media_path"
            )
        return self._of_file(path, place, url)

    def _of_file(self, path: Path, place: str, shown: str) -> bytes:
        """Return the bytes of a file, and one more than allowed of a longer one. shown: name of the
        file in errors, which was sent: its path may be nobody's business."""
        try:
            if not path.is_file():
                raise RequestError(f"{place}: there is no file {quoted(shown)}")
            with path.open("rb") as file:
                return file.read(self.max_bytes + 1)
        except OSError as error:
            raise RequestError(f"{place} cannot be read: {error.strerror}") from error


def _of_base64(data: str, place: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{place} is no base64 ({error}): encode the image again") from error


def _grid_of(given: object, place: str) -> tuple[int, ...]:
    """Return the numbers of a grid. A file of `torch.save` has them as they are in memory."""
    found = _stored_numbers(_of_base64(given, place)) if isinstance(given, str) else given
    while isinstance(found, list) and len(cast("list[object]", found)) == 1:  # of one image
        found = cast("list[object]", found)[0]
    numbers = cast("list[object]", found) if isinstance(found, list) else []
    if len(numbers) != 3 or not all(type(each) is int and each > 0 for each in numbers):
        raise RequestError(
            f"{place} is {quoted(given)}: send [1, rows, columns], as a list or as the base64 of "
            "torch.save(tensor, file)"
        )
    return tuple(cast("list[int]", numbers))


def _stored_numbers(data: bytes) -> list[int]:
    """Return the 3 integers of a tensor in a file of `torch.save`; none of another file."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (entry,) = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
            layout = _GRID_LAYOUTS[entry.file_size]
            return list(struct.unpack(layout, archive.read(entry)))
    except Exception:  # noqa: BLE001  whatever a stranger's file makes of it
        return []


def path_or_url(value: Any) -> Any:
    """Return a text of a program that names a file as a path; one that is a URL stays."""
    if not isinstance(value, str) or value[:16].partition(":")[0].lower() in _SCHEMES:
        return value
    return Path(value)


_SCHEMES = ("data", "file", "http", "https")
