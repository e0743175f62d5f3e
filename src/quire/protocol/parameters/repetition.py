"""End of an output that repeats itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import RequestError, quoted
from quire.protocol.parameters.declaration import MAX_INT, checked_integer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["MAX_PATTERN_SIZE", "RepetitionDetectionParams"]

MAX_PATTERN_SIZE = 1024
"""Tokens of the longest pattern that `RepetitionDetectionParams` looks for in each step."""


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """End of an output that has fallen into a loop; the names and meanings are those of vLLM.

    max_pattern_size: tokens of the longest pattern that counts, at most 1,024; 0 switches it off.
    min_pattern_size: tokens of the shortest one; 0 is 1. min_count: times that it stands at the end
    of the output, one after the other, at least 2.

    Raises RequestError naming the field, its value and what it may be.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        for field, low, high, advice in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE, "0 switches it off"),
            ("min_pattern_size", 0, MAX_PATTERN_SIZE, "0 is 1"),
            ("min_count", 2 if self.max_pattern_size else 0, MAX_INT, "from 2 on it repeats"),
        ):
            value = checked_integer(f"{name}.{field}", getattr(self, field), low, high, advice)
            object.__setattr__(self, field, value)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"{name}.min_pattern_size is {self.min_pattern_size}, more than max_pattern_size, "
                f"which is {self.max_pattern_size}. Lower it or raise max_pattern_size."
            )

    @classmethod
    def of(cls, given: object) -> RepetitionDetectionParams | None:
        """Return parameters from themselves, None, or an object of JSON with their fields."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(
                f"repetition_detection is {quoted(given)}. Give RepetitionDetectionParams(...)."
            )
        values = cast("Mapping[str, Any]", given)
        unknown = sorted(set(values) - set(cls.__slots__))
        if unknown:
            raise RequestError(
                f"repetition_detection.{unknown[0]} is no field. Use some of: "
                f"{', '.join(cls.__slots__)}."
            )
        return cls(**values)

    def ends(self, output_ids: npt.NDArray[np.int32]) -> bool:
        """Return True if an output ends with a pattern that is there often enough."""
        if not self.max_pattern_size:
            return False
        longest = min(self.max_pattern_size, len(output_ids) // self.min_count)
        if longest < max(self.min_pattern_size, 1):
            return False
        before = output_ids[-longest - 1 : -1]
        sizes: list[int] = ((before[::-1] == output_ids[-1]).nonzero()[0] + 1).tolist()
        return any(self._repeats(output_ids, size) for size in sizes)

    def _repeats(self, output_ids: npt.NDArray[np.int32], size: int) -> bool:
        if size < self.min_pattern_size:
            return False
        for count in (
            2,
            self.min_count,
        ):  # most often two are not equal, so that a step pays little
            span = output_ids[len(output_ids) - size * count :]
            if not (span[size:] == span[:-size]).all():
                return False
        return True
