"""How much property tests, state machines and seeded simulations try. `QUIRE_SOAK` multiplies it;
without it the examples are few, and in state machines the same ones every time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings

__all__ = ["SCALE", "examples", "machine_settings", "seeds", "under_seed"]

SCALE = int(os.environ.get("QUIRE_SOAK", "1"))


def examples(count: int, **more: Any) -> settings:
    """For a property with a count of its own; more: further settings of hypothesis."""
    return settings(max_examples=count * SCALE, **more)


def machine_settings(examples: int, steps: int = 50) -> settings:
    """For state machines and slow properties: no deadline, since others use the machine too."""
    return settings(
        max_examples=examples * SCALE,
        stateful_step_count=steps,
        deadline=None,
        derandomize=SCALE == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def seeds(count: int, first: int = 0) -> Sequence[int]:
    """Of simulations that are random by their seed: the usual ones and, when soaking, more."""
    return range(first, first + count * SCALE)


@contextmanager
def under_seed(seed: int) -> Iterator[None]:
    """Make a failure inside name this seed."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise
