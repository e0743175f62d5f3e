"""Order by the priority that requests name, with ageing."""

from __future__ import annotations

from quire.plan.scheduler.policies.keyed import KeyedPolicy
from quire.plan.scheduler.sequence import SequenceGroup
from quire.protocol.request import EngineRequest

__all__ = ["Priority", "aged_arrival"]


def aged_arrival(request: EngineRequest, ageing_s: float) -> float:
    """Orders requests by priority with ageing, smaller first.

    A request that has waited w seconds counts as one of priority − w / ageing_s. All age alike, so
    the order of two requests never changes, and arrival + priority · ageing_s sorts them: a level
    is worth `ageing_s` seconds of waiting. Nothing starves, since a request yields only to those
    that arrive within (its priority − theirs) · ageing_s after it.
    """
    return request.arrival_time + request.scheduling.priority * ageing_s


class Priority(KeyedPolicy):
    """Smaller priorities first, equal ones by arrival."""

    uses_priority = True

    def __init__(self, ageing_s: float) -> None:
        """ageing_s: seconds of waiting that make up for one level of priority."""
        super().__init__()
        self._ageing_s = ageing_s

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return (aged_arrival(group.request, self._ageing_s), group.number)
