"""Starts, watches and ends ranks on hosts of a Ray cluster. Rank 0 is in this process."""

from __future__ import annotations

import atexit
import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from quire.base.errors import EngineError, EngineLostError
from quire.compute.executor.processes.group import error_of
from quire.compute.executor.processes.messages import (
    RankLaunch,
    RankMeeting,
    RankMessage,
    RankReply,
)
from quire.compute.executor.ray.cluster import RayHosts
from quire.compute.executor.ray.link import Link
from quire.compute.executor.ray.messages import HostHello, HostLaunch, HostMessage, HostReply
from quire.ops.distributed.gloo import GlooMeeting, GlooStore
from quire.protocol.codec import Codec, GarbledMessageError, encode

__all__ = ["RayRankGroup"]

logger = logging.getLogger("quire")

START_S = 120.0
"""Seconds for Ray's worker on a host to import its libraries and say hello."""
LOOK_S = 1.0
HELLO_BYTES, HELLO_S = 4096, 3.0
"""Limits for a peer that has not said who it is."""


@dataclass(frozen=True, slots=True)
class _Host:
    """ranks: ranks on that host. pid: id of the process that holds them."""

    ranks: tuple[int, ...]
    pid: int
    link: Link


class RayRankGroup:
    """A `RankGroup` for ranks on several hosts. A host is lost if its connection breaks or falls
    silent, or if Ray reports that its process has ended; the group is lost with it."""

    def __init__(
        self,
        launch: RankLaunch,
        on_lost: Callable[[str], None],
        rank_bytes: int,
        host_bytes: int,
    ) -> None:
        """launch: launch of rank 0, without descriptors. on_lost: same as in `RankGroup`, called in
        any thread. rank_bytes: memory that each rank plans with. host_bytes: see `RayHosts`."""
        self._launch = launch
        self._rank_bytes, self._host_bytes = rank_bytes, host_bytes
        self._on_lost = on_lost
        self._hosts: list[_Host] = []
        self._threads: list[threading.Thread] = []
        self._replies = queue.SimpleQueue[HostReply]()
        self._lock = threading.Lock()
        self._lost = ""
        self._is_serving = False
        self._is_ending = threading.Event()
        self._ray = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-ray")
        self._placed: RayHosts | None = None
        self._store: GlooStore | None = None
        self._meeting: GlooMeeting | None = None

    @property
    def meeting(self) -> GlooMeeting:
        """The place where rank 0 meets the others; after `start`."""
        assert self._meeting is not None, "start comes first"
        return self._meeting

    @property
    def pids(self) -> list[int]:
        """Process ids, on their hosts, of those that hold the ranks."""
        return [host.pid for host in self._hosts]

    @property
    def moved_pipes(self) -> list[int]:
        """None: K/V of several hosts go to no disk, and settings said so."""
        return []

    def start(self) -> None:
        """Have Ray place and start the ranks; `replies` tells how that ended. Raises ConfigError if
        there is no room, EngineError if they cannot be started."""
        self._ray.submit(self._start).result()
        atexit.register(self.shutdown)  # before Ray ends, which would look like a loss
        for host in self._hosts:
            self._run(self._receive, host)
        self._run(self._watch)

    def send(self, kind: RankMessage, message: bytes) -> None:
        """Send a message to all ranks. Raises EngineLostError if one is missing."""
        self.check()
        for host in self._hosts:
            try:
                host.link.send(kind, message)
            except EngineLostError as error:
                self._lose(f"{_name_of(host)}: {error}")
                self.check()

    def check(self) -> None:
        """Raise EngineLostError if a rank is lost."""
        if self._lost:
            raise EngineLostError(f"{self._lost}: start a new engine")

    def replies(self) -> list[RankReply]:
        """Wait for one answer of each rank. Raises the first error among them."""
        found: list[RankReply] = []
        while len(found) < self._launch.size - 1:
            is_over = bool(self._lost) or self._is_ending.is_set()
            try:
                answer = self._replies.get(timeout=0.1)
            except queue.Empty:
                if is_over:
                    break
                continue
            found.append(Codec[RankReply](RankReply).decode(answer.reply))
        for reply in found:
            if reply.error:
                raise error_of(reply)
        self.check()
        if len(found) < self._launch.size - 1:
            raise EngineLostError("the ranks were shut down before all had answered")
        return found

    def first_failed(self, error: BaseException) -> None:
        """Tell the group that a step of rank 0 ended outside of the common order."""
        self._lose(f"rank 0 failed ({type(error).__name__}: {error})")

    def serve(self) -> None:
        """The start has succeeded: call `on_lost` from now on."""
        self._is_serving = True
        self.check()

    def shutdown(self) -> None:
        """End all ranks, and wait until they have: `replies` ends too. May be called twice."""
        atexit.unregister(self.shutdown)
        self._is_ending.set()
        for host in self._hosts:
            host.link.close()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._placed is not None:
            try:
                ended = self._ray.submit(self._placed.end)
            except RuntimeError:  # as in `_watch`: Ray's thread has ended
                self._placed.end()
            else:
                ended.result()
            self._placed = None
        self._ray.shutdown()

    def close(self) -> None:
        """Close the store, after `shutdown`."""
        self._store = None

    # --- in Ray's thread ------------------------------------------------------------------------

    def _start(self) -> None:
        threads = _threads_of(self._launch)
        self._placed = placed = RayHosts(
            self._launch.size - 1, threads, self._rank_bytes, self._host_bytes
        )
        address, token = placed.own_address, secrets.token_hex(16)
        self._store = GlooStore(address)
        self._meeting = GlooMeeting(
            self._launch.size, address, self._store.port, address, self.check
        )
        launch = msgspec.structs.replace(
            self._launch, meeting=RankMeeting(address, self._store.port)
        )
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            asked: list[HostLaunch] = []
            for number, bundles in enumerate(placed.bundles.values()):
                ranks = tuple(1 + bundle for bundle in bundles)
                asked.append(HostLaunch(address, port, token, number, ranks, launch))
                placed.start(bundles[0], encode(asked[-1]))
            self._accept_all(server, placed, asked)

    def _accept_all(self, server: socket.socket, placed: RayHosts, asked: list[HostLaunch]) -> None:
        """Wait for a connection from each host. Raises EngineError if one does not come."""
        deadline = time.monotonic() + START_S
        server.settimeout(LOOK_S)
        missing = {launch.host: launch for launch in asked}
        while missing:
            if reason := placed.ended():
                raise EngineError(f"a host's process ended before it had started: {reason}")
            if time.monotonic() > deadline:
                ranks = sorted(rank for launch in missing.values() for rank in launch.ranks)
                raise EngineError(f"ranks {ranks} have not connected within {START_S:.0f} s")
            try:
                connected, _ = server.accept()
            except TimeoutError:
                continue
            link = Link(connected)
            hello = _hello(link, asked[0].token)
            launch = None if hello is None else missing.pop(hello.host, None)
            if hello is None or launch is None:
                link.close()
                continue
            self._hosts.append(_Host(launch.ranks, hello.pid, link))

    # --- in threads of their own ----------------------------------------------------------------

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="quire-hosts", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _receive(self, host: _Host) -> None:
        """Read the host's messages until it is lost."""
        codec = Codec[HostReply](HostReply)
        try:
            while True:
                kind, message = host.link.receive()
                if kind == HostMessage.REPLY:
                    self._replies.put(codec.decode(message))
                elif kind == HostMessage.LOST:
                    self._lose(message.decode())
        except (EngineLostError, GarbledMessageError) as error:
            self._lose(f"{_name_of(host)}: {error}")

    def _watch(self) -> None:
        """Ask Ray whether all processes still run."""
        placed = self._placed
        assert placed is not None, "it has placed them"
        while not self._is_ending.wait(LOOK_S):
            try:
                asked = self._ray.submit(placed.ended)
            except RuntimeError:  # the interpreter ends, and threads take no more work
                return
            if reason := asked.result():
                self._lose(f"a host's process has ended: {reason}")
                return

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._is_ending.is_set() or self._lost:
                return
            self._lost = reason
        if self._is_serving:
            logger.error("%s; the other ranks are ended", reason)
            self._on_lost(reason)
        for host in self._hosts:
            host.link.close()


def _threads_of(launch: RankLaunch) -> int:
    """Return how many threads each rank has."""
    asked = launch.settings["num_threads"]
    assert isinstance(asked, int), "the plan of rank 0 says how many"
    return asked


def _hello(link: Link, token: str) -> HostHello | None:
    """Return a peer's first message; None if it does not know the token or is slow."""
    try:
        kind, message = link.receive(most=HELLO_BYTES, within=HELLO_S)
        hello = Codec[HostHello](HostHello).decode(message)
    except (EngineLostError, GarbledMessageError):
        return None
    is_known = kind == HostMessage.HELLO and hmac.compare_digest(hello.token, token)
    return hello if is_known else None


def _name_of(host: _Host) -> str:
    ranks = ", ".join(map(str, host.ranks))
    return f"the host of rank {ranks} (process {host.pid})"
