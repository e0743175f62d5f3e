"""Executes one step on one device. The rows need no torch; the runner and its inputs do, and are
imported by their modules' names."""

from quire.compute.runner.rows import RowTable, ScheduledRows

__all__ = ["RowTable", "ScheduledRows"]
