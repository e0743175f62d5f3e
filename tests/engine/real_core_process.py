"""All that a core and its ranks import, from the first line to the first step. A template of them
(tests/forked.py) has it."""

from __future__ import annotations

from quire.compute.executor.in_process import InProcessExecutor
from quire.compute.executor.processes import executor, rank_process
from quire.engine import build
from quire.engine.supervision import core_process

__all__ = ["InProcessExecutor", "build", "core_process", "executor", "rank_process"]
