from __future__ import annotations

from pathlib import Path

import pytest

from quire.compute.kv_transfer.block_file import SystemFile
from tests.small_engines import forked_ranks, kernels_by_flags
from tests.waiting import WAIT_S

__all__ = ["cached_disk", "forked_ranks", "kernels_by_flags", "patient_disk"]


@pytest.fixture
def patient_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that wait for a disk which others keep busy: neither a load that comes late nor one
    that has become dear is computed instead, and no save is given up."""
    monkeypatch.setattr("quire.plan.kv_cache.disk_index.ENOUGH", 10**9)
    monkeypatch.setattr("quire.plan.kv_cache.sources.SAVE_SECONDS", WAIT_S)
    monkeypatch.setattr("quire.engine.core.moving_blocks.SECONDS_TO_SAVE", WAIT_S)
    monkeypatch.setattr("quire.plan.scheduler.loads.SECONDS_PER_TOKEN", 1.0)


@pytest.fixture
def cached_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose files stay in the system's cache, so that nobody waits for the disk. Those of
    other ranks, of `test_disk_laws.py` and of `tests/kv_transfer` go past it."""

    def opened(path: Path, *, is_writer: bool, is_direct: bool = False) -> SystemFile:
        del is_direct
        return SystemFile(path, is_writer=is_writer)

    monkeypatch.setattr("quire.compute.kv_transfer.disk_blocks.SystemFile", opened)
