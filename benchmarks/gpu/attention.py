"""Attention over the paged cache: bytes of K and V per second, arithmetic of prompts, and what
paging costs beside the same kernel over contiguous memory.

Random data in blocks of random order. Small inputs take turns with copies of themselves that
together do not fit the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.part import Part
from quire.base.platform import detect_platform
from quire.compute.attention import KVPool
from quire.config.kv_layout import KVFormat, KVLayout
from quire.ops import ALL_OPS, select

__all__ = ["decode", "paging", "prefill"]

BLOCK_SIZE = 16
BEYOND_CACHE = 2**28
"""Bytes that no L2 cache holds (50 MiB on an H200)."""

BATCHES, LENGTHS = (1, 8, 32, 256), (128, 512, 2048, 8192)
PROMPTS = (512, 4096, 16384)
CACHE_DTYPES = (torch.bfloat16, torch.int8)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (Heads("Qwen3-0.6B", 16, 8, 128), Heads("Llama-3.1-8B", 32, 8, 128))
TINY = Heads("tiny", 4, 2, 16)


def decode(part: Part) -> None:
    """One query per row; bytes of K and V, without scales."""
    shapes, batches, lengths = SHAPES, BATCHES, LENGTHS
    if part.is_dry:
        shapes, batches, lengths = (TINY,), (1, 3), (40,)
    elif part.quick:
        shapes, lengths = SHAPES[:1], (2048,)
    for heads in shapes:
        for dtype in CACHE_DTYPES:
            for batch in batches:
                for length in lengths:
                    call, size = decode_call(part, heads, dtype, batch, length)
                    name = f"{heads.model}, decode {batch} x {length}, {dtype} cache"
                    part.rate(name, "GB/s", size, part.seconds_of(call))


def prefill(part: Part) -> None:
    """One prompt without a prefix, visible half of the scores only, beside torch's own attention
    over contiguous tensors."""
    shapes, lengths = ((TINY,), (48,)) if part.is_dry else (SHAPES, PROMPTS)
    for heads in shapes:
        for length in lengths[-2:][:1] if part.quick else lengths:
            operations = 4.0 * length * (length + 1) / 2 * heads.num_heads * heads.head_dim
            call = attention_call(part, heads, torch.bfloat16, 1, length, length, BLOCK_SIZE)
            part.rate(
                f"{heads.model}, prefill {length}", "GFLOP/s", operations, part.seconds_of(call)
            )
            q = random(part, 1, heads.num_heads, length, heads.head_dim)
            k, v = random(part, 2, 1, heads.num_kv_heads, length, heads.head_dim).unbind()
            rival = vendor_attention(q, k, v, is_causal=True)
            part.rate(
                f"{heads.model}, prefill {length}, torch's attention",
                "GFLOP/s",
                operations,
                part.seconds_of(rival),
            )


def paging(part: Part) -> None:
    """One kernel over blocks of 16 in random order, over the same blocks in their order, and over
    one block per sequence, which is contiguous memory; then torch's attention over a contiguous
    cache. The paper of PagedAttention saw 20 to 26 % more time (section 7.1)."""
    shapes, sizes = ((TINY,), ((2, 32),)) if part.is_dry else (SHAPES, ((32, 2048), (256, 1024)))
    for heads in shapes:
        for batch, length in sizes[:1] if part.quick else sizes:
            found: dict[str, float] = {}
            for name, block_size, shuffled in (
                ("random blocks of 16", BLOCK_SIZE, True),
                ("ordered blocks of 16", BLOCK_SIZE, False),
                ("contiguous", length, False),
            ):
                call, size = decode_call(
                    part, heads, torch.bfloat16, batch, length, block_size, shuffled=shuffled
                )
                seconds = part.seconds_of(call)
                found[name] = seconds[0]
                part.rate(f"{heads.model}, {batch} x {length}, {name}", "GB/s", size, seconds)
            over = found["random blocks of 16"] / found["contiguous"] - 1
            part.figure(
                f"{heads.model}, {batch} x {length}, paged over contiguous", "%", [100 * over]
            )
            q = random(part, batch, heads.num_heads, 1, heads.head_dim)
            k, v = random(part, 2, batch, heads.num_kv_heads, length, heads.head_dim).unbind()
            rival = vendor_attention(q, k, v, is_causal=False)
            name = f"{heads.model}, {batch} x {length}, torch's attention, contiguous"
            part.rate(name, "GB/s", 2.0 * k.nbytes, part.seconds_of(rival))


def vendor_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> Callable[[], object]:
    """Return a call of torch's scaled_dot_product_attention on q [B, H, T, D] and k, v [B, K, T,
    D]."""
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=True
    )


def decode_call(
    part: Part,
    heads: Heads,
    dtype: torch.dtype,
    batch: int,
    length: int,
    block_size: int = BLOCK_SIZE,
    *,
    shuffled: bool = True,
) -> tuple[Callable[[], object], float]:
    """A call, or several over copies that no cache holds, and the bytes that they read."""
    size = 2.0 * batch * length * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    copies = 1 if part.is_dry else max(1, int(BEYOND_CACHE / size))
    calls = [
        attention_call(part, heads, dtype, batch, 1, length, block_size, shuffled=shuffled)
        for _ in range(copies)
    ]
    return lambda: run_all(calls), size * copies


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """One after the other."""
    for call in calls:
        call()


def attention_call(
    part: Part,
    heads: Heads,
    dtype: torch.dtype,
    batch: int,
    query_len: int,
    length: int,
    block_size: int,
    *,
    shuffled: bool = True,
) -> Callable[[], object]:
    """`batch` rows of `length` tokens, queries in bfloat16, over a pool of their size."""
    device = part.device
    _, attend = select(ALL_OPS["paged_attention"], detect_platform(device.type))
    per_row = -(-length // block_size)
    kv_format = KVFormat.plain(
        heads.num_kv_heads, heads.head_dim, str(dtype).removeprefix("torch.")
    )
    layout = KVLayout.of_windows([None], block_size, kv_format)
    layer = KVPool.allocate(layout, batch * per_row, dtype, device).layers[0]
    for cache, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        if scales is None:
            cache.normal_()
        else:
            cache.random_(-127, 128)
            scales.uniform_(0.005, 0.01)
    q = random(part, batch * query_len, heads.num_heads, heads.head_dim)
    number = torch.randperm if shuffled else torch.arange
    table = number(batch * per_row, device=device).to(torch.int32).view(batch, per_row)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * query_len
    lens = torch.full((batch,), length, device=device, dtype=torch.int32)
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    return lambda: attend(
        q,
        layer.k,
        layer.v,
        table,
        starts,
        lens,
        heads.head_dim**-0.5,
        max_query_len=query_len,
        **scales,
    )


def random(part: Part, *shape: int) -> torch.Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(shape, device=part.device).bfloat16()
