"""Python processes that are forked from one which has imported what they need. A start costs
milliseconds in place of the second of the processor that imports take.

A forked process is a child of the caller as a spawned one is: the same standard streams,
environment and signals, and the caller learns how it ends. What the start itself shows, a test of a
spawned process has to show.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]

__all__ = [
    "FAKE", "REAL", "SERVER", "TEMPLATE", "Forked", "ForkedProcess", "ForkedRank", "ForkedServer",
    "OwnTemplate", "Template", "core_starter", "name_of", "rank_starter", "template_of",
]  # fmt: skip

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
MAX_BYTES = 2**17
"""Longest message: arguments and environment."""
TEMPLATE = "quire-template"
"""Name of a template among the processes."""
MAX_DESCRIPTORS = 32
ENVIRONMENT = dict(os.environ)
"""Environment of templates, without what one test sets for itself."""
_one_at_a_time = threading.Lock()
"""Taken to start a process: whether this process adopts others holds for all of its threads."""
FAKE, REAL = "tests.engine.fake_core_process", "tests.engine.real_core_process"
"""Modules that import all that a core needs: a fake one, and a real one with its ranks."""
SERVER = "tests.server.forked_serve"
"""The module that imports what a server needs, and its core."""


@functools.cache
def template_of(module: str) -> Template:
    """The template of what imports this module. It lives as long as this process."""
    return Template(module)


class Template:
    """A process that has imported what `module` does, and forks processes that call a function."""

    def __init__(self, module: str) -> None:
        self._orders, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, module, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=ENVIRONMENT,
            )
        atexit.register(self.close)

    def start(
        self,
        function: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        environment: Mapping[str, str] = os.environ,
    ) -> int:
        """Fork a process that ends with the status that `function`, "module:name", returns. Returns
        its id. descriptors: descriptors of this process by the number that they shall have there;
        no others are open there."""
        told = {
            "parent": os.getpid(),
            "function": function,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "descriptors": list(descriptors),
        }
        message = json.dumps(told).encode()
        assert len(message) <= MAX_BYTES and len(descriptors) <= MAX_DESCRIPTORS
        with _one_at_a_time, _adopting():
            socket.send_fds(self._orders, [message], list(descriptors.values()))
            answer = self._orders.recv(64)
        if not answer:
            raise OSError("the template has ended")
        return int(answer)

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


class OwnTemplate(Template):
    """A template that has imported what this process has. Make it while no thread but this runs."""

    def __init__(self) -> None:
        self._orders, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._orders.close()
            _end_with(_serve(other))
        other.close()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt grandchildren when their parent ends."""
    _control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _control(PR_SET_CHILD_SUBREAPER, 0)


def _control(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class ForkedProcess:
    """A process with the part of `asyncio.subprocess.Process` that a supervisor uses, within one
    event loop."""

    def __init__(
        self,
        template: Template,
        command: Sequence[str],
        descriptors: Sequence[int] = (),
        has_output: bool = False,
    ) -> None:
        """command: command to spawn it. descriptors: numbers of descriptors that it gets, beside
        its standard streams. has_output: make its standard output a pipe to this process."""
        read, write = os.pipe()
        out, out_write = os.pipe() if has_output else (-1, 1)
        given = {0: read, 1: out_write, 2: 2, **{each: each for each in descriptors}}
        self.stdout = _Output(out) if has_output else None
        try:
            self.pid = template.start(*_function_of(command), given)
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
            if has_output:
                os.close(out_write)
        self.stdin = _Input(write)
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self.stdin.close()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)


