"""Work beside the caller, in a thread that nobody needs to wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Background"]

logger = logging.getLogger("quire")


class Background:
    """Runs one function in a thread each time that it was asked for, and never twice at once.

    The thread is a daemon, and ends when nothing is left to do: a disk may hang in a call, and a
    process ends without it. A pool's threads are waited for.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        """name: name of the thread."""
        self._name = name
        self._work = work
        self._changed = threading.Condition()
        self._is_asked = self._is_running = False

    def ask(self) -> None:
        """Have the function run from its beginning, after the present run if there is one."""
        with self._changed:
            self._is_asked = True
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """True until all that was asked for is done."""
        return self._is_running

    def wait(self, seconds: float) -> bool:
        """Wait until all that was asked for is done; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_asked:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                self._is_asked = False
            try:
                self._work()
            except Exception:
                logger.exception("%s failed", self._name)
