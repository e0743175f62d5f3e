"""Blocks that `rotate` takes."""

from __future__ import annotations

from quire.errors import EngineError

__all__ = ["LEAST_ROTATION", "check_rotation"]

LEAST_ROTATION = 16
"""Fewest numbers of a rotated block."""


def check_rotation(rotation: int, inputs: int) -> None:
    """Raise EngineError unless `rotation` is 1, or a power of two from `LEAST_ROTATION` on that
    divides the inputs."""
    is_power = rotation & (rotation - 1) == 0
    if rotation != 1 and (rotation < LEAST_ROTATION or not is_power or inputs % rotation):
        raise EngineError(
            f"{inputs} inputs cannot be rotated in blocks of {rotation}: a block has 1 of them, or "
            f"a power of two from {LEAST_ROTATION} on that divides them."
        )
