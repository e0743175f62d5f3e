"""Two network namespaces of this machine as two hosts: Ray starts ranks on both, the network
between them fails, one of them ends. In soaks; skipped without Ray, or where namespaces cannot be
made."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.executor import host_engine
from tests.executor.ray_cluster import IN_SOAKS
from tests.models.families import Case, write_checkpoint
from tests.waiting import wait_for

pytestmark = [
    IN_SOAKS,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and ip"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379
NOTICED_S = 6.0
"""Silence of 3 s is a loss; the rest is for a busy machine."""


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


class Hosts:
    """Namespaces with one network between them: the head, without room for ranks, and a node."""

    def __init__(self) -> None:
        suffix = os.getpid()
        self.names = (f"quire-a{suffix}", f"quire-b{suffix}")
        self.addresses = ("10.97.1.1", "10.97.1.2")
        self.folder = tempfile.mkdtemp(prefix="qray")
        self._started: list[subprocess.Popen[Any]] = []
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        pair = ("qa", "netns", first, "type", "veth", "peer", "name", "qb", "netns", second)
        ip("link", "add", *pair)
        for name, link, address in zip(self.names, ("qa", "qb"), self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def start(self, host: int, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """A process on a host."""
        command = ("ip", "netns", "exec", self.names[host], sys.executable, *words)
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        address = f"{self.addresses[0]}:{PORT}"
        env = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(command, env=env, **options)
        self._started.append(process)
        return process

    def start_ray(self, host: int) -> None:
        words = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        words += [f"--node-ip-address={self.addresses[host]}"]
        if host == 0:
            words += ["--head", f"--port={PORT}", "--num-cpus=0", f"--temp-dir={self.folder}"]
            words += ["--include-dashboard=false"]
        else:
            words += [f"--address={self.addresses[0]}:{PORT}", "--num-cpus=2"]
        self.start(host, *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def has_head(self) -> bool:
        place = (self.addresses[0], PORT)
        script = f"import socket; socket.create_connection({place!r}, 1)"
        return self.start(0, "-c", script, stderr=subprocess.DEVNULL).wait() == 0

    def set_link(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "qb", state)

    def pids(self, host: int) -> list[int]:
        found = subprocess.run(
            ("ip", "netns", "pids", self.names[host]), check=True, capture_output=True, text=True
        )
        return [int(word) for word in found.stdout.split()]

    def ranks(self, host: int) -> list[int]:
        """Processes that compute, on a host."""
        return [pid for pid in self.pids(host) if "rank_process" in _command_of(pid)]

    def kill(self, host: int) -> None:
        """End all that runs there at once."""
        for pid in self.pids(host):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def end(self) -> None:
        for host in (1, 0):
            self.kill(host)
        for process in self._started:
            process.wait()
        for name in self.names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


class Engine:
    """An engine on the head."""

    def __init__(self, hosts: Hosts, folder: str) -> None:
        script = str(Path(host_engine.__file__))
        self._process = hosts.start(
            0, script, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()

    def read(self) -> dict[str, Any]:
        """The next answer. Ray too writes lines there, as of a node that it has lost."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the engine ended with {self._process.wait()}")

    def say(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(120)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces here: {error.stderr}")
    made.start_ray(0)
    wait_for(made.has_head, "head of the cluster")  # a node that finds none ends
    made.start_ray(1)
    yield made
    made.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("dense")
    write_checkpoint(Case("dense", "llama", {}), path)
    return str(path)


def test_two_hosts(hosts: Hosts, folder: str) -> None:
    """Turns red when an address of the wrong network is told, a host that is gone is not noticed,
    or its ranks stay."""
    with LLM(**host_engine.settings(folder)) as llm:
        wanted = host_engine.ask(llm)
    engine = Engine(hosts, folder)
    assert engine.say("ask") == {"tokens": wanted}
    assert len(hosts.ranks(1)) == 1 and not hosts.ranks(0)

    hosts.set_link("down")
    started = time.monotonic()
    assert "no sign of life" in engine.say("lost")["lost"]
    assert time.monotonic() - started < NOTICED_S
    assert "start a new engine" in engine.say("ask")["error"]
    wait_for(lambda: not hosts.ranks(1), "end of the ranks of the other host")
    hosts.set_link("up")
    assert engine.end() == 0

    hosts.kill(1)
    hosts.start_ray(1)
    engine = Engine(hosts, folder)
    assert engine.say("ask") == {"tokens": wanted}
    hosts.kill(1)
    started = time.monotonic()
    assert "the host of rank 1" in engine.say("lost")["lost"]
    assert time.monotonic() - started < NOTICED_S
    assert engine.end() == 0
