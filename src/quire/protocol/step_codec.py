"""Plans and results as bytes of a fixed layout, as a ring between two processes carries them.

    magic u8 · kind u8 · arrays u32 (bit i: array i is there) · step id i64 · length of the rest u32
    · for each array that is there, its length u32 and its int32 items · the rest, in MessagePack

Arrays are the int32 fields of the message, in the order of their declaration; empty ones take no
bytes. The rest holds what is rare (rows that enter, log-probabilities, failures), as one map of
the fields that are not empty. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import msgspec
import numpy as np

from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.step import EMPTY_INTS, IntArray, StepPlan, StepResult

__all__ = ["decode_plan", "decode_result", "encode_plan", "encode_result"]

_HEADER = struct.Struct("<BBIqI")
_LENGTH = struct.Struct("<I")
_MAGIC = 0x51
_PLAN, _RESULT = 1, 2
_INT32 = np.dtype("<i4")


def encode_plan(plan: StepPlan) -> bytes:
    """The bytes of a plan; 18 of one that changes nothing. Raises TypeError if it holds something
    that cannot leave the process, such as a function."""
    return _encode(_PLAN, _PLAN_LAYOUT, plan)


def decode_plan(data: bytes) -> StepPlan:
    """Raises GarbledMessageError if these are not the bytes of a plan. Arrays are read-only views
    of them."""
    return StepPlan(**_decode(_PLAN, _PLAN_LAYOUT, data))


def encode_result(result: StepResult) -> bytes:
    """The bytes of a result."""
    return _encode(_RESULT, _RESULT_LAYOUT, result)


def decode_result(data: bytes) -> StepResult:
    """Decode a result; errors as in `decode_plan`."""
    return StepResult(**_decode(_RESULT, _RESULT_LAYOUT, data))


class _Layout:
    """Layout of a message: which fields are arrays, and how its other ones are read. may_be_none:
    arrays for which None and an empty one differ."""

    def __init__(self, kind: type[StepPlan] | type[StepResult]) -> None:
        hints = get_type_hints(kind)
        items = [each for each in fields(kind) if each.name != "step_id"]
        self.arrays = tuple(each.name for each in items if "IntArray" in str(each.type))
        self.may_be_none = frozenset(
            each.name for each in items if each.name in self.arrays and each.default is None
        )
        rest = [each for each in items if each.name not in self.arrays]
        self.rest = tuple((each.name, _default_of(each)) for each in rest)
        self.codec: Codec[msgspec.Struct] = Codec(
            msgspec.defstruct(
                f"{kind.__name__}Rest",
                [(each.name, hints[each.name] | msgspec.UnsetType, msgspec.UNSET) for each in rest],
                forbid_unknown_fields=True,
            )
        )


def _default_of(item: Any) -> Any:
    return item.default if item.default is not MISSING else item.default_factory()


_PLAN_LAYOUT, _RESULT_LAYOUT = _Layout(StepPlan), _Layout(StepResult)


def _encode(kind: int, layout: _Layout, message: StepPlan | StepResult) -> bytes:
    mask, parts = 0, [b""]
    for i, name in enumerate(layout.arrays):
        array: IntArray | None = getattr(message, name)
        if array is None or (not len(array) and name not in layout.may_be_none):
            continue
        mask |= 1 << i
        parts += (_LENGTH.pack(len(array)), array.astype(_INT32, copy=False).tobytes())
    given = {
        name: value for name, default in layout.rest if (value := getattr(message, name)) != default
    }
    rest = encode(given) if given else b""
    parts[0] = _HEADER.pack(_MAGIC, kind, mask, message.step_id, len(rest))
    parts.append(rest)
    return b"".join(parts)


def _decode(kind: int, layout: _Layout, data: bytes) -> dict[str, Any]:
    """Arguments of the message."""
    if len(data) < _HEADER.size:
        raise GarbledMessageError(f"a step of {len(data)} bytes has no whole header")
    magic, found, mask, step_id, num_rest = _HEADER.unpack_from(data)
    if (magic, found) != (_MAGIC, kind) or mask >> len(layout.arrays):
        raise GarbledMessageError(f"not a step of kind {kind}: {data[: _HEADER.size].hex()}")
    values: dict[str, Any] = {"step_id": step_id}
    place = _HEADER.size
    for i, name in enumerate(layout.arrays):
        if not mask >> i & 1:
            values[name] = None if name in layout.may_be_none else EMPTY_INTS
            continue
        if place + _LENGTH.size > len(data):
            raise GarbledMessageError(f"array {name} of a step is cut off")
        (count,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        if place + 4 * count > len(data):
            raise GarbledMessageError(f"array {name} of a step has no {count} items")
        values[name] = np.frombuffer(data, _INT32, count, place)
        place += 4 * count
    if len(data) - place != num_rest:
        raise GarbledMessageError(f"a step has {len(data) - place} bytes where {num_rest} are due")
    if num_rest:
        rest = layout.codec.decode(data[place:])
        for name, _ in layout.rest:
            if (value := getattr(rest, name)) is not msgspec.UNSET:
                values[name] = value
    return values
