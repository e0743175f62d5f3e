"""Small versions of `benchmarks/serving/server_faults.py`, over real processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.fake_core_process import FakeCoreOptions
from tests.server.fake_serve import FakeServeOptions, FakeServer, fake_server
from tests.server.load import (
    Figures,
    abort_storm,
    overload,
    shutdown_under_load,
    slow_readers,
    until_ready,
)

NOTHING_HELD = {
    "open_requests": 0.0, "waiting_requests": 0.0, "running": 0.0, "used_blocks_share": 0.0,
}  # fmt: skip


def run(server: FakeServer, work: Coroutine[Any, Any, Figures]) -> Figures:
    async def both() -> Figures:
        await until_ready(server.port)
        return await work

    return asyncio.run(asyncio.wait_for(both(), 240))


def test_a_storm_of_aborts_leaves_nothing() -> None:
    core = FakeCoreOptions(step_s=0.001, num_blocks=2048, max_num_seqs=32, max_model_len=512)
    with fake_server(FakeServeOptions(core), is_forked=True) as server:
        found = run(server, abort_storm(server, 200, 16, seed=0))
    assert found["wrong"] == 0 and found["right"] == 100 and found["cut"] > 75
    assert found["serves_on"] == 1 and found["open_files_more"] <= 2
    assert {name: found[name] for name in NOTHING_HELD} == NOTHING_HELD


def test_an_overload_is_shed_and_costs_nothing() -> None:
    core = FakeCoreOptions(step_s=0.02, num_blocks=2048, max_num_seqs=8, max_model_len=512)
    options = FakeServeOptions(core, {"max_queue_requests": 16})
    with fake_server(options, is_forked=True) as server:
        found = run(server, overload(server, 10.0, 1.0, 24))
    assert found["rejected"] > 0 and found["other_outcomes"] == 0
    assert found["rejected_without_retry_after"] == 0
    assert found["done"] > 0  # how many more than without the rest, the benchmark measures
    assert {name: found[name] for name in NOTHING_HELD} == NOTHING_HELD


@pytest.mark.parametrize("to_group", [False, True], ids=["front", "group"])
def test_a_shutdown_under_load_ends_every_stream(to_group: bool) -> None:
    core = FakeCoreOptions(step_s=0.01, num_blocks=2048, max_num_seqs=8, max_model_len=512)
    with fake_server(FakeServeOptions(core), is_forked=True) as server:
        found = run(server, shutdown_under_load(server, 24, math.inf, to_group=to_group))
    assert found["broken"] == 0 and found["error"] == 0 and found["done"] >= 24
    assert found["exit_status"] == 0
    assert found["left_processes"] == found["left_files"] == found["left_port"] == 0


def test_a_shutdown_that_cannot_wait_ends_every_stream() -> None:
    core = FakeCoreOptions(step_s=0.2, num_blocks=2048, max_num_seqs=8, max_model_len=512)
    with fake_server(FakeServeOptions(core, shutdown_timeout=0.2), is_forked=True) as server:
        found = run(server, shutdown_under_load(server, 24, math.inf, to_group=False))
    assert found["broken"] == 0 and found["error"] + found["refused"] > 10
    assert found["exit_status"] == 0
    assert found["left_processes"] == found["left_files"] == found["left_port"] == 0


FOR_SLOW_READERS = FakeCoreOptions(
    step_s=0.001, num_blocks=8192, block_size=16, max_num_seqs=48, max_num_batched_tokens=256,
    max_model_len=4096,
)  # fmt: skip


def test_slow_readers_take_no_memory() -> None:
    """Their streams would be some 25 MiB if they were written for them in advance."""
    with fake_server(FakeServeOptions(FOR_SLOW_READERS), is_forked=True) as server:
        found = run(server, slow_readers(server, 24, 3000, 4.0))
    assert found["memory_mib_more"] < 12
    assert {name: found[name] for name in NOTHING_HELD} == NOTHING_HELD


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_num_seqs": 24}, "max_num_seqs of 25"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens of 88"),
        ({"max_model_len": 2048}, "max_model_len"),
        ({"num_blocks": 4096}, "num_blocks"),
        ({"step_s": 0.0}, "tokens per second"),
    ],
)
def test_slow_readers_must_not_overload_the_core(changes: dict[str, Any], name: str) -> None:
    """Fault: others waited 32 s, for a core that gave each step to the slow ones."""
    server: Any = SimpleNamespace(core=replace(FOR_SLOW_READERS, **changes))
    with pytest.raises(ValueError, match=name):
        asyncio.run(slow_readers(server, 24, 3000, 4.0))
