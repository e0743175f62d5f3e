"""The engine's status that anyone may read, without a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the stand-in answers before this is imported
    from quire.protocol.status import EngineStatus

__all__ = ["PROBES", "ShortStatus", "short_status"]

PROBES = frozenset({"/livez", "/health", "/readyz"})
"""Paths that only show a status."""


class ShortStatus(msgspec.Struct, frozen=True):
    """status: value of an `EngineState`. phase, seconds: phase of the start and its duration, while
    it goes on."""

    status: str
    phase: str | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        """ "starting (loading, 2.1 s)"."""
        if self.phase is None:
            return self.status
        return f"{self.status} ({self.phase}, {self.seconds or 0.0:.1f} s)"


def short_status(status: EngineStatus) -> ShortStatus:
    """Return the state, and the phase while a core starts. A core is ready before its last
    heartbeat says so."""
    is_start = status.state.value in ("starting", "restarting")
    phase = next((phase for phase in status.phases if is_start and not phase.is_done), None)
    if phase is None:
        return ShortStatus(status.state.value)
    return ShortStatus(status.state.value, phase.name, round(phase.seconds, 1))
