"""A server's process that is forked, as are its cores, their ranks, and fronts (tests/forked.py).

Its first argument is "-c" or "-m", as a command of Python has them; the front of `python -m quire`
or of some code runs then, in a session of its own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from quire.engine.supervision.supervisor import EngineSupervisor
from quire.entrypoints.cli import main as cli
from quire.entrypoints.cli import serve
from quire.server.processes import front_process, owner, sole_front, watched_front
from tests.engine import real_core_process
from tests.forked import REAL, ForkedProcess, OwnTemplate, core_starter

__all__ = ["front_process", "main", "owner", "real_core_process", "serve", "sole_front"]


def main() -> int:
    os.setsid()
    template = OwnTemplate()

    async def spawn(listener: int) -> watched_front.WatchedFront:
        command = watched_front.FRONT_COMMAND
        found: Any = ForkedProcess(template, command, [listener], has_output=True)
        return watched_front.WatchedFront(found)

    EngineSupervisor._start_process = core_starter(template, REAL)  # type: ignore[method-assign]
    watched_front.WatchedFront.spawn = spawn  # type: ignore[method-assign]
    _, flag, what, *arguments = sys.argv
    sys.argv = [what, *arguments]
    if flag == "-m":
        assert what == "quire"
        return cli.main()
    exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    return 0
