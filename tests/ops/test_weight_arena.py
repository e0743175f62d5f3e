"""Memory of packed weights: disjoint, aligned, and given back."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from quire.ops.native.huge_pages import HUGE_PAGE
from quire.ops.native.weight_arena import CHUNK, LINE, WeightArena


def test_buffers_are_aligned_zero_and_disjoint() -> None:
    """Turns red when two matrices share memory, or one begins inside a cache line."""
    arena = WeightArena()
    buffers = [arena.zeros(size) for size in (1, 100, HUGE_PAGE + 1, 0, CHUNK + 5, CHUNK // 2, 7)]
    for index, buffer in enumerate(buffers, start=1):
        assert buffer.data_ptr() % LINE == 0 or not len(buffer)
        assert not buffer.any()
        buffer.fill_(index)
    for index, buffer in enumerate(buffers, start=1):
        assert (buffer == index).all()


def test_small_matrices_share_a_huge_page() -> None:
    """Turns red when every matrix takes whole pages of its own."""
    arena = WeightArena()
    first, second = arena.zeros(1000), arena.zeros(1000)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 1024


def test_memory_is_given_back_with_the_last_buffer() -> None:
    """Turns red when a model that was dropped keeps its weights."""
    arena = WeightArena()
    buffer = arena.zeros(4 * CHUNK)
    before = _mapped_bytes()
    del buffer, arena
    gc.collect()
    assert _mapped_bytes() <= before - 4 * CHUNK


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads mappings through /proc")
def test_memory_is_private() -> None:
    """Turns red when pages are shared: Linux then gives no huge ones on request, and what a forked
    child writes changes the weights of its parent."""
    buffer = WeightArena().zeros(HUGE_PAGE)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= buffer.data_ptr() < last:
            assert permissions == "rw-p"
            return
    pytest.fail("the buffer is in no mapping")


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a model cannot load because the kernel refuses the advice."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # unknown, as it is there
    assert not WeightArena().zeros(100).any()


def _mapped_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        size = next(line for line in status if line.startswith("VmSize"))
    return 1024 * int(size.split()[1])
