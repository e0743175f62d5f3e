"""Steps leave an encoder its time, and none when nobody encodes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.compute.worker.turns import Turns

STEP_S = 0.02
LONG_S = 60.0


@contextmanager
def encoder_of(turns: Turns) -> Iterator[threading.Event]:
    """A thread that encodes until the event is set."""
    begun, ends = threading.Event(), threading.Event()

    def encode() -> None:
        with turns.encoding():
            begun.set()
            ends.wait(LONG_S)

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait(LONG_S)
    try:
        yield ends
    finally:
        ends.set()
        thread.join()


def computed(turns: Turns, seconds: float = STEP_S) -> tuple[float, float]:
    """Compute a step; return when it started and ended."""

    def compute() -> float:
        started = time.perf_counter()
        time.sleep(seconds)
        return started

    return turns.step(compute), time.perf_counter()


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_step_leaves_the_encoder_a_part_of_the_time_that_it_took(share: float) -> None:
    """Turns red when steps follow each other at once, and the encoder starves."""
    turns = Turns(share)
    with encoder_of(turns):
        spans = [computed(turns) for _ in range(4)]
    for (_, ended), (started, _) in itertools.pairwise(spans):
        # a millisecond for what a span of the test takes beyond that of the step
        assert started - ended >= share * STEP_S - 0.001


def test_time_without_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a step waits although the encoder has had its time."""
    turns = Turns(1.0)
    waits: list[float | None] = []
    with encoder_of(turns):
        computed(turns)
        time.sleep(3 * STEP_S)
        wait = turns._rests.wait
        monkeypatch.setattr(turns._rests, "wait", lambda left: waits.append(left) or wait(left))
        computed(turns)
        assert not waits
        computed(turns)
    assert len(waits) == 1
    assert waits[0] is not None
    assert waits[0] > 0


def test_a_step_starts_as_soon_as_the_encoder_ends() -> None:
    """Turns red when a step waits for nobody."""
    turns, waited = Turns(LONG_S / STEP_S), list[float]()
    with encoder_of(turns) as ends:
        computed(turns)
        thread = threading.Thread(target=lambda: waited.append(computed(turns)[0]))
        thread.start()
        thread.join(10 * STEP_S)
        assert not waited
        ends.set()
        thread.join(LONG_S / 2)
        assert waited


def test_steps_alone_do_not_wait() -> None:
    turns = Turns(LONG_S / STEP_S)
    started = time.perf_counter()
    for _ in range(3):
        computed(turns)
    assert time.perf_counter() - started < LONG_S / 2


def test_no_share_is_no_wait() -> None:
    """On a device, steps and the encoder need different cores."""
    turns = Turns(share=0.0)
    with encoder_of(turns):
        assert [turns.step(lambda number=number: number) for number in range(3)] == [0, 1, 2]


def test_a_failed_step_and_a_failed_image_leave_turns_as_they_are() -> None:
    """Turns red when steps wait on after an image that failed, or an error is lost."""
    turns = Turns(LONG_S / STEP_S)
    with pytest.raises(ValueError, match="image"), turns.encoding():
        with pytest.raises(ZeroDivisionError):
            turns.step(lambda: time.sleep(STEP_S) or 1 / 0)
        raise ValueError("image")
    started = time.perf_counter()
    computed(turns)
    assert time.perf_counter() - started < LONG_S / 2
