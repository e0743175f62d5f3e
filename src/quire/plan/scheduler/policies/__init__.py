"""Orders of service, one policy per file. A new one is a class that is a `Policy`; most need only
the `key` of a `KeyedPolicy`."""

from quire.plan.scheduler.policies.fair import Fair
from quire.plan.scheduler.policies.fcfs import Fcfs
from quire.plan.scheduler.policies.keyed import KeyedPolicy
from quire.plan.scheduler.policies.make import make_policy
from quire.plan.scheduler.policies.priority import Priority
from quire.plan.scheduler.policies.srtf import Srtf
from quire.plan.scheduler.policies.two_level import TwoLevel

__all__ = [
    "Fair",
    "Fcfs",
    "KeyedPolicy",
    "Priority",
    "Srtf",
    "TwoLevel",
    "make_policy",
]
