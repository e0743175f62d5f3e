"""Work in a thread that nobody waits for."""

from __future__ import annotations

import subprocess
import sys
import threading

from quire.base.platform.background import Background
from tests.waiting import WAIT_S

ENDS = """
import threading
from quire.base.platform.background import Background

work = Background("hangs", threading.Event().wait)
work.ask()
assert not work.wait(0.05) and work.is_busy
"""


def test_each_question_is_answered_by_a_run_after_it() -> None:
    """A question during a run is not lost, and runs never overlap."""
    started, goes_on, runs = threading.Semaphore(0), threading.Semaphore(0), list[int]()

    def work() -> None:
        runs.append(1)
        started.release()
        assert goes_on.acquire(timeout=WAIT_S)

    background = Background("work", work)
    assert background.wait(0) and not background.is_busy
    background.ask()
    assert started.acquire(timeout=WAIT_S)
    for _ in range(3):
        background.ask()
    assert not background.wait(0.01)
    goes_on.release(2)
    assert background.wait(WAIT_S)
    assert len(runs) == 2
    background.ask()
    goes_on.release()
    assert background.wait(WAIT_S) and len(runs) == 3


def test_a_failure_ends_nothing() -> None:
    runs = list[int]()

    def work() -> None:
        runs.append(1)
        raise ValueError("once")

    background = Background("work", work)
    for count in (1, 2):
        background.ask()
        assert background.wait(WAIT_S)
        assert len(runs) == count


def test_a_process_ends_without_it() -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=WAIT_S)
