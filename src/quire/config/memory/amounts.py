"""Bytes and counts in text: "4GiB", "32k"."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["format_bytes", "parse_bytes", "parse_count"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BYTE_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{unit: 1000 ** (i + 1) for i, unit in enumerate(("kb", "mb", "gb", "tb"))},
    **{unit: 1024 ** (i + 1) for i, unit in enumerate(("kib", "mib", "gib", "tib"))},
    **{unit: 1024 ** (i + 1) for i, unit in enumerate(("k", "m", "g", "t"))},
}
_COUNT_UNITS: Mapping[str, int] = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def format_bytes(count: int) -> str:
    """ "1.23 GiB", "45.6 MiB" or "789 B": three or four digits and a unit."""
    size, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while size >= 1024 and unit < len(units) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.{2 if size < 10 else 1}f} {units[unit]}"


def parse_bytes(text: str) -> int:
    """Bytes of "4GiB", "512 MB", "2g" (as GiB) or "1000". Raises ValueError."""
    return _scaled(text, text.lower(), _BYTE_UNITS)


def parse_count(text: str) -> int:
    """A count such as "4096", "32k" (32,000) or "32K" (32,768). Raises ValueError."""
    return _scaled(text, text, _COUNT_UNITS)


def _scaled(text: str, spelled: str, units: Mapping[str, int]) -> int:
    match = _SIZE.fullmatch(spelled)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a number with one of the units {', '.join(units)}")
    number, unit = match[1], units[match[2]]
    return int(float(number) * unit) if "." in number else int(number) * unit
