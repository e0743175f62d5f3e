"""Continuous batching: sequences, queues, budgets, preemption. Never imports torch."""

from quire.config.feasibility import Feasibility
from quire.plan.scheduler.policies import Fcfs, KeyedPolicy, make_policy
from quire.plan.scheduler.policies.policy import Policy
from quire.plan.scheduler.scheduler import Scheduler
from quire.plan.scheduler.sequence import SequenceGroup
from quire.plan.scheduler.token_budget import PrefillLimits

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
