from __future__ import annotations

import pytest

from tests.small_engines import forked_ranks, kernels_by_flags
from tests.waiting import WAIT_S

__all__ = ["forked_ranks", "kernels_by_flags", "patient_disk"]


@pytest.fixture
def patient_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that wait for a disk which others keep busy: neither a load that comes late nor one
    that has become dear is computed instead, and no save is given up."""
    monkeypatch.setattr("quire.plan.kv_cache.disk_index.ENOUGH", 10**9)
    monkeypatch.setattr("quire.plan.kv_cache.sources.SAVE_SECONDS", WAIT_S)
    monkeypatch.setattr("quire.engine.core.moving_blocks.SECONDS_TO_SAVE", WAIT_S)
    monkeypatch.setattr("quire.plan.scheduler.loads.SECONDS_PER_TOKEN", 1.0)
