"""Paged attention on the CPU: decode bandwidth and prefill arithmetic, beside the machine's limits.

    python -m benchmarks.kernels.attention_cpu [--quick] [--threads N] [--repeats N] [--output FILE]

Heads of Qwen3-0.6B, 16 query heads over 8 kv heads of 128, of Llama 3, 32 over 8, and, decoding
only, of Qwen2.5-7B, 28 over 4; random data, blocks in random order in the pool of an engine. Every
provider is compared with the reference before it is timed. Figures are medians over the repeats,
with the lowest and highest. What a shared machine can do changes from one minute to the next, so
each figure takes turns with what it is to be compared with. Decode: "read beside", a sum over 512
MiB of float32; "read of huge pages beside", the same in memory like the pool's; "the same blocks
beside", a sum over the very blocks in their order (torch's embedding_bag), since blocks that lie
apart are read more slowly than one stretch of memory. Prefill: torch's scaled_dot_product_attention
over K and V that lie contiguous.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from benchmarks.kernels.kernel_figures import SEED, Call, Figure, blocks_read, figures_by_turns, run
import torch

from quire.compute.attention import KVPool, LayerCache
from quire.config.kv_layout import KVFormat, KVLayout
from quire.ops import ALL_OPS, REFERENCE, Team, check_provider, select
from quire.ops.compile import ISAS
from quire.ops.native.huge_pages import map_huge_pages
from quire.ops.attention.paged_batch import PagedBatch, paged_batch
from quire.base.platform import detect_platform

QWEN, LLAMA, QWEN_7B = (16, 8), (32, 8), (28, 4)  # query heads, kv heads
HEAD_DIM, BLOCK_SIZE = 128, 16
UNIT = "paged_attention"  # of csrc; a widened instruction set may have it from a narrower one
PAGED_ATTENTION = ALL_OPS["paged_attention"]
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
INT8 = (torch.bfloat16, torch.int8)
LONG = [(1, 4096)] * 8
DECODES = ([(1, 256)], [(1, 4096)], [(1, 1024)] * 8, [(1, 1024)] * 32)
BLOCK_SIZES = (16, 32, 64, 128)
PREFILLS = (64, 512, 2048)

Attention = Callable[..., torch.Tensor]
Rows = Sequence[tuple[int, int]]


def in_a_pool(batch: PagedBatch) -> LayerCache:
    """The batch's K and V where an engine has them, whose pages may be huge."""
    num_blocks, block_size, kv_heads, head_dim = batch.k_cache.shape
    dtype = batch.k_cache.dtype
    kv_format = KVFormat.plain(kv_heads, head_dim, str(dtype).removeprefix("torch."))
    layout = KVLayout.of_windows([None], block_size, kv_format)
    layer = KVPool.allocate(layout, num_blocks, dtype, batch.k_cache.device).layers[0]
    layer.k.copy_(batch.k_cache)
    layer.v.copy_(batch.v_cache)
    for scales, given in ((layer.k_scale, batch.k_scale), (layer.v_scale, batch.v_scale)):
        if scales is not None and given is not None:
            scales.copy_(given)
    return layer


def decode_calls(
    label: str,
    call: Attention,
    rows: Rows,
    dtypes: tuple[torch.dtype, torch.dtype],
    block_size: int = BLOCK_SIZE,
    heads: tuple[int, int] = QWEN,
) -> tuple[Call, Call]:
    """Return attention of rows of one query and one length each, and the read of their blocks:
    bytes of K, V and scales. dtypes: dtype of the queries and of the cache."""
    name, arguments, layer = prepared(rows, dtypes, block_size, heads)
    tokens = rows[0][1]
    amount = 2.0 * len(rows) * tokens * layer.k.stride(1) * layer.k.itemsize
    read = blocks_read((layer.k, layer.v), arguments[3], tokens)
    return (
        ("the same blocks beside", "GB/s", amount, read),
        (f"decode {len(rows)} x {tokens}, {name}, {label}", "GB/s", amount, bound(call, arguments)),
    )


