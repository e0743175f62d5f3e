"""Memory of the KV pool: taken as it is written, and the same without huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from quire.compute.attention import KVPool
from quire.config.kv_layout import KVFormat, KVLayout, LayerKV, group_layers
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


@pytest.mark.parametrize(
    ("name", "sizes", "tokens_in_a_block"), [("float32", (4, 0), (4, 8)), ("int8", (1, 4), (4, 4))]
)
def test_each_layer_sees_its_pages_as_its_format_says(
    name: str, sizes: tuple[int, int], tokens_in_a_block: tuple[int, int]
) -> None:
    """The layers have K and V of two widths, or one plane for both, with two scales in 8 bits.
    Turns red when a view reaches into another token, plane or layer, or when V of a latent group
    is not the first part of K."""
    wide = LayerKV(KVFormat(2, 12, 8, *sizes))
    latent = LayerKV(KVFormat(1, 12, 8, *sizes, num_planes=1), "latent")
    layout = KVLayout(group_layers([wide, latent, wide, latent], 4), 4)
    pool = KVPool.allocate(layout, 3, getattr(torch, name), CPU)
    assert pool.groups == {0: 0, 1: 1, 2: 0, 3: 1}
    assert tuple(group.tokens_per_block for group in layout.groups) == tokens_in_a_block
    fewer, more = tokens_in_a_block
    for group, (tokens, heads) in enumerate(((fewer, 2), (more, 1))):  # a block is of one group
        tensors: list[torch.Tensor] = []
        for layer in layout.groups[group].layers:
            cache = pool.layers[layer]
            assert cache.k.shape == (3, tokens, heads, 12)
            assert cache.v.shape == (3, tokens, heads, 8)
            scales = [each for each in (cache.k_scale, cache.v_scale) if each is not None]
            of_value = (3, tokens, heads)
            of_key = of_value if group == 0 else (3, tokens, 2)
            assert [each.shape for each in scales] == [of_key, of_value] * (name == "int8")
            if group == 0:
                tensors += (cache.k, cache.v, *scales)
                continue
            assert cache.v.data_ptr() == cache.k.data_ptr()
            assert cache.v.stride() == cache.k.stride()
            if cache.k_scale is not None and cache.v_scale is not None:
                assert cache.v_scale.data_ptr() == cache.k_scale.data_ptr()
            tensors += (cache.k, *scales[:1])
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        assert all((tensor == value).all() for value, tensor in enumerate(tensors))


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE
