"""Processes that start as forks of one process, which has imported what they will import.

The nursery runs this file with the number of a socket, and a long argument that makes room for the
command lines of forks. It has one thread. A fork runs its module or script as `__main__` with its
own files, arguments, environment and directory, and is a child of the process that asked. An
engine core has a nursery of its own, for its ranks. A server starts its core as usual: uvloop does.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["USUAL", "Nursery"]

MODULES = (
    "quire.engine.build",
    "quire.engine.supervision.core_process",
    "quire.executor.processes.rank_process",
    "quire.server.app",
    "quire.server.processes.front_process",
    "torch",
    "uvicorn",
)
STARTERS = frozenset({"core", "quire.engine.supervision.core_process"})
"""Arguments of processes that start others."""
PR_SET_CHILD_SUBREAPER = 36
MAX_FILES = 64
ABOVE = 200
"""Lowest number at which files are held until all have been received."""
HEADER = 8
"""Bytes of a length, and of a process id."""
FREE = ("CUDA_DEVICE_ORDER", "PYTEST_", "QUIRE_", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_")
"""Beginnings of variables that no import reads."""
STANDARD = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
USUAL: Mapping[str, Any] = {
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "executable": None,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "restore_signals": True,
    "process_group": -1,
}
"""Arguments of a start that the nursery serves."""

Start = Mapping[str, Any]
"""Arguments of `Popen._execute_child` by name."""


class Nursery:
    """The side that asks. `close` ends the other one, and so does the end of this process."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """connection: to a nursery that serves every start; None for one that is made when needed,
        and leaves out the first start of each module and script."""
        self._lock = threading.Lock()
        self._serves_first = connection is not None
        self._seen: set[str] = set()
        self._environment = dict(os.environ)
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None
        self._usual = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]
        self._names = list(inspect.signature(self._usual).parameters)[1:]

    def __enter__(self) -> Self:
        """Serve `subprocess.Popen`, and with it asyncio."""
        usual, names = self._usual, self._names

        @functools.wraps(usual)
        def execute(popen: subprocess.Popen[Any], *values: Any) -> None:
            start = dict(zip(names, values, strict=True))
            if not self.serves(start):
                usual(popen, *values)
                return
            popen.pid = self._start(start)
            popen._child_created = True  # pyright: ignore[reportAttributeAccessIssue]
            popen._close_pipe_fds(*(start[name] for name in PIPES))  # pyright: ignore

        subprocess.Popen._execute_child = execute  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.Popen._execute_child = self._usual  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()

    def serves(self, start: Start) -> bool:
        """Return whether to fork: no code on the command line, which may look at what is imported,
        and no variables that may change what imports do."""
        command = start["args"]
        if not isinstance(command, list | tuple) or len(command) < 2:
            return False
        if command[0] != sys.executable or any(start[n] != v for n, v in USUAL.items()):
            return False
        kind = command[2] if command[1] == "-m" and len(command) > 2 else command[1]
        if kind.startswith("-") or not (command[1] == "-m" or kind.endswith(".py")):
            return False
        if _decisive(start["env"] or os.environ) != _decisive(self._environment):
            return False
        with self._lock:
            is_first = not self._serves_first and kind not in self._seen
            self._seen.add(kind)
        return not is_first and len(start["pass_fds"]) + len(STANDARD) <= MAX_FILES

    def _start(self, start: Start) -> int:
        """Return the id of a new child of this process."""
        files = {number: start[name] if start[name] != -1 else number for name, number in STANDARD}
        files.update({int(file): int(file) for file in start["pass_fds"]})
        order = {
            "command": [os.fspath(part) for part in start["args"]],
            "numbers": list(files),
            "cwd": os.fspath(start["cwd"] or os.getcwd()),
            "environment": dict(start["env"] or os.environ),
            "new_session": start["start_new_session"],
        }
        with self._lock:
            return self._ask(json.dumps(order).encode(), list(files.values()))

    def _ask(self, order: bytes, files: Sequence[int]) -> int:
        connection = self._connection = self._connection or self._open()
        _adopt_orphans(True)  # the fork's parent ends at once
        try:
            socket.send_fds(connection, [len(order).to_bytes(HEADER, "big")], files)
            connection.sendall(order)
            found = connection.recv(HEADER + 1, socket.MSG_WAITALL)
        finally:
            _adopt_orphans(False)
        assert len(found) == HEADER + 1, "the nursery has ended"
        return int.from_bytes(found[:HEADER], "big")

    def _open(self) -> socket.socket:
        own, other = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno()), " " * 4000],
            stdin=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
            env={
                **self._environment,
                "OPENBLAS_NUM_THREADS": "1",
            },  # else it has threads
        )
        other.close()
        return own


def _decisive(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: value for n, value in environment.items() if not n.startswith(FREE)}


def _adopt_orphans(is_wanted: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted))


# --- the nursery ----------------------------------------------------------------------------------


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each message, until the other end is closed. Returns in each fork, with what it
    shall run. A signal to a group of processes ends no nursery."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    while True:
        header, files, _, _ = socket.recv_fds(connection, HEADER, MAX_FILES)
        if not header:
            os._exit(0)
        order = json.loads(_read(connection, int.from_bytes(header, "big")))
        between = os.fork()
        if not between:
            own = os.getpid()
            child = os.fork()
            if child:
                connection.sendall(child.to_bytes(HEADER, "big"))
                os._exit(0)
            while os.getppid() == own:
                time.sleep(0.0005)
            connection.close()
            _become(order, files)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return order
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        connection.sendall(b".")


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := connection.recv(size - len(found))):
            os._exit(0)
        found += part
    return found


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Take the files, directory, environment, command line and session of the new process."""
    held = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(held, order["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    if order["new_session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None
    _show(order["command"])


def _show(command: list[str]) -> None:
    """Overwrite the command line that other processes see."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(os.fsencode(part) for part in command)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def _nested() -> tuple[dict[str, Any] | None, Nursery | None]:
    """Fork a nursery for this process. Returns this process's side of it; and in a fork of that,
    what to run."""
    own, other = socket.socketpair()
    if os.fork():
        other.close()
        return None, Nursery(own)
    number = os.dup2(other.fileno(), ABOVE)
    null = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(null, file)
    os.closerange(3, ABOVE)
    os.closerange(ABOVE + 1, ABOVE + 1000)
    for each in (own, other):
        each.detach()
    _show(["nursery"])
    return serve(socket.socket(fileno=number)), None


def run(arguments: list[str]) -> None:
    """Do what the interpreter does with these arguments."""
    if arguments[0] == "-m":
        name = arguments[1]
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = str(Path(__file__).parents[1])
    for name in MODULES:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a thread runs that no fork would have")
    gc.collect()
    gc.freeze()
    order = serve(connection)
    if not STARTERS.isdisjoint(order["command"]):
        inner, nursery = _nested()
        order = inner or order
        if nursery is not None:
            nursery.__enter__()
    run(order["command"][1:])


if __name__ == "__main__":
    main()
