"""Counts of devices that serve a workload within limits of latency, by simulation."""

from quire.entrypoints.simulator.planner.capacity import Capacity, Option, plan_capacity
from quire.entrypoints.simulator.planner.slo import SLO, parse_slo
from quire.entrypoints.simulator.planner.text import render_capacity
from quire.entrypoints.simulator.planner.tune import Tuned, tune

__all__ = [
    "SLO",
    "Capacity",
    "Option",
    "Tuned",
    "parse_slo",
    "plan_capacity",
    "render_capacity",
    "tune",
]
