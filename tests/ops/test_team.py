"""The team of threads: every kernel's work is done, whoever of the team has time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.waiting import WAIT_S, wait_for

from quire.base.platform import detect_platform
from quire.base.platform.priority import LOWEST
from quire.ops import ALL_OPS, Provider, Team

PLATFORM = detect_platform()
ROWS, WIDTH = 2000, 512


@pytest.fixture
def norm() -> Provider:
    for provider in ALL_OPS["rms_norm"].providers:
        if provider.unavailable(PLATFORM) is None:
            return provider
    pytest.skip("no compiled kernels here")


def tasks() -> set[str]:
    """Names of the folders of this process's threads. While one ends, Linux may leave out others:
    they are listed until two lists are equal."""
    last, found = None, set(os.listdir("/proc/self/task"))
    while found != last:
        last, found = found, set(os.listdir("/proc/self/task"))
    return found


def inputs() -> tuple[torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.ones(WIDTH), 1e-6


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_a_team_does_what_one_thread_does(norm: Provider, threads: int) -> None:
    """Turns red when a round is lost, computed twice, or its result read too early; members sleep
    between some rounds and spin between others."""
    given = inputs()
    expected = norm.load()(*given)
    call = norm.load(Team(threads))
    for round_number in range(300):
        assert torch.equal(call(*given), expected)
        if round_number % 50 == 0:
            threading.Event().wait(0.002)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads through /proc")
def test_threads_end_with_the_team(norm: Provider) -> None:
    """Turns red when an engine that was shut down leaves threads behind."""
    before = tasks()
    call = norm.load(Team(4))
    call(*inputs())
    members = tasks() - before  # threads of earlier tests may end meanwhile
    assert len(members) == 3
    del call
    gc.collect()
    assert not members & tasks()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no priority")
def test_members_may_give_way(norm: Provider) -> None:
    """Turns red when an encoder's threads take cores from steps, or steps get their priority."""
    own, before = os.getpriority(os.PRIO_PROCESS, 0), tasks()
    given = inputs()
    for team, wanted in ((Team(3, gives_way=True), LOWEST), (Team(3), own)):
        call = norm.load(team)
        assert torch.equal(call(*given), norm.load()(*given))
        # The thread that started them has ended for Python, and has to wait until Linux lets it.
        wait_for(lambda known=before: len(tasks() - known) == 2, "the members alone")
        members = tasks() - before
        found = [os.getpriority(os.PRIO_PROCESS, int(member)) for member in members]
        assert found == [wanted] * 2
        before |= members
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_two_callers_at_once_both_get_their_results(norm: Provider) -> None:
    """Turns red when a second caller's work replaces the first one's."""
    given = inputs()
    expected = norm.load()(*given)
    call = norm.load(Team(2))
    wrong: list[int] = []

    def compute() -> None:
        wrong.extend(i for i in range(200) if not torch.equal(call(*given), expected))

    callers = [threading.Thread(target=compute) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORKED = """
import os, torch
from quire.ops import ALL_OPS, Team
from quire.base.platform import detect_platform
from quire.base.platform.priority import LOWEST
here = detect_platform()
provider = next(p for p in ALL_OPS["rms_norm"].providers if p.unavailable(here) is None)
call = provider.load(Team(3))
x = torch.randn(2000, 512)
expected = call(x, x[0], 1e-6)
child = os.fork()
if child == 0:
    ok = torch.equal(call(x, x[0], 1e-6), expected)
    del call
    raise SystemExit(0 if ok else 3)  # runs what ends a process in the ordinary way
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


TOO_MANY = """
import resource
from quire.base.errors import EngineError
from quire.ops import ALL_OPS, Team
from quire.base.platform import detect_platform
from quire.base.platform.priority import LOWEST
here = detect_platform()
provider = next(p for p in ALL_OPS["rms_norm"].providers if p.unavailable(here) is None)
with open("/proc/self/status") as status:
    mapped = 1024 * int(next(line for line in status if line.startswith("VmSize")).split()[1])
_, hard = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, (8 * 2**20, hard))  # of each new thread
resource.setrlimit(resource.RLIMIT_AS, (mapped + 40 * 2**20,) * 2)  # room for some, not for all
try:
    provider.load(Team(64))
except EngineError as error:
    assert "no 64 threads" in str(error), error
    raise SystemExit(0)
raise SystemExit(4)
"""


DRAWS_AT_THE_END = """
import threading, time, torch
from quire.ops import ALL_OPS, Team
from quire.base.platform import detect_platform
from quire.base.platform.priority import LOWEST
here = detect_platform()
provider = next(p for p in ALL_OPS["draw"].providers if p.unavailable(here) is None)
call, count = provider.load(Team(3)), 2_000_000
number, integer = torch.ones(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
logits = torch.randn(1, 500_000)
minutes = lambda: call(logits, integer, number, integer, number * 0.9, 0 * number, *[integer] * 3)
threading.Thread(target=minutes, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.usefixtures("norm")
def test_the_interpreter_ends_while_a_daemon_thread_computes() -> None:
    """Turns red when the end waits for a kernel, or takes its team away while it runs."""
    done = subprocess.run(
        [sys.executable, "-c", DRAWS_AT_THE_END], timeout=WAIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("norm")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads sizes through /proc")
def test_too_many_threads_are_refused() -> None:
    """Turns red when a process ends without a word because the system gives it only some of the
    threads that it was told to use."""
    done = subprocess.run(
        [sys.executable, "-c", TOO_MANY], timeout=WAIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("norm")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_alone_and_ends() -> None:
    """Turns red when a child waits for threads that stayed with its parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], timeout=WAIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
