"""`quire serve` as a process over the fake core: the whole front, real processes and sockets, and
an engine that costs little and whose tokens are known.

Run with one argument, the JSON of `FakeServeOptions`. The port is whichever is free; the first line
of the front names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

from quire.config.settings import EngineSettings  # noqa: E402
from quire.engine.supervision.supervisor import EngineSupervisor, RestartPolicy  # noqa: E402
from quire.server import Limits, ServerSettings, run_server  # noqa: E402
from quire.server.processes import sole_front  # noqa: E402
from tests.engine.fake_core_process import FakeCoreOptions  # noqa: E402
from tests.forked import TEMPLATE, Forked, OwnTemplate, core_starter, name_of, template_of  # noqa: E402
from tests.waiting import wait_for  # noqa: E402

__all__ = ["FakeServeOptions", "FakeServer", "fake_server", "sole_front"]


@dataclasses.dataclass(frozen=True)
class FakeServeOptions:
    """limits: values of `Limits` that differ from their defaults. restarts_at_once: replace every
    core that died without a pause."""

    core: FakeCoreOptions = dataclasses.field(default_factory=FakeCoreOptions)
    limits: dict[str, Any] = dataclasses.field(default_factory=dict)
    shutdown_timeout: float = 120.0
    enable_engine_control: bool = False
    restarts_at_once: bool = False


@dataclasses.dataclass(frozen=True)
class FakeServer:
    """process: the front. directory: folder in which it may leave files."""

    process: subprocess.Popen[bytes] | Forked
    port: int
    directory: Path
    core: FakeCoreOptions

    def descendants(self) -> list[int]:
        """Return the processes below the front: the core."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            return [int(child) for child in path.read_text().split() if name_of(child) != TEMPLATE]
        return []

    def num_files(self) -> int:
        """Return the number of files open in the front."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_bytes(self) -> int:
        """Return the bytes that the front has in memory."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def fake_server(options: FakeServeOptions, *, is_forked: bool = False) -> Iterator[FakeServer]:
    """Yield a server whose port is open. It is killed at the end if it still runs. is_forked: fork
    it and its cores (tests/forked.py), in place of starting Python."""
    with tempfile.TemporaryDirectory(prefix="q") as directory, tempfile.TemporaryFile() as written:
        process = _started(options, {**os.environ, "TMPDIR": directory}, written, is_forked)
        try:
            port = wait_for(lambda: named_port(process, written), "port of the server")
            yield FakeServer(process, port, Path(directory), options.core)
        finally:
            process.kill()
            process.wait()
            wait_until_gone(process.pid)


def _started(
    options: FakeServeOptions, environment: dict[str, str], written: IO[bytes], is_forked: bool
) -> subprocess.Popen[bytes] | Forked:
    argument = json.dumps(dataclasses.asdict(options))
    with open(os.devnull, "r+b") as nowhere:
        if is_forked:
            given = {0: nowhere.fileno(), 1: nowhere.fileno(), 2: written.fileno()}
            template = template_of("tests.server.fake_serve")
            function = "tests.server.fake_serve:forked_main"
            return Forked(template.start(function, [argument], given, environment))
        return subprocess.Popen(
            [sys.executable, __file__, argument],
            stdout=nowhere,
            stderr=written,
            env=environment,
            start_new_session=True,
        )


def named_port(process: subprocess.Popen[bytes] | Forked, written: IO[bytes]) -> int | None:
    """The port in what the front has written so far."""
    status = process.poll()  # before it is read: a process that ended has written all
    text = os.pread(written.fileno(), 65536, 0).decode()
    found = re.search(r"listens on http://127\.0\.0\.1:(\d+) ", text)
    assert found or status is None, f"the server ended with status {status}: {text}"
    return int(found[1]) if found else None


def wait_until_gone(session: int) -> None:
    """Wait until no process of a session is left."""
    wait_for(lambda: not members_of(session), f"end of the processes of session {session}")


def listening_sockets(port: int) -> set[str]:
    """Kernel's numbers of the sockets that listen on a port. A port that was freed may be
    another program's at once, so that only these numbers tell whether a server has left it."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    found = (line.split() for line in lines)
    return {each[9] for each in found if (int(each[1][-4:], 16), each[3]) == (port, "0A")}


def members_of(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of_process = path.read_text().rpartition(")")[2].split()[:4]
            if int(of_process) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def forked_main() -> int:
    """Serve in a session of its own. Cores are forked too."""
    os.setsid()
    EngineSupervisor._start_process = core_starter(OwnTemplate())  # type: ignore[method-assign]
    return main()


def main() -> int:
    given = json.loads(sys.argv[1])
    core = FakeCoreOptions(**given["core"])
    server = ServerSettings(
        port=0,
        disable_access_log=True,
        shutdown_timeout=given["shutdown_timeout"],
        enable_engine_control=given["enable_engine_control"],
        limits=Limits(**given["limits"]),
    )
    policy = RestartPolicy(0.0, 0.0) if given["restarts_at_once"] else None
    make_supervisor = partial(EngineSupervisor, command=core.command(), restart_policy=policy)
    return run_server(EngineSettings(), server, make_supervisor=make_supervisor)


if __name__ == "__main__":
    sys.exit(main())