class Forked:
    """A process with a part of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(self.pid)
        self._ending = threading.Lock()

    def poll(self) -> int | None:
        with self._ending:
            if self.returncode is None and _is_readable(self._pidfd, 0.0):
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not _is_readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        status = self.poll()
        assert status is not None, "it has ended"
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRank(Forked):
    """A process as a `RankGroup` starts it."""

    def __init__(
        self, template: Template, command: Sequence[str], descriptors: Sequence[int]
    ) -> None:
        """command: command to spawn it. descriptors: numbers of descriptors that it gets, beside
        a pipe to its standard input."""
        read, write = os.pipe()
        with open(os.devnull, "wb") as nowhere:
            given = {0: read, 1: nowhere.fileno(), 2: 2, **{each: each for each in descriptors}}
            try:
                super().__init__(template.start(*_function_of(command), given))
            except BaseException:
                os.close(write)
                raise
            finally:
                os.close(read)
        self.stdin = os.fdopen(write, "wb")


class ForkedServer(Forked):
    """A process whose output is text in pipes. As a context it is waited for, as `Popen` is."""

    def __init__(
        self, template: Template, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        out, err = os.pipe(), os.pipe()
        given = {0: 0, 1: out[1], 2: err[1]}
        try:
            super().__init__(template.start(f"{SERVER}:main", arguments, given, environment))
        finally:
            os.close(out[1])
            os.close(err[1])
        self.stdout, self.stderr = os.fdopen(out[0]), os.fdopen(err[0])

    def __enter__(self) -> ForkedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def rank_starter(template: Callable[[], Template]) -> Callable[[Any, Sequence[int]], ForkedRank]:
    """Return a `RankGroup._start_process` that forks. template: called for each rank."""

    def start_process(group: Any, descriptors: Sequence[int]) -> ForkedRank:
        return ForkedRank(template(), group._command, descriptors)

    return start_process


def core_starter(template: Template, module: str = "") -> Callable[[Any], Awaitable[Any]]:
    """Return an `EngineSupervisor._start_process` that forks. module: its `main` is called with the
    core's own as first argument."""

    async def start_process(supervisor: Any) -> ForkedProcess:
        command = supervisor._command
        if module:
            function, arguments = _function_of(command)
            command = (sys.executable, "-m", module, function, *arguments)
        return ForkedProcess(template, command)

    return start_process


def name_of(process: int | str) -> str:
    """Name of a process, "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _function_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The `main` of the file or module that a command of Python runs, and its arguments."""
    _, file, *arguments = command
    if file == "-m":
        return f"{arguments[0]}:main", arguments[1:]
    module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    return f"{module}:main", arguments


class _Input:
    """The pipe to the standard input of a process; it takes what it is given at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is seen next
            while data:
                data = data[os.write(self._descriptor, data) :]

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Output:
    """The pipe from the standard output of a process."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._pipe = os.fdopen(descriptor, "rb", buffering=0)

    async def read(self, most: int) -> bytes:
        """Wait for output and return it; empty at the end."""
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        while (found := self._pipe.read(most)) is None:
            is_readable.clear()
            loop.add_reader(self._pipe, is_readable.set)
            try:
                await is_readable.wait()
            finally:
                loop.remove_reader(self._pipe)
        return found


# --- in the template ------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> str:
    """Fork until the caller has ended. Returns a function's name in a forked process, "" at the
    end."""
    _control(PR_SET_NAME, TEMPLATE.encode())
    while True:
        try:
            message, given, _, _ = socket.recv_fds(orders, MAX_BYTES, MAX_DESCRIPTORS)
        except KeyboardInterrupt:
            return ""
        if not message:
            return ""
        told = json.loads(message)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            own_pid, pid = os.getpid(), os.fork()
            if pid:
                os.write(write, b"%d" % pid)
                os._exit(0)  # the caller adopts the process below this one
            for own in (read, write, orders.detach()):
                os.close(own)
            while os.getppid() == own_pid:  # until the one between has ended
                time.sleep(0.001)
            if os.getppid() != told["parent"]:
                os._exit(1)  # the caller has ended too
            _control(PR_SET_NAME, _name_of(told["function"]).encode())
            _become(told, given)
            return told["function"]
        os.close(write)
        os.waitpid(between, 0)
        for descriptor in given:
            os.close(descriptor)
        orders.send(os.read(read, 64))
        os.close(read)


def _become(told: dict[str, Any], given: Sequence[int]) -> None:
    """Take what this process was given."""
    numbers: list[int] = told["descriptors"]
    free = max([*numbers, *given]) + 1
    moved = [free + i for i in range(len(given))]
    for descriptor, place in zip(given, moved, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    for number, place in zip(numbers, moved, strict=True):
        os.dup2(place, number)
        os.close(place)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv[1:] = told["arguments"]


def _name_of(function: str) -> str:
    """Name that a process gets: its module."""
    return function.partition(":")[0].rpartition(".")[2]


def _end_with(function: str) -> NoReturn:
    """Call "module:name", if it is not "", and end with the status that it returns. Threads are
    waited for and functions of `atexit` run, as always; modules are left as they are, since taking
    them apart costs half a second of the processor."""
    status: object = 0
    try:
        if function:
            module, _, name = function.partition(":")
            status = getattr(importlib.import_module(module), name)()
    except SystemExit as ended:
        status = ended.code
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        sys.stderr.write(f"{status}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


def main() -> NoReturn:
    sys.path[0] = str(ROOT)  # in place of this file's folder
    importlib.import_module(sys.argv[1])
    gc.collect()
    gc.freeze()
    _end_with(_serve(socket.socket(fileno=int(sys.argv[2]))))


if __name__ == "__main__":
    main()
