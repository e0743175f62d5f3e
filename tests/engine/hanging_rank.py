"""A rank of a model that hangs from a SIGUSR2 on: the thread that computes waits for ever, at
whatever it does, and the one that says that the process lives goes on.

Run in place of `quire.executor.processes.rank_process`; with the argument "core", in place of
`quire.engine.supervision.core_process`, it is a core that starts such ranks.
"""

from __future__ import annotations

import signal
import sys
import threading
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

from quire.engine.supervision import core_process  # noqa: E402
from quire.executor.processes import executor  # noqa: E402
from quire.executor.processes.group import RankGroup  # noqa: E402
from quire.executor.processes.rank_process import run_rank  # noqa: E402

HANG = signal.SIGUSR2
COMMAND = (sys.executable, __file__)
CORE_COMMAND = (*COMMAND, "core")


def hang(*_: object) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["core"]:
        executor.RankGroup = partial(RankGroup, command=COMMAND)  # type: ignore[misc, assignment]
        sys.exit(core_process.run_core_process(core_process._build))
    signal.signal(HANG, hang)
    sys.exit(run_rank())
