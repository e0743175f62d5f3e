"""A rank of a model that hangs from a signal on: the thread that computes waits for ever, at
whatever it does, and the one that says that the process lives goes on.

Run in place of `quire.compute.executor.processes.rank_process`; with the argument "core", in place
of `quire.engine.supervision.core_process`, it is a core that starts such ranks, and whose own rank
computes no more from another signal on.
"""

from __future__ import annotations

import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

from quire.compute.executor.processes import group  # noqa: E402
from quire.engine.supervision import core_process  # noqa: E402

HANG = signal.SIGUSR2
HANG_CORE = signal.SIGRTMIN
"""SIGUSR2 is one that cores know."""
COMMAND = (sys.executable, __file__)
CORE_COMMAND = (*COMMAND, "core")


def hang(*_: object) -> None:
    threading.Event().wait()


def hang_in_steps() -> None:
    """Let the thread that launches steps wait for ever in the next one, once the signal came to the
    main thread."""
    from quire.compute.worker import Worker

    launch, is_told = Worker.launch, threading.Event()

    def hanging_launch(self: Worker, plan: Any) -> Any:
        if is_told.is_set():
            hang()
        return launch(self, plan)

    Worker.launch = hanging_launch  # type: ignore[method-assign]
    signal.signal(HANG_CORE, lambda *_: is_told.set())


def build(*args: Any) -> core_process.StartedCore:
    """Nothing that imports torch comes before the real build, as in a real core."""
    started = core_process._build(*args)
    hang_in_steps()
    return started


def main() -> int:
    if sys.argv[1:] == ["core"]:
        group.RankGroup = partial(group.RankGroup, command=COMMAND)  # type: ignore[misc, assignment]
        return core_process.run_core_process(build)
    from quire.compute.executor.processes.rank_process import main as run_rank

    signal.signal(HANG, hang)
    return run_rank()


if __name__ == "__main__":
    sys.exit(main())
