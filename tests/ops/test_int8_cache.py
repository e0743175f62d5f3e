"""Contents of an int8 cache: close to what was written, and finite only where that was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.config.kv_layout import KVFormat
from quire.ops import ALL_OPS, Team
from quire.ops.kv.pages import EMPTY_BYTE, empty_cache, page_views

PLATFORM = detect_platform()
OP = ALL_OPS["rope_and_write_kv"]
WRITERS = {
    "reference": OP.reference,
    **{p.name: p.load(Team(2)) for p in OP.providers if p.unavailable(PLATFORM) is None},
}


def written(call: Callable[..., None], k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k [T, K, D], given as V too, out of a cache: elements [T, K, D] and scales [T, K]."""
    (k_cache, k_scale), (v_cache, v_scale) = (
        empty_cache(len(k) + 1, 1, *k.shape[1:], torch.int8) for _ in range(2)
    )
    assert k_scale is not None and v_scale is not None
    slots, positions = torch.arange(len(k)) + 1, torch.zeros(len(k), dtype=torch.int64)
    qkv = torch.cat((k, k), dim=1).flatten(1)
    call(qkv, 0, positions, None, None, k_cache, v_cache, slots, k_scale, v_scale)
    assert k_scale[0].isnan().all()
    assert torch.equal(k_cache, v_cache)
    assert torch.equal(k_scale[1:].nan_to_num(-1), v_scale[1:].nan_to_num(-1))
    return k_cache[1:, 0], k_scale[1:, 0]


@pytest.mark.parametrize("writer", WRITERS)
@examples(50)
@given(
    head_dim=st.integers(1, 200),
    exponent=st.integers(-45, 38),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_an_element_is_off_by_half_a_step(
    writer: str, head_dim: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    """Turns red on a wrong rounding, an overflow of the largest element, or a mixed-up head."""
    generator = torch.Generator().manual_seed(seed)
    k = (torch.rand(3, 2, head_dim, generator=generator) * 2 - 1) * 10.0**exponent
    k = k.to(dtype)
    k[k.isinf()] = 1.0
    elements, scale = written(WRITERS[writer], k)
    top = k.double().abs().amax(-1)
    assert torch.allclose(scale.double(), top / 127, rtol=1e-6, atol=1.2e-38)
    error = (elements.double() * scale.double().unsqueeze(-1) - k.double()).abs().amax(-1)
    assert (error <= 0.50001 * top / 127 + 127 * 1.2e-38).all()


@BY_PAIRS
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_what_is_not_finite_is_seen_by_who_reads_it(writer: str, bad: float, place: int) -> None:
    """Turns red when a broken activation becomes a harmless-looking key."""
    k = torch.ones(2, 2, 40)
    k[1, 0, place] = bad
    elements, scale = written(WRITERS[writer], k)
    assert scale[1, 0].isnan()
    assert (elements[1, 0] == 0).all()
    assert scale[0].isfinite().all()
    assert scale[1, 1].isfinite()


def test_scales_live_in_the_page_of_their_tokens() -> None:
    """Turns red when copying the bytes of a page leaves its scales behind."""
    pages = torch.full((2, 3, 4, 16), EMPTY_BYTE, dtype=torch.uint8)  # 5 elements, 2 scales
    elements, scales = page_views(pages, torch.int8, KVFormat.plain(1, 5, "int8"), 5)
    assert scales is not None
    elements[0, 1], scales[0, 1] = 7, 0.5
    ALL_OPS["copy_blocks"].reference(pages, torch.tensor([1]), torch.tensor([2]))
    assert (elements[0, 2] == 7).all()
    assert (scales[0, 2] == 0.5).all()
    assert scales[0, 0].isnan().all()
