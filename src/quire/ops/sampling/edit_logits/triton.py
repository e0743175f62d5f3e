"""`edit_logits` in Triton. The effects of a row's history and lists on each token are marked in
integers, and one pass over the row applies them, so the result depends on no order."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["edit_logits"]

_BLOCK = 2048
_HISTORY, _READERS = 512, 8
"""Tokens of a history that a program reads at a time, and the number of programs, which go on to
its end."""

_BANS = 64

# A mark holds the count of the token in the output, and flags.
_COUNT = tl.constexpr((1 << 24) - 1)
_SEEN = tl.constexpr(1 << 24)
_ALLOWED = tl.constexpr(1 << 25)
_BANNED = tl.constexpr(1 << 26)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _mark_kernel(
    slots_ptr,
    row_tokens_ptr,
    max_tokens,
    num_prompt_ptr,
    num_tokens_ptr,
    penalties_ptr,
    allowed_start_ptr,
    allowed_ids_ptr,
    ban_start_ptr,
    bans_ptr,
    words_ptr,
    marks_ptr,
    vocab_size,
    HISTORY: tl.constexpr,
    BANS: tl.constexpr,
):
    """Grid: (rows, readers). marks: [rows, V], zero before."""
    row = tl.program_id(0).to(tl.int64)
    reader, readers = tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    prompt_len = tl.load(num_prompt_ptr + slot).to(tl.int32)
    length = tl.load(num_tokens_ptr + slot).to(tl.int32)
    tokens_ptr = row_tokens_ptr + slot * max_tokens
    marks_ptr += row * vocab_size
    lane = tl.arange(0, HISTORY)
    penalized = tl.load(penalties_ptr + row * 3) != 1.0
    penalized |= tl.load(penalties_ptr + row * 3 + 1) != 0.0
    penalized |= tl.load(penalties_ptr + row * 3 + 2) != 0.0
    if penalized:
        for start in range(reader * HISTORY, length, readers * HISTORY):
            at = start + lane
            token = tl.load(tokens_ptr + at, mask=at < length, other=-1)
            inside = (token >= 0) & (token < vocab_size)
            seen = tl.full([HISTORY], _SEEN, tl.int32)
            tl.atomic_or(marks_ptr + token, seen, mask=inside, sem="relaxed")
            once = tl.full([HISTORY], 1, tl.int32)
            tl.atomic_add(marks_ptr + token, once, mask=inside & (at >= prompt_len), sem="relaxed")
    if reader == 0:
        end = tl.load(allowed_start_ptr + row + 1)
        for start in range(tl.load(allowed_start_ptr + row), end, HISTORY):
            inside = start + lane < end
            token = tl.load(allowed_ids_ptr + start + lane, mask=inside, other=0)
            allowed = tl.full([HISTORY], _ALLOWED, tl.int32)
            tl.atomic_or(marks_ptr + token, allowed, mask=inside, sem="relaxed")
        end = tl.load(ban_start_ptr + row + 1)
        for start in range(tl.load(ban_start_ptr + row), end, BANS):
            entry = start + tl.arange(0, BANS)
            inside = entry < end
            ban_ptr = bans_ptr + entry * 4
            token = tl.load(ban_ptr, mask=inside, other=0)
            minimum = tl.load(ban_ptr + 1, mask=inside, other=0)
            first = tl.load(ban_ptr + 2, mask=inside, other=0)
            size = tl.load(ban_ptr + 3, mask=inside, other=0)
            is_word = size >= 0
            matches = is_word & (length - prompt_len >= size)
            for i in range(tl.max(size, axis=0)):
                compared = matches & (i < size)
                wanted = tl.load(words_ptr + first + i, mask=compared, other=0)
                actual = tl.load(tokens_ptr + length - size + i, mask=compared, other=0)
                matches &= wanted == actual
            early = (is_word == 0) & (length - prompt_len < minimum)
            banned = tl.full([BANS], _BANNED, tl.int32)
            tl.atomic_or(marks_ptr + token, banned, mask=inside & (matches | early), sem="relaxed")


@triton.jit
def _apply_kernel(
    logits_ptr,
    stride,
    rows_ptr,
    penalties_ptr,
    bias_start_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    allowed_start_ptr,
    marks_ptr,
    out_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, pieces of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    inside = token < vocab_size
    row_ptr = logits_ptr + tl.load(rows_ptr + row) * stride
    logit = tl.load(row_ptr + token, mask=inside, other=0.0).to(tl.float32)
    for i in range(tl.load(bias_start_ptr + row), tl.load(bias_start_ptr + row + 1)):
        biased = tl.load(bias_ids_ptr + i)
        if (biased >= first) & (biased < first + BLOCK):
            logit = tl.where(token == biased, logit + tl.load(bias_values_ptr + i), logit)
    mark = tl.load(marks_ptr + row * vocab_size + token, mask=inside, other=0)
    some = tl.load(allowed_start_ptr + row + 1) > tl.load(allowed_start_ptr + row)
    banned = ((mark & _BANNED) != 0) | (some & ((mark & _ALLOWED) == 0))
    logit = tl.where(banned, -_INFINITY, logit)
    if tl.max(mark, axis=0) > 0:
        repetition = tl.load(penalties_ptr + row * 3).to(tl.float32)
        divisor = tl.zeros([BLOCK], tl.float32) + repetition
        penalized = tl.where(logit > 0.0, tl.div_rn(logit, divisor), logit * repetition)
        logit = tl.where((mark & _SEEN) != 0, penalized, logit)
        presence = tl.load(penalties_ptr + row * 3 + 1)
        frequency = tl.load(penalties_ptr + row * 3 + 2)
        count = mark & _COUNT
        subtrahend = (frequency * count.to(tl.float64) + presence).to(tl.float32)
        logit -= tl.where(count > 0, subtrahend, 0.0)
    tl.store(out_ptr + row * vocab_size + token, logit, mask=inside)


def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    row_tokens: torch.Tensor,
    num_prompt: torch.Tensor,
    num_tokens: torch.Tensor,
    penalties: torch.Tensor,
    bias_start: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    allowed_start: torch.Tensor,
    allowed_ids: torch.Tensor,
    ban_start: torch.Tensor,
    bans: torch.Tensor,
    words: torch.Tensor,
) -> torch.Tensor:
    """Contract in `quire.ops.sampling.edit_logits`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab_size = len(rows), logits.shape[1]
    edited = torch.empty((count, vocab_size), dtype=torch.float32, device=logits.device)
    if count == 0:
        return edited
    marks = torch.zeros((count, vocab_size), dtype=torch.int32, device=logits.device)
    _mark_kernel[(count, _READERS)](
        slots,
        row_tokens,
        row_tokens.stride(0),
        num_prompt,
        num_tokens,
        penalties,
        allowed_start,
        allowed_ids,
        ban_start,
        bans,
        words,
        marks,
        vocab_size,
        HISTORY=_HISTORY,
        BANS=_BANS,
    )
    # products and sums are rounded one by one, like those of the reference
    _apply_kernel[(count, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        logits.stride(0),
        rows,
        penalties,
        bias_start,
        bias_ids,
        bias_values,
        allowed_start,
        marks,
        edited,
        vocab_size,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return edited
