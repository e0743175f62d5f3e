"""A policy of the user's, whose faults cost no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quire.base.platform.interrupts import is_ctrl_c
from quire.plan.scheduler.policies.policy import (
    CountsTokens,
    MayStart,
    NumUncached,
    Policy,
    checked_key,
)
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["Guarded"]

logger = logging.getLogger("quire")

Result = TypeVar("Result")


class Guarded:
    """Asks another policy. Where that raises, or gives what is no key or no waiting group, groups
    go by their arrival, and the log says so once. One that it did not take in goes behind those
    that it did."""

    def __init__(self, policy: Policy, name: str) -> None:
        """name: name of the setting, for the log."""
        self._policy = policy
        self._name = name
        self._waiting: dict[SequenceGroup, bool] = {}  # whether the policy has it
        self._has_warned = False
        self.uses_priority = policy.uses_priority

    def add(self, group: SequenceGroup) -> None:
        def add() -> bool:
            self._policy.add(group)
            checked_key(group.key)
            return True

        old_key = group.key
        self._waiting[group] = self._try(add, instead=False)
        if not self._waiting[group]:
            self._take_back(group)
            group.key = old_key if group.was_admitted else _by_arrival(group)

    def remove(self, group: SequenceGroup) -> None:
        if self._waiting.pop(group, False):
            self._try(lambda: self._policy.remove(group), instead=None)

    def first(self, may_start: MayStart, num_uncached: NumUncached) -> SequenceGroup | None:
        try:
            found = self._policy.first(may_start, num_uncached)
            if found is not None:
                checked_key(found.key)
                if not self._waiting.get(found, False):
                    raise ValueError(f"first gave {found!r:.80}, which does not wait")
        except BaseException as error:  # noqa: BLE001  `_note` raises Ctrl-C
            self._note(error)
            return self._oldest(may_start, self._waiting)
        if found is None and not all(self._waiting.values()):
            strays = [group for group, is_in in self._waiting.items() if not is_in]
            return self._oldest(may_start, strays)
        return found

    def count_tokens(self, accounts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Count tokens, if the policy does so."""
        policy = self._policy
        if isinstance(policy, CountsTokens):
            self._try(lambda: policy.count_tokens(accounts, tokens), instead=None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._waiting)

    def _oldest(self, may_start: MayStart, groups: Iterable[SequenceGroup]) -> SequenceGroup | None:
        """Return the oldest of these that may start. The policy does not have it any more."""
        in_order = sorted(groups, key=lambda group: group.number)
        found = next(filter(may_start, in_order), None)
        if found is not None and self._waiting[found]:
            self._take_back(found)
            self._waiting[found] = False
            found.key = found.key if found.was_admitted else _by_arrival(found)
        return found

    def _take_back(self, group: SequenceGroup) -> None:
        """Have the policy forget a group, which it may not know, or not by this key."""
        self._try(lambda: self._policy.remove(group), instead=None)

    def _try(self, call: Callable[[], Result], *, instead: Result) -> Result:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001  as above
            self._note(error)
            return instead

    def _note(self, error: BaseException) -> None:
        if is_ctrl_c(error):
            raise error
        if not self._has_warned:
            self._has_warned = True
            logger.error(
                "scheduling_policy %r failed: what it fails for goes by its arrival, now and "
                "later. Mend it.",
                self._name,
                exc_info=error,
            )


def _by_arrival(group: SequenceGroup) -> tuple[float, int]:
    return (group.request.arrival_time, group.number)
