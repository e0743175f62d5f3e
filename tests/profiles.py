"""Numbers of examples for property tests, state machines and seeded simulations. `QUIRE_SOAK`
multiplies them.

With `CI` set, and no soak, examples are the same in every run, and state machines and simulations
try a third: a run judges the change and nothing else. `make test` elsewhere tries new ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings

__all__ = ["IS_CI", "SCALE", "examples", "machine_settings", "seeds", "under_seed"]

SCALE = int(os.environ.get("QUIRE_SOAK", "1"))
IS_CI = "CI" in os.environ and SCALE == 1
"""True if every run does the same."""


def examples(count: int, **more: Any) -> settings:
    """For a property with a count of its own; more: further settings of hypothesis."""
    return settings(max_examples=count * SCALE, **more)


def machine_settings(examples: int, steps: int = 50) -> settings:
    """For state machines and slow properties: no deadline, since others use the machine too."""
    return settings(
        max_examples=scaled(examples),
        stateful_step_count=steps,
        deadline=None,
        derandomize=IS_CI,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def seeds(count: int, first: int = 0) -> Sequence[int]:
    """Return seeds of random simulations: the usual ones and, when soaking, more."""
    return range(first, first + scaled(count))


def scaled(count: int) -> int:
    """Examples of what costs much: a third in CI, but one."""
    return math.ceil(count / 3) if IS_CI else count * SCALE


@contextmanager
def under_seed(seed: int) -> Iterator[None]:
    """Make a failure inside name this seed."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise
