"""Notices of what is held under names: blocks that came, went, or were all forgotten."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["BlockName", "Listener", "Notice", "NoticeKind"]

BlockName = tuple[int, bytes]
"""A layer group, and the name of a block of it."""


class NoticeKind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


class Notice(NamedTuple):
    """A change of the names that one holder has.

    medium: the holder, such as "device". block: None when all names were cleared.
    """

    kind: NoticeKind
    medium: str
    block: BlockName | None = None


Listener = Callable[[Notice], None]
