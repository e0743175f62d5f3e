"""`copy_blocks` and `swap_blocks` in Triton: one kernel that moves blocks of all layers."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.kv.swap_blocks.reference import swap_blocks as swap_between_devices

__all__ = ["copy_blocks", "swap_blocks"]

_WORDS_PER_PROGRAM = 2048
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit(do_not_specialize=["source_blocks", "target_blocks"])
def _move_blocks_kernel(
    source_ptr,
    target_ptr,
    src_ptr,
    dst_ptr,
    source_blocks,
    target_blocks,
    block_words,
    BLOCK: tl.constexpr,
):
    """source, target: [planes, blocks, words] of one pool each. Grid: (copies, planes, pieces)."""
    copy = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < block_words
    source = plane * source_blocks + tl.load(src_ptr + copy)
    target = plane * target_blocks + tl.load(dst_ptr + copy)
    words = tl.load(source_ptr + source * block_words + word, mask=inside, other=0)
    tl.store(target_ptr + target * block_words + word, words, mask=inside)


def copy_blocks(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Contract in `quire.ops.kv.copy_blocks`."""
    count = src.numel()
    if count == 0:
        return
    # Copy through a buffer: a source may be another copy's destination, and programs have no order.
    buffer = torch.empty(
        (pages.shape[0], count, *pages.shape[2:]), dtype=pages.dtype, device=pages.device
    )
    places = torch.arange(count, device=pages.device)
    _move(pages, buffer, src, places)
    _move(buffer, pages, places, dst)


def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, src: torch.Tensor, dst: torch.Tensor
) -> None:
    """Contract in `quire.ops.kv.swap_blocks`. Between two devices torch copies."""
    if source.device != target.device:
        swap_between_devices(source, target, src, dst)
    elif src.numel() > 0:
        _move(source, target, src, dst)


def _move(source: torch.Tensor, target: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    planes = source.shape[0]
    block_bytes = source[0, 0].numel() * source.element_size()
    word = next(each for each in _WORDS if block_bytes % each.itemsize == 0)
    block_words = block_bytes // word.itemsize
    grid = (src.numel(), planes, triton.cdiv(block_words, _WORDS_PER_PROGRAM))
    _move_blocks_kernel[grid](
        source.view(-1).view(word),
        target.view(-1).view(word),
        src.to(source.device),
        dst.to(source.device),
        source.shape[1],
        target.shape[1],
        block_words,
        BLOCK=_WORDS_PER_PROGRAM,
    )
