"""Facts that the system gives about processes: this one and a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.base.platform.processes import ProcessState, state_of, unique_name
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no proc(5)")


def test_a_child_is_followed_to_its_end() -> None:
    """Turns red when a field is taken for its neighbour, or a dead process raises."""
    code = "data = bytearray(b'x') * 50_000_000\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            wait_for(lambda: state_of(child.pid).cpu_seconds > 0.2, "work")
            wait_for(lambda: 50_000_000 < state_of(child.pid).resident_bytes < 500_000_000, "data")
            assert not state_of(child.pid).is_stopped
            child.send_signal(signal.SIGSTOP)
            wait_for(lambda: state_of(child.pid).is_stopped, "stop")
        finally:
            child.kill()
    assert state_of(child.pid) == ProcessState()


def test_a_name_tells_a_process_from_an_earlier_one_of_its_pid() -> None:
    """Turns red when another field than the start is in it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        names = [unique_name(pid) for pid in (os.getpid(), child.pid)]
        assert child.stdin is not None
        child.stdin.close()
    boots, pids, starts = zip(*(name.split("/") for name in names), strict=True)
    assert boots[0] == boots[1] and pids == (str(os.getpid()), str(child.pid))
    uptime = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
    assert 0 < int(starts[0]) < int(starts[1]) <= uptime + 1
