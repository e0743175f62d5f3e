"""`rope_and_write_kv` in Triton: one program processes some heads of one token, from the projection
to the cache."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.native.cpu_provider import page_strides
from quire.ops.native.row_blocks import power_of_two

__all__ = ["rope_and_write_kv"]

_HEADS_PER_PROGRAM = 16


@triton.jit
def _normed(x, rstd, q_weight_ptr, k_weight_ptr, dim, head_dim, is_q):
    """Return x [heads, dims] · rstd · weight, rounded to the dtype after each product."""
    dtype = q_weight_ptr.dtype.element_ty
    q_weight = tl.load(q_weight_ptr + dim, mask=dim < head_dim, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dim, mask=dim < head_dim, other=0.0).to(tl.float32)
    weight = tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
    normed = (x * rstd[:, None]).to(dtype).to(tl.float32)
    return (weight * normed).to(dtype).to(tl.float32)


@triton.jit
def _scales(x, SMALLEST: tl.constexpr):
    """Return the scales of heads x [heads, dims] in int8, by the contract."""
    largest = tl.max(tl.abs(x), axis=1)
    num_broken = tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=1)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 127.0)
    scale = tl.where(scale >= SMALLEST, scale, 0.0)
    return tl.where(num_broken > 0, float("nan"), scale)


@triton.jit
def _quantized(x, scale, SMALLEST: tl.constexpr):
    usable = scale >= SMALLEST
    divisor = tl.where(usable, scale, 1.0)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, divisor)
    scaled = tl.where(usable[:, None], x * inverse[:, None], 0.0)
    # The last place of 1.5 · 2^23 is 1: the sum is rounded to the nearest even integer.
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _rope_and_write_kv_kernel(
    qkv_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    q_weight_ptr,
    k_weight_ptr,
    token_stride,
    num_heads,
    num_kv_heads,
    head_dim,
    half,
    block_size,
    page_block,
    page_token,
    scale_block,
    scale_token,
    eps,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SMALLEST: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid: (tokens, groups of HEADS heads of q, k and v)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    dtype = qkv_ptr.dtype.element_ty
    inside = (head < num_heads + 2 * num_kv_heads)[:, None] & (dim < head_dim)[None, :]
    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    in_q_or_k = inside & (head < num_heads + num_kv_heads)[:, None]
    row = qkv_ptr + token * token_stride + head[:, None] * head_dim
    x = tl.load(row + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)
    if NORMED:
        normed = _normed(x, rstd, q_weight_ptr, k_weight_ptr, dim, head_dim, is_q)
    else:
        normed = x
    if ROTATED:
        is_first, is_turned = dim < half, dim < 2 * half
        pair = tl.where(is_first, dim + half, tl.where(is_turned, dim - half, dim))
        partner = tl.load(row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()  # all threads have read the values that others will change
        if NORMED:
            partner = _normed(partner, rstd, q_weight_ptr, k_weight_ptr, pair, head_dim, is_q)
        angle = tl.load(positions_ptr + token) * half + tl.where(is_first, dim, pair)
        cos = tl.load(cos_ptr + angle, mask=is_turned, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=is_turned, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        turned = normed * cos[None, :] + partner * sin[None, :]
        normed = tl.where(is_turned[None, :], turned.to(dtype).to(tl.float32), normed)
    x = tl.where(in_q_or_k, normed, x)
    if NORMED or ROTATED:
        tl.store(row + dim[None, :], x.to(dtype), mask=in_q_or_k)

    slot = tl.load(slot_ptr + token)
    block, offset = slot // block_size, slot % block_size
    kv_head = tl.where(is_v, head - num_heads - num_kv_heads, head - num_heads)
    to_k = in_q_or_k & (head >= num_heads)[:, None] & (slot >= 0)
    to_v = inside & is_v[:, None] & (slot >= 0)
    if QUANTIZED:
        scale = _scales(x, SMALLEST)
        scale_at = block * scale_block + offset * scale_token + kv_head
        is_k = (head >= num_heads) & (head < num_heads + num_kv_heads)
        exists_v = is_v & (head < num_heads + 2 * num_kv_heads)
        tl.store(k_scale_ptr + scale_at, scale, mask=is_k & (slot >= 0))
        tl.store(v_scale_ptr + scale_at, scale, mask=exists_v & (slot >= 0))
        stored = _quantized(x, scale, SMALLEST)
    else:
        stored = x.to(k_cache_ptr.dtype.element_ty)
    at = block * page_block + offset * page_token + kv_head[:, None] * head_dim + dim[None, :]
    tl.store(k_cache_ptr + at, stored, mask=to_k)
    tl.store(v_cache_ptr + at, stored, mask=to_v)


def rope_and_write_kv(
    qkv: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Contract in `quire.ops.kv.rope_and_write_kv`."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    half = 0 if cos is None else cos.shape[-1]
    groups = triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM)
    _rope_and_write_kv_kernel[(qkv.shape[0], groups)](
        qkv,
        positions,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        k_cache,
        v_cache,
        k_cache if k_scale is None else k_scale,
        v_cache if v_scale is None else v_scale,
        slot_mapping,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        qkv.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        half,
        block_size,
        *page_strides(k_cache, k_scale),
        eps,
        NORMED=q_weight is not None,
        ROTATED=cos is not None,
        QUANTIZED=k_scale is not None,
        HEADS=_HEADS_PER_PROGRAM,
        SMALLEST=torch.finfo(torch.float32).tiny,
        DIM=power_of_two(head_dim),
        enable_fp_fusion=False,  # rounds like the reference, since int8 elements must not differ
    )
