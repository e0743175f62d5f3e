"""Numbers that bound values, within the reach of the grammar library, which counts in 64 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

__all__ = [
    "BOUNDS",
    "COUNTS",
    "LimitError",
    "factor_fault",
    "held_bounds",
    "held_counts",
    "is_held",
]

BOUNDS = frozenset(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
COUNTS = frozenset(("minProperties", "maxProperties"))

_MOST, _LEAST = 2**63 - 1, -(2**63 - 1024)
"""Integers of bounds. The library reads them as floats, so -2**63 would be one too far."""
_ONE_SIDED = 10**18
"""An integer of this size has to have both bounds, and a number has none."""
_TINY = 1e-60
"""Smaller fractions are nested too deeply for the library."""
_MAX_FACTOR = 100_000
"""Largest digits of a `multipleOf` that compile in time."""


class LimitError(ValueError):
    """A number that cannot be held to."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(why)
        self.keyword = keyword


def held_bounds(node: Mapping[str, Any], types: frozenset[str]) -> dict[str, int | float]:
    """Return the bounds of a schema, a little narrower where needed. types: types of its values.

    Raises LimitError for a bound that leaves nothing that the library could write.
    """
    if "integer" in types and "number" not in types:
        return _of_integers(node)
    found: dict[str, int | float] = {}
    for keyword in sorted(BOUNDS & node.keys()):
        if _is_number(bound := node.get(keyword)):
            found |= _of_numbers(keyword, cast("int | float", bound))
    return found


def _of_integers(node: Mapping[str, Any]) -> dict[str, int | float]:
    lows, highs = dict[str, int](), dict[str, int]()
    for keyword in sorted(BOUNDS & node.keys()):
        bound: Any = node.get(keyword)
        if not _is_number(bound) or bound in (-math.inf, math.inf):
            if _is_number(bound) and (bound > 0) == ("inimum" in keyword):
                raise LimitError(keyword, "leaves no number")
            continue
        match keyword:
            case "minimum":
                lows[keyword] = _up(math.ceil(bound))
            case "exclusiveMinimum":
                lows[keyword] = _up(math.floor(bound) + 1)
            case "maximum":
                highs[keyword] = _down(math.floor(bound))
            case _:
                highs[keyword] = _down(math.ceil(bound) - 1)
    low, high = max(lows.values(), default=None), min(highs.values(), default=None)
    if low is not None and low > _MOST:
        raise LimitError(max(lows, key=lows.__getitem__), "is beyond 64 bits")
    if high is not None and high < _LEAST:
        raise LimitError(min(highs, key=highs.__getitem__), "is beyond 64 bits")
    if high is None and low is not None and low >= _ONE_SIDED:
        high = _MOST
    if low is None and high is not None and high <= -_ONE_SIDED:
        low = _LEAST
    found = {"minimum": None if low is None else max(low, _LEAST), "maximum": high}
    return {keyword: bound for keyword, bound in found.items() if bound is not None}


def _of_numbers(keyword: str, bound: int | float) -> dict[str, int | float]:
    is_low = "inimum" in keyword
    sign = 1 if is_low else -1
    inclusive = "minimum" if is_low else "maximum"
    size = sign * bound  # grows as the bound gets tighter
    if size == -math.inf:
        return {}
    if size >= _ONE_SIDED:
        raise LimitError(keyword, "is beyond 18 digits")
    if size < _LEAST:
        return {inclusive: sign * _LEAST}
    if 0 < abs(bound) < _TINY:
        return {inclusive: sign * _TINY if size > 0 else 0}
    return {keyword: sign * _up(size) if isinstance(size, int) else bound}


def _up(value: int) -> int:
    """Return the least integer from a value on that is a float, as far as these are used."""
    if abs(value) > 2 * _MOST:
        return value
    near = float(value)
    return int(near if int(near) >= value else math.nextafter(near, math.inf))


def _down(value: int) -> int:
    """Return the greatest integer up to a value that is a float, or the greatest of 64 bits, which
    the library makes of the float next to it."""
    return _MOST if value >= _MOST else -_up(-value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def is_held(value: object) -> bool:
    """Return whether the library can write all numbers of a listed value."""
    if isinstance(value, dict):
        return all(map(is_held, cast("dict[str, object]", value).values()))
    if isinstance(value, list):
        return all(map(is_held, cast("list[object]", value)))
    if isinstance(value, float):
        return abs(value) < _ONE_SIDED and not 0 < abs(value) < _TINY
    return not isinstance(value, int) or (abs(value) <= _ONE_SIDED and value == float(value))


def factor_fault(factor: object) -> str:
    """Return why the library does not hold to a `multipleOf`, "" if it does."""
    if not _is_number(factor):
        return ""
    if cast("float", factor) >= _ONE_SIDED:
        return "is beyond 18 digits"
    digits = Decimal(str(factor)).normalize().as_tuple().digits
    return "takes too long" if int("".join(map(str, digits))) > _MAX_FACTOR else ""


def held_counts(node: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the keywords of `COUNTS` that say nothing new, and the names of which one must be
    there in place of a `minProperties`.

    The library counts properties only where all listed ones are required. Raises LimitError.
    """
    names, required = node.get("properties"), node.get("required", [])
    least, most = (node.get(keyword) for keyword in ("minProperties", "maxProperties"))
    is_well_formed = isinstance(names, dict) and isinstance(required, list)
    if not is_well_formed or not all(each is None or _is_number(each) for each in (least, most)):
        return (), ()
    names, required = cast("dict[str, Any]", names), cast("list[str]", required)
    optional = [name for name in names if name not in required]
    if not optional or (most is None and not least):
        return (["minProperties"] if least == 0 else ()), ()
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    num_required, redundant, one_of = len(set(required)), list[str](), list[str]()
    if least is not None and least <= num_required:
        redundant.append("minProperties")
    elif least is not None:
        if not is_closed or least != num_required + 1:
            raise LimitError("minProperties", "stands beside optional properties")
        redundant.append("minProperties")
        one_of = optional
    if most is not None:
        if not is_closed or most < len({*names, *required}):
            raise LimitError("maxProperties", "stands beside optional properties")
        redundant.append("maxProperties")
    return redundant, one_of