def prefill_call(
    label: str,
    call: Attention,
    length: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    heads: tuple[int, int] = QWEN,
) -> Call:
    """Attention of one whole prompt: operations, of the visible half of the scores only."""
    name, arguments, _ = prepared([(length, length)], dtypes, BLOCK_SIZE, heads)
    amount = prefill_operations(length, heads)
    return f"prefill {length}, {name}, {label}", "GFLOP/s", amount, bound(call, arguments)


def prefill_operations(length: int, heads: tuple[int, int]) -> float:
    return 4.0 * (length * (length + 1) // 2) * heads[0] * HEAD_DIM


def torch_prefill(length: int, dtype: torch.dtype, heads: tuple[int, int]) -> Call:
    """torch's own attention over contiguous K and V, one head after the other in memory."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (
        torch.randn((1, count, length, HEAD_DIM), generator=generator).to(dtype)
        for count in (heads[0], heads[1], heads[1])
    )

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1]
        )

    return f"torch beside, {dtype}", "GFLOP/s", prefill_operations(length, heads), attend


def bound(call: Attention, arguments: tuple[object, ...]) -> Callable[[], object]:
    return lambda: call(*arguments)


def prepared(
    rows: Rows, dtypes: tuple[torch.dtype, torch.dtype], block_size: int, heads: tuple[int, int]
) -> tuple[str, tuple[torch.Tensor, ...], LayerCache]:
    """Return the name of a case, the arguments of attention, and the cache among them."""
    dtype, cache_dtype = dtypes
    batch = paged_batch(
        torch.Generator().manual_seed(SEED),
        rows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    cache = in_a_pool(batch)
    arguments = (
        batch.q,
        cache.k,
        cache.v,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        HEAD_DIM**-0.5,
        None,
        cache.k_scale,
        cache.v_scale,
    )
    name = f"{heads[0]}/{heads[1]} heads, blocks of {block_size}, {cache_dtype} cache"
    return name, arguments, cache


def provider_figures(label: str, call: Attention, quick: bool, repeats: int) -> Iterator[Figure]:
    """Decode at all lengths, block sizes and cache dtypes; prefill. Each beside its limits."""
    huge = map_huge_pages(2**29)[: 2**29].view(torch.float32).fill_(1)
    reads: list[Call] = [
        (name, "GB/s", float(memory.nbytes), memory.sum)
        for name, memory in (
            ("read beside", torch.ones(2**27)),
            ("read of huge pages beside", huge),
        )
    ]
    for dtypes in (*DTYPES, INT8):
        for heads in (QWEN, LLAMA, QWEN_7B):
            for block_size in BLOCK_SIZES[:1] if quick else BLOCK_SIZES:
                decode = decode_calls(label, call, LONG, dtypes, block_size, heads)
                yield from figures_by_turns([*reads, *decode], repeats)
        for heads in (QWEN, LLAMA):
            for length in PREFILLS[1:2] if quick else PREFILLS:
                prefill = prefill_call(label, call, length, dtypes, heads)
                beside = torch_prefill(length, dtypes[0], heads)
                yield from figures_by_turns([beside, prefill], repeats)
        for rows in () if quick else DECODES:
            yield from figures_by_turns(decode_calls(label, call, rows, dtypes), repeats)


def attention_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Every provider of this machine that equals the reference, over dtypes and shapes."""
    platform, team = detect_platform(), Team(torch.get_num_threads())
    own = {f"cpu_{isa.name}" for isa in ISAS if isa.extends is None or UNIT in isa.units}
    for provider in PAGED_ATTENTION.providers:
        if provider.name not in own or provider.unavailable(platform) is not None:
            continue
        report = check_provider(PAGED_ATTENTION, provider)
        if not report.ok:
            raise SystemExit("\n".join(report.failures))
        call = provider.load(team)
        yield from provider_figures(provider.name, call, options.quick, options.repeats)
    _, reference = select(PAGED_ATTENTION, platform, REFERENCE)
    decode = decode_calls(REFERENCE, reference, [(1, 1024)] * 8, DTYPES[0])
    prefill = prefill_call(REFERENCE, reference, 512, DTYPES[0])
    yield from figures_by_turns([*decode, prefill], options.repeats)


if __name__ == "__main__":
    run("attention_cpu", __doc__, attention_figures)
