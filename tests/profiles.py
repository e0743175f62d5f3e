"""How much hypothesis does. The same examples every time, unless QUIRE_HYPOTHESIS_SCALE asks for
a multiple of them, which are then random."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["machine_settings"]


def machine_settings(examples: int, steps: int = 50) -> settings:
    """For state machines and slow properties: no deadline, since others use the machine too."""
    scale = int(os.environ.get("QUIRE_HYPOTHESIS_SCALE", "1"))
    return settings(
        max_examples=examples * scale,
        stateful_step_count=steps,
        deadline=None,
        derandomize=scale == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
