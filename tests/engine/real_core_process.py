"""All that a core and its ranks import, from the first line to the first step. A template of them
(tests/forked.py) has it."""

from __future__ import annotations

import importlib
import sys

from quire.compute.executor.in_process import InProcessExecutor
from quire.compute.executor.processes import executor, rank_process
from quire.compute.executor.processes.group import RankGroup
from quire.engine import build
from quire.engine.supervision import core_process
from tests.forked import OwnTemplate, rank_starter

__all__ = ["InProcessExecutor", "build", "core_process", "executor", "main", "rank_process"]


def main() -> int:
    """Run the core that the first argument names, "module:name". Its ranks are forked."""
    template = OwnTemplate()
    RankGroup._start_process = rank_starter(lambda: template)  # type: ignore[method-assign]
    module, _, name = sys.argv.pop(1).partition(":")
    return getattr(importlib.import_module(module), name)()
