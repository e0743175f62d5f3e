"""When a request shall be served, as its client asks; what it computes is in `SamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from quire.base.errors import RequestError
from quire.protocol.codec import is_unicode

T = TypeVar("T")

__all__ = ["MAX_PRIORITY", "SchedulingParams", "scheduling_for"]

MAX_PRIORITY = 2**31 - 1
"""Keys of policies are float64, which hold such an integer exactly."""


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Raises RequestError for an invalid value.

    priority: smaller ones go first, under a policy that knows priorities.
    deadline_s: seconds after arrival by which the first token must come. A request that can no
        longer make it is dropped before its prompt is computed.
    tenant: name under which requests share one part of the capacity under the policy `fair`;
        weight: size of that part.
    is_spare: run on spare capacity: admitted only while no other request waits, and the first to
        give way.
    """

    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    weight: float = 1.0
    is_spare: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"priority is {self.priority!r}: give an integer")
        if abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {self.priority}: give an integer from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}"
            )
        if not isinstance(self.tenant, str) or not is_unicode(self.tenant):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"tenant is {self.tenant!r}: give a text of valid Unicode")
        for name in ("deadline_s", "weight"):
            value: float | None = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 < value < math.inf):
                raise RequestError(f"{name} is {value!r}: give a number above 0")

    def check_policy(self, *, uses_priority: bool) -> None:
        """Raise RequestError if the engine's policy cannot serve these parameters. uses_priority:
        requests may name a priority."""
        if self.priority and not uses_priority:
            raise RequestError(
                f"priority is {self.priority}, but this engine's scheduling_policy does not look "
                "at priorities: leave it out, or start with priority or two_level"
            )


def scheduling_for(
    num_prompts: int,
    given: SchedulingParams | Sequence[SchedulingParams] | None,
    priority: int | Sequence[int] | None,
) -> list[SchedulingParams]:
    """One for each prompt, from one for all or one per prompt; the same for `priority`, which
    stands in place of theirs. RequestError if a number does not match."""
    found = _spread(num_prompts, "scheduling_params", given, SchedulingParams())
    for each in found:
        if not isinstance(each, SchedulingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(
                f"scheduling_params has a {type(each).__name__}: give SchedulingParams objects"
            )
    if priority is None:
        return found
    levels = _spread(num_prompts, "priority", priority, 0)
    return [replace(each, priority=level) for each, level in zip(found, levels, strict=True)]


def _spread(num_prompts: int, name: str, given: T | Sequence[T] | None, default: T) -> list[T]:
    if not isinstance(given, Sequence):
        return [default if given is None else given] * num_prompts
    values = list(cast("Sequence[T]", given))
    if len(values) != num_prompts:
        raise RequestError(
            f"there are {num_prompts} prompts but {len(values)} {name}: give one for all, or one "
            "per prompt"
        )
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
