"""A hung core is told from a busy one, and from a supervisor that slept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.base.telemetry.flight.record import FlightRecorder
from quire.base.telemetry.flight.stacks import StackPlace
from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.engine.build import build_core
from quire.engine.supervision.stall import StallLimits, StallWatch
from quire.protocol.messages import Heartbeat
from quire.protocol.status import FETCHING, StartPhase

LIMITS = StallLimits(min_s=10, steps=20, start_silence_s=15, phase_s=100)


def beat(step_seconds: float | None = None, slowest: float = 0.0, *, is_ready: bool = True):
    return Heartbeat(
        0, (), is_ready=is_ready, step_seconds=step_seconds, slowest_step_seconds=slowest
    )


def first_hang(watch: StallWatch, start: float, end: float) -> float | None:
    """When the watch, asked twice a second, first calls the core hung."""
    now = start
    while now < end:
        if watch.hang(now) is not None:
            return now
        now += 0.5
    return None


def test_silence_is_a_hang() -> None:
    watch = StallWatch(LIMITS, 0)
    watch.observe(beat(), 1)
    assert first_hang(watch, 1, 50) == 11.5


def test_silence_before_a_core_is_ready_has_its_own_limit() -> None:
    """Fault: a library that took long to import, with beats before it, counted as a hang."""
    watch = StallWatch(LIMITS, 0)
    assert first_hang(watch, 0, 50) == 15.5
    watch = StallWatch(LIMITS, 0)
    watch.observe(beat(is_ready=False), 1)
    assert first_hang(watch, 1, 50) == 16.5


def test_a_step_may_take_long_where_steps_do() -> None:
    watch = StallWatch(LIMITS, 0)
    watch.observe(beat(10.5), 1)
    assert "present step" in str(watch.hang(1))
    watch.observe(beat(39.0, slowest=2.0), 1.5)
    assert watch.hang(1.5) is None
    watch.observe(beat(40.5, slowest=2.0), 2)
    assert "40.0 s are allowed" in str(watch.hang(2))


def test_idle_is_no_hang() -> None:
    watch = StallWatch(LIMITS, 0)
    for now in range(100):
        watch.observe(beat(), now)
        assert watch.hang(now) is None


def test_a_start_that_beats_but_names_no_phase_is_a_hang() -> None:
    watch = StallWatch(LIMITS, 0)
    for now in range(101):
        watch.observe(beat(is_ready=False), now)
        assert watch.hang(now) is None
    assert "not started" in str(watch.hang(101))


def starting(name: str, seconds: float, before: float = 0.0) -> Heartbeat:
    phases = (StartPhase(FETCHING, before), StartPhase(name, seconds, is_done=False))
    return Heartbeat(0, phases[name == FETCHING :])


@pytest.mark.parametrize(
    ("name", "is_limited"), [(FETCHING, False), ("planning", True), ("loading", True)]
)
def test_a_start_may_fetch_for_days_but_not_do_other_things(name: str, is_limited: bool) -> None:
    """Fault: a core that still fetched its checkpoint was killed after half an hour; or a start
    after a long fetch had no time left for loading."""
    watch = StallWatch(LIMITS, 0)
    for seconds in range(100_000, 100_101):
        watch.observe(starting(name, seconds - 100_000, before=100_000), seconds)
        assert watch.hang(seconds) is None
    watch.observe(starting(name, 101), 100_101)
    assert (f"{name!r} has taken 101.0 s" in str(watch.hang(100_101))) == is_limited


def test_the_phase_that_fetches_is_the_first_of_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And ends before the plan is made, which has a limit: a folder on a dead disk hung it."""
    phases: list[str] = []
    fetched: list[tuple[str, str]] = []

    def fetch(model: str, *_: object) -> Path:
        fetched.append((phases[-1], model))
        return bundled_model_path()

    monkeypatch.setattr("quire.config.hub._fetch", fetch)
    draft = {"method": "draft_model", "model": "some/draft", "num_speculative_tokens": 2}
    settings = EngineSettings(
        model="some/model", speculative_config=json.dumps(draft), max_model_len=10**9
    )
    with pytest.raises(ConfigError, match="max_model_len"):
        build_core(
            settings,
            phases.append,
            lambda _: None,
            lambda _: None,
            flight=FlightRecorder(),
            stacks=StackPlace(str(tmp_path), "core0"),
        )
    assert phases == [FETCHING, "planning"]
    assert fetched[:2] == [(FETCHING, "some/model"), (FETCHING, "some/draft")]


def test_a_supervisor_that_slept_does_not_blame_the_core() -> None:
    watch = StallWatch(LIMITS, 0)
    watch.observe(beat(), 1)
    assert watch.hang(1) is None
    assert watch.hang(500) is None  # stopped in between, the beats are still in its queue
    assert first_hang(watch, 500, 600) is not None
