"""Sizes of steps that have a graph: those that traffic asks for, recorded while it goes on."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from quire.layers.token_columns import Variant
from quire.ops.native.capture import ArenaFullError, NotCapturableError

__all__ = ["LazyGraphs", "ladder"]

_log = logging.getLogger("quire.runner")
Recorded = TypeVar("Recorded")

WANTED = 3
"""Steps of a size that run without a graph before it is recorded: it may not come again."""

STEPS_BETWEEN = 8
"""Steps between two recordings, since each one blocks the launching thread."""


def ladder(largest: int) -> tuple[int, ...]:
    """Sizes up to `largest`, closer together where a row costs more of the step."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 32, 32))
    return (*(size for size in steps if size < largest), largest) if largest > 0 else ()


class LazyGraphs(Generic[Recorded]):
    """Steps are padded to the sizes of a ladder. A size is recorded after it was computed a few
    times, so that a start waits for none. If recording fails, steps go on without graphs.

    recorded: by size. of_variants: of all variants (`TokenColumns`), of which `recorded` is that
    without optional columns.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        wanted: int = WANTED,
        steps_between: int = STEPS_BETWEEN,
        name: str = "",
    ) -> None:
        """name: of the steps, for the log; empty if others take over when these cannot be
        captured."""
        self._name = name
        self._sizes = sizes
        self._wanted = wanted
        self._steps_between = steps_between
        self._counts: Counter[tuple[int, Variant]] = Counter()
        self._since_last = steps_between
        self.recorded: dict[int, Recorded] = {}
        self.of_variants: dict[Variant, dict[int, Recorded]] = {(): self.recorded}

    def size_for(self, count: int) -> int | None:
        """The smallest size that holds `count`, or None if no graph does."""
        at = bisect_left(self._sizes, count)
        return self._sizes[at] if at < len(self._sizes) else None

    def get(
        self, size: int, record: Callable[[int], Recorded], variant: Variant = ()
    ) -> Recorded | None:
        """Return the recording for a size; record it now if it is due. None: compute the step
        without a graph. variant: of the step; each variant has recordings of its own."""
        self._since_last += 1
        recorded, key = self._of(variant), (size, variant)
        known = recorded.get(size)
        if known is not None or not self._sizes:
            return known
        self._counts[key] += 1
        if self._counts[key] <= self._wanted or self._since_last <= self._steps_between:
            return None
        self._since_last = 0
        try:
            recorded[size] = record(size)
        except ArenaFullError as error:
            self._sizes = tuple(each for each in self._sizes if each < size)
            self._log(logging.WARNING, f"of {size} rows and more are not captured: {error}")
        except NotCapturableError as error:
            self.end()
            self._log(logging.INFO, f"of this model are not captured: {error}")
        except Exception:  # noqa: BLE001  whatever it is, steps do without graphs
            self.end()
            _log.warning("steps are not captured in graphs any more", exc_info=True)
        return recorded.get(size)

    def _of(self, variant: Variant) -> dict[int, Recorded]:
        return self.of_variants.setdefault(variant, {})

    def end(self) -> None:
        """Capture and replay no more."""
        self._sizes = ()

    def _log(self, level: int, what: str) -> None:
        if self._name:
            _log.log(level, "%s %s", self._name, what)
