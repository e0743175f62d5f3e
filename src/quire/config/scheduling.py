"""Names of scheduling policies; `quire.scheduler.policies` has them."""

from __future__ import annotations

import re

__all__ = ["SCHEDULING_POLICIES", "is_policy_name"]

SCHEDULING_POLICIES = ("fcfs", "priority", "srtf", "two_level", "fair")

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_policy_name(name: str) -> bool:
    """One of `SCHEDULING_POLICIES`, or spelled like `package.module:Class`."""
    return name in SCHEDULING_POLICIES or _CLASS.fullmatch(name) is not None
