"""Priorities of threads."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["LOWEST", "give_way"]

LOWEST = 19
"""Niceness of a thread that gives way. Linux shares a core as 1 : 68 with another thread of the
process, and rarely stops for it a thread that computes for some milliseconds. The policy for idle
cores (`SCHED_IDLE`) would let it starve beside another busy program."""


def give_way() -> None:
    """Let other threads go first from now on, where a thread has a priority of its own (Linux).
    Threads that this one starts later inherit it."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
