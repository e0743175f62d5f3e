"""Messages as MessagePack bytes and back, with types checked while they are read.

An array crosses as [dtype, raw bytes]; the dtype must be the one that the field declares. On a
pipe, the length of a message stands before it.
"""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar, cast, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError, QuireError

__all__ = [
    "Codec",
    "GarbledMessageError",
    "encode",
    "framed",
    "is_unicode",
    "launch_bytes",
    "read_exactly",
    "read_message",
]

LENGTH_BYTES = 4

T = TypeVar("T")
Message = TypeVar("Message", bound=msgspec.Struct)


class GarbledMessageError(QuireError):
    """Bytes that are no message of the expected kind."""


def encode(message: object) -> bytes:
    """The bytes of a message: a struct, or what one may hold. Raises TypeError if it holds
    something that cannot leave the process, such as a function."""
    return _ENCODER.encode(message)


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as bytes: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Codec(Generic[T]):
    """Reads messages of one kind, a struct or a union of them."""

    def __init__(self, kind: Any, max_bytes: int | None = None) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            kind, dec_hook=_read_array
        )
        self._max_bytes = max_bytes

    def decode(self, data: bytes) -> T:
        """Raises GarbledMessageError if these are not the bytes of a message of this kind, or more
        than `max_bytes`. Arrays of the message are read-only views of the bytes."""
        if self._max_bytes is not None and len(data) > self._max_bytes:
            raise GarbledMessageError(
                f"a message of {len(data)} bytes, while {self._max_bytes} are allowed"
            )
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, QuireError, ValueError, TypeError, RecursionError) as error:
            raise GarbledMessageError(f"{error} (message of {len(data)} bytes)") from error


def _write_array(value: object) -> tuple[str, bytes]:
    kind = type(value).__name__
    if isinstance(value, np.ndarray) and (array := cast("npt.NDArray[Any]", value)).ndim == 1:
        return array.dtype.str, array.tobytes()
    raise TypeError(f"a {kind} cannot be sent to another process")


def _read_array(kind: Any, value: Any) -> npt.NDArray[Any]:
    if get_origin(kind) is not np.ndarray:
        raise ValueError(f"{kind} cannot come from another process")
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    if not isinstance(value, list) or len(items := cast("list[Any]", value)) != 2:
        raise ValueError("an array is [dtype, bytes]")
    name, data = items
    if name != dtype.str or not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise ValueError(f"not whole items of {dtype.str}: {name!r}")
    return np.frombuffer(data, dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_write_array)


def launch_bytes(launch: msgspec.Struct) -> bytes:
    """Encode a launch for the standard input of a process."""
    return framed(encode(launch))


def framed(data: bytes) -> bytes:
    """The bytes with their length before them."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_message(descriptor: int, codec: Codec[Message]) -> Message:
    """Reads no further than what `launch_bytes` gave. Raises ConfigError if it is not there."""
    try:
        length = int.from_bytes(read_exactly(descriptor, LENGTH_BYTES), "big")
        return codec.decode(read_exactly(descriptor, length))
    except EOFError:
        raise ConfigError(
            "standard input ended before the launch message: this module is started by a server; "
            "use `quire serve`"
        ) from None
    except GarbledMessageError as error:
        raise ConfigError(f"the launch message cannot be read: {error}") from error


def read_exactly(descriptor: int, count: int) -> bytes:
    """Raises EOFError if the pipe ends before."""
    data = b""
    while len(data) < count:
        piece = os.read(descriptor, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
