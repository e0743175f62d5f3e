"""Memory of the KV pool: taken as it is written, and the same without huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from quire.attention import KVPool
from quire.config.kv_layout import KVFormat, KVLayout
from quire.ops.native.huge_pages import HUGE_PAGE

LAYOUT = KVLayout.of_windows([None, None], 16, KVFormat.plain(8, 128, "bfloat16"))
CPU = torch.device("cpu")


def allocate(num_blocks: int) -> KVPool:
    return KVPool.allocate(LAYOUT, num_blocks, torch.bfloat16, CPU)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory through /proc")
def test_blocks_that_nobody_wrote_take_no_memory() -> None:
    """Turns red when a start fills the whole pool."""
    before = _resident_bytes()
    pool = allocate(2048)
    assert pool.pages.nbytes == 2048 * LAYOUT.page_bytes
    assert _resident_bytes() - before < pool.pages.nbytes / 8
    pool.layers[0].k[0].fill_(1)
    assert _resident_bytes() - before < pool.pages.nbytes / 8
    pool.pages.fill_(1)
    assert _resident_bytes() - before > pool.pages.nbytes / 2


def test_the_pool_begins_with_a_huge_page() -> None:
    """Turns red when the pool's memory is ordinary, which decode reads more slowly."""
    assert allocate(3).pages.data_ptr() % HUGE_PAGE == 0


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when an engine cannot start because the kernel refuses the advice."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # unknown, as it is there
    pool = allocate(5)
    pool.layers[1].v.fill_(2)
    assert (pool.layers[1].v == 2).all()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE
