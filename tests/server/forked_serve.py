"""A server's process that is forked, as are its cores (tests/forked.py).

Its first argument is "-c" or "-m", as a command of Python has them; the front of `python -m quire`
or of some code runs then, in a session of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from quire.engine.supervision.supervisor import EngineSupervisor
from quire.entrypoints.cli import main as cli
from quire.entrypoints.cli import serve
from quire.server.processes import front_process, owner, sole_front
from tests.engine import real_core_process
from tests.forked import ForkedProcess, OwnTemplate

__all__ = ["front_process", "main", "owner", "real_core_process", "serve", "sole_front"]


def main() -> int:
    os.setsid()
    template = OwnTemplate()

    async def start_process(supervisor: EngineSupervisor) -> asyncio.subprocess.Process:
        found: Any = ForkedProcess(template, supervisor._command)
        return found

    EngineSupervisor._start_process = start_process  # type: ignore[method-assign]
    _, flag, what, *arguments = sys.argv
    sys.argv = [what, *arguments]
    if flag == "-m":
        assert what == "quire"
        return cli.main()
    exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    return 0
