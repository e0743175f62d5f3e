"""A core's process that is forked, as are its ranks (tests/forked.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.compute.executor.processes.group import RankGroup
from quire.engine.supervision import core_process
from tests.forked import ForkedRank, OwnTemplate


def main() -> int:
    template = OwnTemplate()

    def start_process(group: RankGroup, descriptors: Sequence[int]) -> Any:
        return ForkedRank(template, group._command, descriptors)

    RankGroup._start_process = start_process  # type: ignore[method-assign]
    return core_process.main()
