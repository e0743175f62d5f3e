"""The fused pass over qkv gives the bits of the operations that it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Provider, Team
from quire.ops.kv.pages import empty_cache
from quire.ops.kv.rope_and_write_kv.rope import rope
from quire.ops.kv.rope_and_write_kv.write_kv import write_kv
from quire.ops.random_tensors import DTYPES, normal

PLATFORM = detect_platform()
PROVIDERS = [pytest.param(p, id=p.name) for p in ALL_OPS["rope_and_write_kv"].providers]
TEAM = Team(2)
NUM_BLOCKS = 40


def bits(x: torch.Tensor) -> torch.Tensor:
    """With one NaN for all, since torch's conversions make another one than the kernels'."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("provider", PROVIDERS)
@examples(60)
@given(
    tokens=st.integers(0, 70),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([2, 8, 30, 64, 80, 128]),
    rotary=st.sampled_from([0.0, 0.5, 1.0]),
    normed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from([*DTYPES, torch.int8]),
    block_size=st.sampled_from([2, 16, 32, 64, 128]),
    broken=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_fused_equals_one_after_the_other(
    provider: Provider,
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    rotary: float,
    normed: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    broken: bool,
    seed: int,
) -> None:
    """The norm by its own kernel, then the references. Turns red on a wrong head, table row
    or slot, a rounding that the parts have and the whole has not, and on NaN that reaches another
    token."""
    reason = provider.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    norm = ALL_OPS["rms_norm"].provider(provider.name)
    assert norm is not None
    generator = torch.Generator().manual_seed(seed)
    heads, half = group * kv_heads, int(head_dim * rotary) // 2
    width = (heads + 2 * kv_heads) * head_dim
    qkv = normal(generator, tokens, width + 3, dtype=dtype)[:, :width]
    if broken and tokens:
        qkv[tokens // 2, heads * head_dim] = float("nan")
    angle = normal(generator, 50, half)
    cos, sin = (angle.cos(), angle.sin()) if half else (None, None)
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:tokens]
    slots[1::5] = -1
    weights = normal(generator, 2, head_dim, dtype=dtype) if normed else (None, None)
    caches = [
        [empty_cache(NUM_BLOCKS, block_size, kv_heads, head_dim, cache_dtype) for _ in "kv"]
        for _ in range(2)
    ]

    ((k_cache, k_scale), (v_cache, v_scale)), fused = caches[0], qkv.clone()
    provider.load(TEAM)(
        fused, heads, positions, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, *weights, 1e-5
    )
    parts = qkv.clone()
    q, k, v = parts.unflatten(-1, (heads + 2 * kv_heads, head_dim)).split(
        (heads, kv_heads, kv_heads), dim=1
    )
    if normed and tokens:
        for x, weight in ((q, weights[0]), (k, weights[1])):
            x.copy_(norm.load(TEAM)(x, weight, 1e-5))
    if cos is not None and sin is not None:
        rope(q, k, positions, cos, sin)
    (other_k, other_k_scale), (other_v, other_v_scale) = caches[1]
    write_kv(k, v, other_k, other_v, slots, other_k_scale, other_v_scale)

    assert torch.equal(bits(fused), bits(parts))
    assert torch.equal(bits(k_cache), bits(other_k))
    assert torch.equal(bits(v_cache), bits(other_v))
    if k_scale is not None and v_scale is not None:
        assert torch.equal(bits(k_scale), bits(other_k_scale))
        assert torch.equal(bits(v_scale), bits(other_v_scale))
