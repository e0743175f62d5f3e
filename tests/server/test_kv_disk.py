"""A server that is stopped or killed, and finds its prompts again when it starts."""

from __future__ import annotations

import os
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import waiting
from tests.server.test_run import Serving, children, serving_by_command
from tests.waiting import wait_for

PROMPT = np.random.default_rng(5).integers(5, 900, 1500).tolist()
HIT = 1488
LIMIT = 2 * 10**9


def serving(tmp_path: Path, disk: Path, *more: str) -> AbstractContextManager[Serving]:
    flags = ("--num-threads", "1", "--num-kv-blocks", "400", "--kv-disk-bytes", str(LIMIT))
    return serving_by_command(tmp_path, "--kv-disk", str(disk), *flags, *more, is_forked=True)


def ask(url: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """Cached tokens of the prompt, and the answer."""
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "logprobs": 2, "temperature": 0.8}
    answer = waiting.post(f"{url}/v1/completions", json={**body, **more}).json()
    usage = answer["usage"]["prompt_tokens_details"] or {}
    return usage.get("cached_tokens", 0), answer["choices"][0]


def metric(url: str, name: str) -> float:
    found = re.search(
        rf"^quire:{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", _metrics(url), re.MULTILINE
    )
    assert found is not None, name
    return float(found.group(1))


def _metrics(url: str) -> str:
    return waiting.get(f"{url}/metrics").text


def wait_until_saved(url: str, count: int = HIT // 16) -> None:
    wait_for(lambda: metric(url, "disk_kv_blocks_cached") >= count, "prompt on the disk")


def end(server: Serving, *, by: signal.Signals) -> None:
    if by is signal.SIGKILL:
        os.killpg(server.process.pid, signal.SIGKILL)
    else:
        server.process.send_signal(by)
    server.end()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_prompt_outlives_its_server(short_tmp: Path, tmp_path: Path, by: signal.Signals) -> None:
    disk = tmp_path / "kv"
    with serving(short_tmp, disk) as server:
        url = server.wait_until_ready()
        cached, cold = ask(url)
        assert cached == 0
        wait_until_saved(url)
        assert ask(url)[0] == HIT
        end(server, by=by)
    with serving(short_tmp, disk) as server:
        url = server.wait_until_ready()
        cached, warm = ask(url)
        assert (cached, warm) == (HIT, cold)
        wait_until_saved(url)  # the front's readings may be a moment old
        assert waiting.get(f"{url}/cache").json()["disk"]["cached"] >= HIT // 16
        wait_for(lambda: metric(url, "kv_blocks_loaded") >= HIT // 16, "count of loads")
        assert metric(url, "kv_blocks_lost") == 0
        assert ask(url, cache_salt="another tenant") == (0, cold)


def test_a_killed_core_finds_what_it_had_written(short_tmp: Path, tmp_path: Path) -> None:
    """Its supervisor starts another, which writes on: the lock ended with the process."""
    with serving(short_tmp, tmp_path / "kv") as server:
        url = server.wait_until_ready()
        _, cold = ask(url)
        wait_until_saved(url)
        (core,) = children(server.process.pid)
        os.kill(int(core), signal.SIGKILL)
        wait_for(lambda: core not in children(server.process.pid), "the end of the core")
        wait_for(lambda: waiting.get(f"{url}/admin/status").json()["restarts"], "word of it")
        wait_for(lambda: waiting.get(f"{url}/readyz").status_code == 200, "another core")
        assert ask(url) == (HIT, cold)
        assert ask(url, cache_salt="another tenant")[0] == 0
        wait_until_saved(url, 2 * (HIT // 16))


def test_two_replicas_read_one_store(short_tmp: Path, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    with serving(short_tmp, disk) as server:
        url = server.wait_until_ready()
        _, cold = ask(url)
        wait_until_saved(url)
        end(server, by=signal.SIGTERM)
    with serving(short_tmp, disk) as one, serving(short_tmp, disk) as other:
        for server in (one, other):
            assert ask(server.wait_until_ready()) == (HIT, cold)
