"""Decodes the bytes of a request into a typed object, within bounds."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.requests import Request

from quire.base.errors import clipped, quoted
from quire.base.foreign import nearest, shown
from quire.protocol.parameters.foreign import FOREIGN_PARAMS
from quire.server.http.body_shape import check_shape_by_turns
from quire.server.requests.errors import RefusedError
from quire.server.requests.foreign import IGNORED_FIELDS, NOT_OFFERED, OTHER_NAMES
from quire.server.requests.limits import Limits

__all__ = ["BodyDecoder", "BodyReader", "BytesInFlight", "unknown_names"]

Body = TypeVar("Body", bound=msgspec.Struct)

_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>.*)`", re.DOTALL)
_INTEGER_WANTED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MISSING_FIELD = re.compile(r"missing required field `(?P<name>.*)`")
_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MAX_SHOWN = 80
_MAX_NAMED = 16
_UPLOAD_PIECE_BYTES = 2**20


class BytesInFlight:
    """Count of the bytes of bodies and messages that have come but are not whole or not taken, for
    all connections."""

    def __init__(self, limits: Limits) -> None:
        self.most = limits.max_body_bytes_in_flight
        self.num_bytes = 0

    @property
    def is_over(self) -> bool:
        """True if they are more than the server may hold."""
        return self.num_bytes > self.most


class BodyReader:
    """Reads bodies for all connections. in_flight: count of their bytes; WebSockets add to it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.in_flight = BytesInFlight(limits)

    async def read(self, request: Request) -> bytes:
        """Read the body. Raises RefusedError for a wrong media type, a size over the limit (as soon
        as it arrives), or a slow client."""
        _check_headers(request.headers, self._limits)
        return await self._read(request, self._limits.max_body_bytes, "max_body_bytes")

    async def read_upload(self, request: Request, take: Callable[[bytes], None]) -> None:
        """Give the body of a form with a file to `take`, which a thread calls for each piece of it,
        one after the other. Raises the errors of `read`, except for the media type."""
        limit = self._limits.max_file_bytes
        rest = await self._read(request, limit, "max_file_bytes", take)
        await asyncio.to_thread(take, rest)

    async def _read(
        self,
        request: Request,
        most: int,
        limit: str,
        take: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Return the body, or what is left of it when `take` has got all whole pieces."""
        limits = self._limits
        chunks: list[bytes] = []
        size = num_held = 0
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(started + limits.body_timeout_s) as timeout:
                async for chunk in request.stream():
                    size += len(chunk)
                    num_held += len(chunk)
                    self.in_flight.num_bytes += len(chunk)
                    self._check_size(size, most, limit)
                    chunks.append(chunk)
                    if take is not None and num_held >= _UPLOAD_PIECE_BYTES:
                        await asyncio.to_thread(take, b"".join(chunks))
                        chunks.clear()
                        self.in_flight.num_bytes -= num_held
                        num_held = 0
                    timeout.reschedule(started + limits.body_timeout_s + size / 2**20)
        except TimeoutError as error:
            raise RefusedError(
                f"The body did not arrive within {limits.body_timeout_s:g} s (body_timeout_s); "
                f"{size} bytes did. Send it faster.",
                status=408,
            ) from error
        finally:
            self.in_flight.num_bytes -= num_held
        return b"".join(chunks)

    def _check_size(self, size: int, most: int, limit: str) -> None:
        if size > most:
            raise _too_large(most, limit)
        if self.in_flight.is_over:
            raise RefusedError(
                "The server is reading as many bodies as it may hold (max_body_bytes_in_flight, "
                f"{self.in_flight.most} bytes). Try again soon.",
                status=503,
                retry_after_s=1,
            )


_ENDS_EARLY = "Input data was truncated"
"""msgspec's words for text behind the JSON; nothing was cut off here."""


class BodyDecoder(Generic[Body]):
    """Decodes the bodies of one route into `kind`.

    A field that `kind` lacks is ignored if it cannot change an answer (`IGNORED_FIELDS`), and
    refused by name otherwise; no field is dropped silently.
    """

    def __init__(self, kind: type[Body], limits: Limits) -> None:
        self._kind = kind
        self._limits = limits
        self._decoder = msgspec.json.Decoder(kind)
        self._names = kind.__struct_fields__

    async def decode(self, body: bytes) -> Body:
        """Decode a body. RefusedError names the field, its value and what it may be. Yields to
        other tasks while a large body is checked."""
        body = body.removeprefix(codecs.BOM_UTF8)
        if not body.strip():
            raise RefusedError(
                "The request has no body. Send a JSON object; a redirect on the way here may have "
                "dropped it."
            )
        await check_shape_by_turns(body, self._limits)
        try:
            try:
                return self._decoder.decode(body)
            except msgspec.ValidationError as error:
                if not (_UNKNOWN_FIELD.search(str(error)) or _INTEGER_WANTED.search(str(error))):
                    raise
                return self._from_other_spellings(msgspec.json.decode(body))
        except msgspec.ValidationError as error:
            raise _invalid(error) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if str(error) == _ENDS_EARLY:
                raise RefusedError(
                    f"The body is not valid JSON: it ends within a value, after {len(body)} bytes. "
                    "Close all quotes, brackets and braces, and send all of it."
                ) from error
            raise RefusedError(
                f"The body is not valid JSON: {clipped(str(error))}. Correct it."
            ) from error

    def _from_other_spellings(self, fields: dict[str, Any]) -> Body:
        """Decode a body without its foreign fields. Accepts 3.0 for an integer, since clients in
        JavaScript and Lua send that."""
        for name in [name for name in fields if name not in self._names]:
            self._check_foreign(name, fields.pop(name))
        while True:
            try:
                return msgspec.convert(fields, self._kind)
            except msgspec.ValidationError as error:
                name = _field_of(error) if _INTEGER_WANTED.search(str(error)) else None
                if name is None or (whole := _as_integers(fields[name])) is None:
                    raise
                fields[name] = whole

    def _check_foreign(self, name: str, value: object) -> None:
        if name in IGNORED_FIELDS:
            return
        if name in NOT_OFFERED:
            reason, neutral = NOT_OFFERED[name]
            if value is None or any(_is_same(value, item) for item in neutral):
                return
            # A reason with two parts says in the second what to send instead.
            advice = "" if ";" in reason else " Leave it out."
            raise RefusedError(f"{name} is {quoted(value)}, but {reason}.{advice}", param=name)
        if name in FOREIGN_PARAMS:
            if not FOREIGN_PARAMS[name].asks_for_nothing(value):
                raise RefusedError(FOREIGN_PARAMS[name].refusal(shown(name, value)), param=name)
            return
        meant = [each for each in OTHER_NAMES.get(name, ()) if each in self._names]
        near = meant[0] if meant else nearest(name[:_MAX_SHOWN], self._names)
        hint = f"Did you mean {near!r}?" if near else "Leave it out."
        raise RefusedError(f"There is no field {quoted(name)}. {hint}", param=name[:_MAX_SHOWN])


def unknown_names(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Return a few fields of a decoded body that `kind` lacks, where `kind` allows such fields."""
    body = body.removeprefix(codecs.BOM_UTF8)
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = (name for name in names if name not in kind.__struct_fields__)
    return [name[:_MAX_SHOWN] for name in itertools.islice(unknown, _MAX_NAMED)]


def _is_same(value: object, other: object) -> bool:
    """Return True if two values are equal in JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _field_of(error: msgspec.ValidationError) -> str | None:
    """Return the field of the body that has the error."""
    place = _PLACE.search(str(error))
    return None if place is None else re.split(r"[.\[]", place["path"])[0]


def _as_integers(value: object) -> object:
    """Return the value with whole floats as integers, also in lists; None if there are none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    found = [_as_integers(item) for item in items]
    if all(item is None for item in found):
        return None
    return [old if new is None else new for old, new in zip(items, found, strict=True)]


def _invalid(error: msgspec.ValidationError) -> RefusedError:
    """Return msgspec's words with the place in front: `max_tokens: expected int, got str`."""
    text = str(error)
    place = _PLACE.search(text)
    path = "" if place is None else place["path"]
    what = text if place is None else text[: place.start()]
    what = (what[:1].lower() + what[1:]).replace("`", "").replace(" | null", " or null")
    missing = None if path else _MISSING_FIELD.search(text)
    param = path.partition(".")[0].partition("[")[0] if missing is None else missing["name"]
    return RefusedError(f"{path or 'The body'}: {clipped(what)}. Correct it.", param=param or None)


def _too_large(most: int, limit: str) -> RefusedError:
    return RefusedError(
        f"The body has more than {most} bytes ({limit}). Send less.",
        status=413,
    )


def _check_headers(headers: Mapping[str, str], limits: Limits) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RefusedError(
            f"Content-Type is {quoted(media_type)}. Send JSON, with Content-Type: "
            "application/json.",
            status=415,
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise RefusedError(f"Content-Encoding is {quoted(encoding)}. Send plain JSON.", status=415)
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes, "max_body_bytes")
