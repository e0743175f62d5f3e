"""Plans, late input and results as bytes of a fixed layout, as a ring between two processes carries
them.

    magic u8 · kind u8 · arrays u32 (bit i: array i is there) · step id i64 · length of the rest u32
    · for each array that is there, its length u32 and its int32 items · the rest, in MessagePack

Arrays are the int32 fields of the message, in the order of their declaration; empty ones take no
bytes. The rest holds what is rare (rows that enter, log-probabilities, failures), as one map of
the fields that are not empty. Numbers are little-endian. Masks are two arrays: their shape, and
their words.
"""

from __future__ import annotations

import struct
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

import msgspec
import numpy as np

from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.step import (
    EMPTY_INTS,
    IntArray,
    LateInput,
    RowFailure,
    StepPlan,
    StepResult,
    no_ints,
)

__all__ = [
    "decode_late",
    "decode_plan",
    "decode_result",
    "encode_late",
    "encode_plan",
    "encode_result",
]

_HEADER = struct.Struct("<BBIqI")
_LENGTH = struct.Struct("<I")
_MAGIC = 0x51
_PLAN, _RESULT, _LATE = 1, 2, 3
_INT32, _UINT32 = np.dtype("<i4"), np.dtype("<u4")


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


def encode_late(late: LateInput) -> bytes:
    """The bytes of late input."""
    words = late.masks.astype(_UINT32, copy=False).reshape(-1).view(_INT32)
    shape = np.array(late.masks.shape, np.int32)
    flat = _FlatLate(late.step_id, late.slots, late.counts, late.index, shape, words, late.failed)
    return _encode(_LATE, _LATE_LAYOUT, flat)


def decode_late(data: bytes) -> LateInput:
    """Decode late input, as `decode_plan` does; parts that do not fit together are refused as
    well."""
    flat = _FlatLate(**_decode(_LATE, _LATE_LAYOUT, data))
    shape = flat.shape.tolist()
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] != len(flat.words):
        raise GarbledMessageError(f"masks of shape {shape} have {len(flat.words)} words")
    num_positions = int(flat.counts.sum(dtype=np.int64))
    if (
        len(flat.slots) != len(flat.counts)
        or num_positions != len(flat.index)
        or (flat.counts < 0).any()
    ):
        raise GarbledMessageError(
            f"{len(flat.slots)} rows have {len(flat.counts)} counts and {num_positions} positions, "
            f"for {len(flat.index)} entries"
        )
    if ((flat.index < -1) | (flat.index >= shape[0])).any():
        raise GarbledMessageError(f"a position names none of the {shape[0]} masks")
    masks = flat.words.view(_UINT32).reshape(shape)
    return LateInput(flat.step_id, flat.slots, flat.counts, flat.index, masks, flat.failed)


@dataclass(frozen=True, slots=True)
class _FlatLate:
    """`LateInput` with its masks as the bits of int32 words, row after row."""

    step_id: int
    slots: IntArray = field(default_factory=no_ints)
    counts: IntArray = field(default_factory=no_ints)
    index: IntArray = field(default_factory=no_ints)
    shape: IntArray = field(default_factory=no_ints)
    words: IntArray = field(default_factory=no_ints)
    failed: tuple[RowFailure, ...] = ()


class _Layout:
    """Layout of a message: the fields that are arrays, and the reading of the others. may_be_none:
    arrays for which None and an empty one differ."""

    def __init__(self, kind: type[StepPlan] | type[StepResult] | type[_FlatLate]) -> None:
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
_LATE_LAYOUT = _Layout(_FlatLate)


def _encode(kind: int, layout: _Layout, message: StepPlan | StepResult | _FlatLate) -> bytes:
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
