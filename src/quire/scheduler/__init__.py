"""Continuous batching: sequences, queues, budgets, preemption. Never imports torch."""

from quire.scheduler.admission import Admission
from quire.scheduler.policy import POLICIES, Fcfs, Policy
from quire.scheduler.scheduler import Scheduler, SchedulerStats

__all__ = ["POLICIES", "Admission", "Fcfs", "Policy", "Scheduler", "SchedulerStats"]
