"""Forked processes are what spawned ones would be (tests/forked.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.forked import ForkedProcess, ForkedRank, Template, template_of
from tests.waiting import WAIT_S

COMMAND = (sys.executable, __file__)


def main() -> int:
    """Tell what this process is, and end as its input says."""
    _, place, *arguments = sys.argv
    told = {
        "parent": os.getppid(),
        "arguments": arguments,
        "environment": os.environ.get("OF_THIS_TEST"),
        "folder": os.getcwd(),
        "open": [each for each in range(256) if Path(f"/proc/self/fd/{each}").exists()],
    }
    Path(place).write_text(json.dumps(told))
    return int(sys.stdin.readline())


@pytest.fixture
def template() -> Template:
    return template_of("tests.test_forked")


def test_a_forked_process_is_a_child_with_what_it_was_given(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "here")
    monkeypatch.chdir(tmp_path)

    async def work() -> int:
        process = ForkedProcess(template, (*COMMAND, str(tmp_path / "told"), "a", "b"))
        assert process.returncode is None
        process.stdin.write(b"7\n")
        return await process.wait()

    assert asyncio.run(asyncio.wait_for(work(), WAIT_S)) == 7
    assert json.loads((tmp_path / "told").read_text()) == {
        "parent": os.getpid(),
        "arguments": ["a", "b"],
        "environment": "here",
        "folder": str(tmp_path),
        "open": [0, 1, 2],
    }


def test_the_end_of_a_forked_process_is_learnt(template: Template, tmp_path: Path) -> None:
    async def work() -> None:
        killed, failed = (
            ForkedProcess(template, (*COMMAND, str(tmp_path / name))) for name in ("a", "b")
        )
        killed.kill()
        assert await killed.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            killed.kill()
        failed.stdin.close()  # it reads no number
        assert await failed.wait() == 1

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_a_forked_rank_has_its_descriptors(template: Template, tmp_path: Path) -> None:
    read, write = os.pipe()
    rank = ForkedRank(template, (*COMMAND, str(tmp_path / "told")), [write])
    os.close(write)
    assert rank.poll() is None
    rank.stdin.write(b"3\n")
    rank.stdin.close()
    assert (rank.wait(WAIT_S), rank.poll()) == (3, 3)
    assert os.read(read, 1) == b"", "it has the pipe's other end no more"
    os.close(read)
    assert json.loads((tmp_path / "told").read_text())["open"] == sorted([0, 1, 2, write])
