"""Sizes of steps that have a graph: traffic asks for them, and they are recorded meanwhile."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

import torch

from quire.compute.layers.token_columns import Variant
from quire.ops.distributed import ALONE, Collectives
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


class _Ending(IntEnum):
    """Ends of a recording; of several ranks the largest counts."""

    RECORDED = 0
    FULL = 1
    FAILED = 2


class LazyGraphs(Generic[Recorded]):
    """Steps are padded to the sizes of a ladder. A size is recorded after it was computed a few
    times, so that a start waits for none. If recording fails, steps go on without graphs. All ranks
    record at the same time: if one of them cannot, none does, as they would meet in other steps.

    recorded: recordings without optional columns, by size. of_variants: recordings of all variants
    (`TokenColumns`), `recorded` included.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        wanted: int = WANTED,
        steps_between: int = STEPS_BETWEEN,
        name: str = "",
        collectives: Collectives = ALONE,
    ) -> None:
        """name: name of the steps in the log; empty if others take over when these cannot be
        captured. collectives: connection to the ranks that record the same steps."""
        self._name = name
        self._collectives = collectives
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
        without a graph. variant: variant of the step; each variant has recordings of its own."""
        self._since_last += 1
        recorded, key = self._of(variant), (size, variant)
        known = recorded.get(size)
        if known is not None or not self._sizes:
            return known
        self._counts[key] += 1
        if self._counts[key] <= self._wanted or self._since_last <= self._steps_between:
            return None
        self._since_last = 0
        made, ending = self._recorded(size, record)
        worst = self._collectives.all_reduce(torch.tensor([ending], dtype=torch.int32), "max")
        ending_of_all = _Ending(int(worst))
        if made is not None and ending_of_all is _Ending.RECORDED:
            recorded[size] = made
            return made
        if made is not None:
            self._log(logging.WARNING, f"of {size} rows are not captured: another rank cannot")
        if ending_of_all is _Ending.FULL:
            self._sizes = tuple(each for each in self._sizes if each < size)
        else:
            self.end()
        return None

    def _recorded(
        self, size: int, record: Callable[[int], Recorded]
    ) -> tuple[Recorded | None, _Ending]:
        """Return the recording that this rank has made, None if it could not; the log says why."""
        try:
            return record(size), _Ending.RECORDED
        except ArenaFullError as error:
            self._log(logging.WARNING, f"of {size} rows and more are not captured: {error}")
            return None, _Ending.FULL
        except NotCapturableError as error:
            self._log(logging.INFO, f"of this model are not captured: {error}")
        except Exception:  # noqa: BLE001  whatever it is, steps do without graphs
            _log.warning("steps are not captured in graphs any more", exc_info=True)
        return None, _Ending.FAILED

    def _of(self, variant: Variant) -> dict[int, Recorded]:
        return self.of_variants.setdefault(variant, {})

    def end(self) -> None:
        """Capture and replay no more."""
        self._sizes = ()

    def _log(self, level: int, what: str) -> None:
        if self._name:
            _log.log(level, "%s %s", self._name, what)
