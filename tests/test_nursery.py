"""Processes of a nursery are as others: files, arguments, environment, parent, end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import USUAL, Nursery

SCRIPT = """
import json, os, sys
if sys.argv[1:] == ["waits"]:
    print("here", flush=True)
    sys.stdin.read()
told = sys.stdin.read()
os.write(int(sys.argv[2]), b"through")
sys.stderr.write("trouble")
own = open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
found = [told, sys.argv[1:], os.environ["QUIRE_X"], os.getppid(), os.getcwd(), own, files]
print(json.dumps(found))
print(json.dumps([__name__, sys.path[0], os.getsid(0) == os.getpid(), "torch" in sys.modules]))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nursery") / "told.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    with contextlib.closing(Nursery()) as each, each:
        yield


def started(script: str, cwd: Path) -> tuple[int, list[Any], list[Any], str, bytes]:
    """Return the status, what the process says of itself, its errors and what a pipe of it had."""
    read, write = os.pipe()
    command = [sys.executable, script, "a b", str(write)]
    done = subprocess.run(
        command,
        input="told",
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "QUIRE_X": "x"},
        pass_fds=(write,),
        start_new_session=True,
    )
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        through = pipe.read()
    first, second = map(json.loads, done.stdout.splitlines())
    assert first[5] == command
    first[6] = [file for file in first[6] if file != write]
    return done.returncode, first, second, done.stderr, through


def test_forks_are_as_others(script: str, tmp_path: Path) -> None:
    usual = started(script, tmp_path)
    forked = started(script, tmp_path)
    assert (usual[2][-1], forked[2][-1]) == (False, True), "the first one of a script is no fork"
    assert usual[1][3] == os.getpid()
    for result in (usual, forked):
        result[2].pop()
        result[1][1].pop()
        result[1][5].pop()
    assert forked == usual
    assert usual[0] == 7 and usual[3:] == ("trouble", b"through")


def test_a_fork_is_killed_and_waited_for(script: str) -> None:
    command = [sys.executable, script, "waits"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONPATH"])
def test_variables_that_imports_read_need_a_usual_start(script: str, name: str) -> None:
    nursery = Nursery()
    start = {**USUAL, "args": [sys.executable, script], "pass_fds": (), "env": dict(os.environ)}
    assert not nursery.serves(start)
    assert nursery.serves(start)
    assert not nursery.serves(start | {"env": {**os.environ, name: "other"}})
    assert not nursery.serves(start | {"args": [sys.executable, "-c", "pass"]})
