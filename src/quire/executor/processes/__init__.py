"""Ranks of one model as processes of one host, behind the executor's door."""

from quire.executor.processes.executor import ProcessExecutor

__all__ = ["ProcessExecutor"]
