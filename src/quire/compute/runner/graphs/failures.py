"""The end of replays: steps that fail again and again only cost time."""

from __future__ import annotations

import logging

__all__ = ["MAX_FAILURES", "ReplayFailures"]

_log = logging.getLogger("quire.runner")

MAX_FAILURES = 3
"""Number of failed captured steps after which no more are tried."""


class ReplayFailures:
    """Counts captured steps that failed, each of which is computed another way.

    steps: name of the steps in the log.
    """

    def __init__(self, steps: str) -> None:
        self._steps = steps
        self.count = 0

    def note(self) -> bool:
        """Log the exception that is being handled. Return whether replays should stop."""
        self.count += 1
        _log.warning(
            "one of the captured %s failed and is computed anew", self._steps, exc_info=True
        )
        if self.count < MAX_FAILURES:
            return False
        _log.warning("no more %s are captured or replayed: %d failed", self._steps, self.count)
        return True
