"""Continuous batching: sequences, queues, budgets, preemption. Never imports torch."""

from quire.config.feasibility import Feasibility
from quire.scheduler.policies import Fcfs, KeyedPolicy, make_policy
from quire.scheduler.policies.policy import Policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceGroup
from quire.scheduler.token_budget import PrefillLimits

__all__ = [
    "Fcfs",
    "Feasibility",
    "KeyedPolicy",
    "Policy",
    "PrefillLimits",
    "Scheduler",
    "SequenceGroup",
    "make_policy",
]
