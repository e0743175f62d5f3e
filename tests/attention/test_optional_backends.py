"""FlashAttention-3 and FlashInfer: when they are chosen, and what they are told.

Neither is installed here, nor would it run on a CPU. Stand-ins have the signatures of their
documented doors, hold callers to the documented shapes and compute by the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.base.platform import Platform, detect_platform
from quire.base.platform.gpu_facts import GpuFacts
from quire.compute.attention import (
    AttentionNeeds,
    GroupInputs,
    KVPool,
    ScoreOptions,
    StepInputs,
    select_backend,
)
from quire.compute.attention.select import BACKENDS
from quire.config.kv_layout import KVFormat, KVLayout
from quire.ops import ALONE
from quire.ops.attention.paged_attention.reference import paged_attention
from quire.ops.attention.paged_batch import paged_batch
from quire.ops.kv.pages import EMPTY_BYTE

NEEDS = AttentionNeeds(torch.bfloat16, torch.bfloat16, 64, 4, 2)
H200 = GpuFacts("nvidia", "H200", "SM 90", (9, 0), 2**37, 2**37, "580", (13, 0))


def platform(capability: tuple[int, int] = (9, 0)) -> Platform:
    return replace(detect_platform(), device="cuda", gpu=replace(H200, capability=capability))


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    assert k is None
    assert v is None
    assert causal
    assert isinstance(max_seqlen_q, int)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert window_size[1] == (-1 if window_size[0] == -1 else 0)
    for integers in (cache_seqlens, page_table, cu_seqlens_q):
        assert integers.dtype == torch.int32
    return paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        cu_seqlens_q,
        cache_seqlens,
        softmax_scale or 0.0,
        None if window_size[0] == -1 else window_size[0] + 1,
        soft_cap=softcap or None,
    )


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans counted by `plans`; a plan is of one step."""

    plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        type(self).plans += 1
        assert causal
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        counts = paged_kv_indptr.diff()
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._dtypes = (q_data_type, kv_data_type)
        self._table = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        for row, pages in enumerate(paged_kv_indices.split(counts.tolist())):
            self._table[row, : len(pages)] = pages
        self._lens = (counts - 1) * page_size + paged_kv_last_page_len
        self._starts, self._scale = qo_indptr, sm_scale
        self._window = None if window_left == -1 else window_left + 1
        self._soft_cap = logits_soft_cap or None

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        k, v = paged_kv_cache
        assert (q.shape[1], k.shape[2], q.shape[2]) == self._heads
        assert (q.dtype, k.dtype) == self._dtypes
        return paged_attention(
            q,
            k,
            v,
            self._table,
            self._starts,
            self._lens,
            self._scale,
            self._window,
            soft_cap=self._soft_cap,
        )


DOORS = {
    "fa3": ("flash_attn_interface", flash_attn_with_kvcache),
    "flashinfer": ("flashinfer", BatchPrefillWithPagedKVCacheWrapper),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, door in DOORS.values():
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, door.__name__, door)
        monkeypatch.setitem(sys.modules, name, module)
    return


@pytest.mark.usefixtures("installed")
def test_flash_attention_3_is_the_choice_on_hopper() -> None:
    """Turns red when an installed library is passed over, or nothing says so at start."""
    choice = select_backend(platform(), NEEDS)
    assert choice.backend.name == "fa3"
    assert choice.reason == "attention: fa3 (best that serves here)"


@pytest.mark.usefixtures("installed")
def test_flashinfer_serves_where_no_kernel_of_ours_does() -> None:
    """Here Triton is refused, since torch sees no GPU. Its steps must not be captured."""
    choice = select_backend(platform((8, 9)), NEEDS)
    assert choice.backend.name == "flashinfer"
    assert "fa3 cannot serve: it is for Hopper GPUs" in choice.reason
    assert not choice.backend.is_capturable


def test_what_is_not_installed_is_said() -> None:
    """Turns red when a missing library ends the start."""
    choice = select_backend(platform(), NEEDS)
    assert choice.backend.name == "reference"
    assert "flash_attn_interface is not installed" in choice.reason
    assert "flashinfer is not installed" in choice.reason


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"scores": frozenset({"soft_cap"})}, None),
        ({"scores": frozenset({"soft_cap", "sinks"})}, "no attention sinks"),
        ({"scores": frozenset({"alibi_slopes"})}, "no ALiBi"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "does not compute in float32"),
        ({"cache_dtype": torch.int8}, "no KV cache in int8 for a model in bfloat16"),
        ({"head_dim": 320}, "the model's have 320"),
    ],
)
def test_what_they_serve(name: str, changes: dict[str, Any], expected: str | None) -> None:
    """Turns red when a model is given to a library that drops what it needs."""
    refusal = BACKENDS[name].refusal(platform(), replace(NEEDS, **changes))
    assert (refusal is None) if expected is None else expected in (refusal or "")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", DOORS)
def test_they_are_told_pages_lengths_windows_and_caps(name: str) -> None:
    """Two groups, of which one slides, with two layers of different scales each, in two steps.
    Turns red when a window is off by one, a group reads another one's pages, or a plan is stale."""
    backend = BACKENDS[name].make(ALONE)
    before = BatchPrefillWithPagedKVCacheWrapper.plans
    for seed, rows in enumerate([[(1, 30), (4, 12), (1, 16)], [(1, 31), (1, 13), (9, 9)]]):
        for layer, expected, got in layers_of_a_step(backend, seed, rows):
            torch.testing.assert_close(got, expected, msg=f"step {seed}, layer {layer}")
    if name == "flashinfer":  # once per step, group and scale; not per layer
        assert BatchPrefillWithPagedKVCacheWrapper.plans - before == 2 * 2 * 2


def layers_of_a_step(
    backend: Any, seed: int, rows: list[tuple[int, int]]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Layer index, what the reference gives and what the backend gives."""
    batches = [
        paged_batch(
            torch.Generator().manual_seed(2 * seed + group),
            rows,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            block_size=8,
            dtype=torch.bfloat16,
        )
        for group in range(2)
    ]
    num_blocks = batches[0].k_cache.shape[0]
    layout = KVLayout.of_windows([None, 7] * 3, 8, KVFormat.plain(2, 64, "bfloat16"))
    pool = KVPool.allocate(layout, num_blocks, torch.bfloat16, torch.device("cpu"))
    pool.pages.fill_(EMPTY_BYTE)
    groups: list[GroupInputs] = []
    for batch, window in zip(batches, (None, 7), strict=True):
        plan = backend.plan(batch.query_start_loc, batch.seq_lens, batch.block_table, window)
        slots = torch.empty(0, dtype=torch.int64)
        groups.append(GroupInputs(batch.block_table, slots, window, plan))
    longest = max(queries for queries, _ in rows)
    first = batches[0]
    step = StepInputs(first.query_start_loc, first.seq_lens, longest, 31, tuple(groups), pool)
    reference = BACKENDS["reference"].make(ALONE)
    for layer in range(6):
        batch, group = batches[layer % 2], groups[layer % 2]
        pool.layers[layer].k.copy_(batch.k_cache)
        pool.layers[layer].v.copy_(batch.v_cache)
        scale, scores = (0.2, ScoreOptions()) if layer < 4 else (0.1, ScoreOptions(soft_cap=1.5))
        arguments = (first.q, pool.layers[layer], scale, step, group, scores)
        yield layer, reference.run(*arguments), backend.run(*arguments)
