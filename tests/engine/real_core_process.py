"""All that a core and its ranks import, from the first line to the first step. A template of them
(tests/forked.py) has it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from quire.compute.executor.in_process import InProcessExecutor
from quire.compute.executor.processes import executor, rank_process
from quire.compute.executor.processes.group import RankGroup
from quire.engine import build
from quire.engine.supervision import core_process
from tests.forked import ForkedRank, OwnTemplate

__all__ = ["InProcessExecutor", "build", "core_process", "executor", "main", "rank_process"]


def main() -> int:
    """Run the core that the first argument names, "module:name". Its ranks are forked."""
    template = OwnTemplate()

    def start_process(group: RankGroup, descriptors: Sequence[int]) -> Any:
        return ForkedRank(template, group._command, descriptors)

    RankGroup._start_process = start_process  # type: ignore[method-assign]
    module, _, name = sys.argv.pop(1).partition(":")
    return getattr(importlib.import_module(module), name)()
