"""When a request shall be served, as its client asks; what it computes is in `SamplingParams`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.errors import RequestError

__all__ = ["MAX_PRIORITY", "SchedulingParams"]

MAX_PRIORITY = 2**31 - 1
"""Keys of policies are float64, which hold such an integer exactly."""


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """RequestError if a value cannot be.

    priority: smaller ones go first, under a policy that knows priorities.
    deadline_s: seconds after arrival by which the first token must come. A request that can no
        longer make it is dropped before its prompt is computed.
    tenant: who shares with whom under the policy `fair`; weight: the share of that tenant.
    """

    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"priority is {self.priority!r}: give an integer")
        if abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {self.priority}: give an integer from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}"
            )
        for name in ("deadline_s", "weight"):
            value: float | None = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 < value < math.inf):
                raise RequestError(f"{name} is {value!r}: give a number above 0")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
