"""Sizes of a template's values, found before C code goes through them at one go.

Comparing, hashing or printing a list in which lists occur again and again takes one step of the
template, and time that doubles with each level. Here the levels are walked in Python and paid for.
"""

import re
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from itertools import chain
from typing import Any, cast

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Namespace

__all__ = [
    "BYTES_PER_PIECE", "ITEMS_PER_STEP", "built_bytes", "int_bits", "num_formatted", "split_bytes",
    "walk",
]  # fmt: skip

# C code goes through its operand this much faster than a template makes steps.
ITEMS_PER_STEP = 32
BYTES_PER_PIECE = 84
"""Bytes of a string of one character beyond Latin-1, and its place in a list."""
_BYTES_OF_OTHERS = 200
_SCALARS_PER_PAYMENT = 32 * ITEMS_PER_STEP
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_DIGITS = re.compile(r"\d+")
# Up to what shows where its width ends. One in braces that does not end there holds another one.
_FIELD = re.compile(r"%[^a-zA-Z%{}]*+|\{[^{}]*+\}?+")
# Text of a number that is no int, of None and the like, with what stands between items.
_SCALAR_CHARACTERS = 26
_Parts = list[Any] | tuple[Any, ...] | dict[Any, Any] | Namespace
_PARTS = (list, tuple, dict, KeysView, ValuesView, ItemsView, Namespace)


def walk(value: Any, spend: Callable[[int], None]) -> int:
    """Go through a value and all in it, as often as it occurs; about how long its text is.

    spend: is told the steps, and raises when there are too many.
    """
    size = 0
    num_scalars = 0
    pending: list[Iterator[Any]] = [iter((value,))]
    while pending:
        for item in pending[-1]:
            num_scalars += 1
            if num_scalars == _SCALARS_PER_PAYMENT:
                num_scalars = 0
                spend(_SCALARS_PER_PAYMENT // ITEMS_PER_STEP)
            if isinstance(item, str):
                size += len(item)
                spend(1 + len(item) // ITEMS_PER_STEP)
            elif isinstance(item, _PARTS):
                parts = _parts(cast("_Parts", item))
                spend(1)
                size += 2 + len(parts)
                pending.append(_items(parts))
                break
            elif isinstance(item, LoopContext | Cycler):
                raise SecurityError("`loop` and `cycler()` can't be printed or compared")
            else:
                size += item.bit_length() // 3 if isinstance(item, int) else 0
                size += _SCALAR_CHARACTERS
        else:
            pending.pop()
    return size


def built_bytes(value: Any) -> int:
    """Memory of a value that has just been built, without that of what is in it."""
    if value is None or isinstance(value, bool):
        return 0
    if isinstance(value, str | int | float | list | tuple | dict):
        return sys.getsizeof(cast("object", value))
    return _BYTES_OF_OTHERS  # an iterator, a namespace, …


def split_bytes(name: str, text: str, args: tuple[Any, ...]) -> int:
    """At most so much memory takes what `text.name(*args)` gives, if it cuts the text in pieces."""
    if name == "splitlines":
        num_cuts = sum(map(text.count, _LINE_ENDS))
    elif name in ("split", "rsplit"):
        separators = [value for value in args if isinstance(value, str) and value]
        num_cuts = min(map(text.count, separators), default=len(text) // 2 + 1)
    else:
        return 0
    return sys.getsizeof(text) + num_cuts * BYTES_PER_PIECE


def _items(parts: Any) -> Iterator[Any]:
    if isinstance(parts, dict):
        pairs = cast("dict[Any, Any]", parts)
        return chain(pairs, pairs.values())
    return iter(parts)


def _parts(item: Any) -> Any:
    # Identified by name: all its other attributes are the template's.
    return (
        object.__getattribute__(item, "_Namespace__attrs") if isinstance(item, Namespace) else item
    )


def int_bits(operator: str, left: int, right: int) -> int:
    """At most so many bits has the result of an operator, or one of its operands."""
    if operator == "*":
        return left.bit_length() + right.bit_length()
    if operator == "**":
        return left.bit_length() * max(right, 1)
    return max(left.bit_length(), right.bit_length()) + 1


def num_formatted(
    pattern: str, values: Iterable[Any], spend: Callable[[int], None], widest: int
) -> int:
    """Return the most characters that `pattern % values` and `pattern.format(values)` give, if each
    field shows the longest value. Raises OverflowError for a field wider than `widest`."""
    values = tuple(values)
    longest = max((walk(value, spend) for value in values), default=0)
    borrowed = max((abs(value) for value in values if isinstance(value, int)), default=0)
    size = len(pattern)
    for field in _FIELD.findall(pattern):
        spend(1)
        is_percent = field[0] == "%"
        spec = field if is_percent else field.partition(":")[2]
        widths = [int(digits.lstrip("0")[:9] or 0) for digits in _DIGITS.findall(spec)]
        if "*" in field if is_percent else ":" in field and field[-1] != "}":
            widths.append(borrowed)
        if max(widths, default=0) > widest:
            raise OverflowError(f"a format string has a width of {max(widths)}")
        size += longest + sum(widths)
    return size
