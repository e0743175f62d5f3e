"""The references equal formulas written another way: they are the oracle of every provider."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tests.ops.test_paged_attention import arguments, scales
from torch.profiler import ProfilerActivity, profile

from quire.base.errors import ConfigError
from quire.ops import ALL_OPS
from quire.ops.attention.paged_batch import paged_batch
from quire.ops.kv.rope_and_write_kv.rope import rope


def reference(name: str):
    return ALL_OPS[name].reference


@pytest.mark.parametrize("window", [None, 5])
def test_paged_attention_equals_torch_on_gathered_keys(window: int | None) -> None:
    """Turns red when the mask is off by one, a head reads another group, or a page is mixed up."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(3, 20), (1, 9), (12, 12)],
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        dtype=torch.float32,
    )
    got = reference("paged_attention")(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        0.3,
        window,
    )
    start = 0
    for row, (queries, length) in enumerate([(3, 20), (1, 9), (12, 12)]):
        pages = batch.block_table[row, : -(-length // 4)].long()
        k = batch.k_cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
        v = batch.v_cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
        q = batch.q[start : start + queries].transpose(0, 1)[None]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            mask &= torch.ones(length, length, dtype=torch.bool).triu(-window + 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[-queries:], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(got[start : start + queries], expected[0].transpose(0, 1))
        start += queries


def test_scores_are_capped_then_slanted_and_a_sink_takes_its_share() -> None:
    """Written out key by key. Turns red on another order of the three, or the slope of another
    head."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(3, 7)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        dtype=torch.float32,
    )
    slopes, sinks = torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.tensor([0.3, -1.0, 2.0, 0.0])
    options = {"soft_cap": 1.5, "alibi_slopes": slopes, "sinks": sinks}
    got = reference("paged_attention")(*arguments(batch), 0.9, **options)
    pages = batch.block_table[0, :2].long()
    k, v = batch.k_cache[pages].flatten(0, 1), batch.v_cache[pages].flatten(0, 1)
    for head in range(4):
        for query in range(3):
            numerator, denominator = torch.zeros(8), math.exp(sinks[head])
            for key in range(5 + query):
                score = 1.5 * math.tanh(0.9 * float(batch.q[query, head] @ k[key, head // 2]) / 1.5)
                weight = math.exp(score + float(slopes[head]) * (key - (4 + query)))
                numerator += weight * v[key, head // 2]
                denominator += weight
            torch.testing.assert_close(got[query, head], numerator / denominator)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 6])
def test_a_decode_step_asks_the_device_for_nothing(
    window: int | None, cache_dtype: torch.dtype
) -> None:
    """On a device without values, where whoever reads one is refused; then with values, beside the
    way that reads lengths. A row of no tokens is padding and a row of no query is left out."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(1, 9), (0, 5), (1, 0), (1, 18)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        dtype=torch.float32,
        cache_dtype=cache_dtype,
    )
    call = partial(reference("paged_attention"), scale=0.3, window=window)
    nowhere = {name: None if s is None else s.to("meta") for name, s in scales(batch).items()}
    shapes = call(*(tensor.to("meta") for tensor in arguments(batch)), **nowhere, max_query_len=1)
    got = call(*arguments(batch), **scales(batch), max_query_len=1)
    assert shapes.shape == got.shape
    torch.testing.assert_close(got, call(*arguments(batch), **scales(batch)))
    assert torch.equal(got[1], torch.zeros(4, 8))


def test_rope_is_a_complex_rotation() -> None:
    """Turns red when a pair is built from the wrong dims or a rotated value feeds its partner."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 3, 12, generator=generator)
    angle = torch.randn(7, 4, generator=generator)
    positions = torch.tensor([0, 6, 3, 3, 1])
    turn = torch.polar(torch.ones_like(angle), angle)[positions].unsqueeze(1)
    expected = []
    for x in (q, k):
        pairs = x[..., :8].unflatten(-1, (2, 4)).mT.contiguous()
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).mT
        expected.append(torch.cat([turned.flatten(-2), x[..., 8:]], dim=-1))
    rope(q, k, positions, angle.cos(), angle.sin())
    torch.testing.assert_close(q, expected[0])
    torch.testing.assert_close(k, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_casts_like_transformers(dtype: torch.dtype) -> None:
    """Turns red when the weight is applied before the rounding that published weights expect."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    generator = torch.Generator().manual_seed(0)
    norm = modeling.LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(3, 48, generator=generator).to(dtype)
    assert torch.equal(reference("rms_norm")(x, norm.weight, 1e-5), norm(x))


def test_copies_read_all_sources_first() -> None:
    """Turns red when a rotation of blocks (1←0, 2←1, 0←2) copies a block that was overwritten."""
    pages = torch.arange(3.0).repeat(2, 1)[..., None]
    reference("copy_blocks")(pages, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    assert pages.squeeze(-1).tolist() == [[2.0, 0.0, 1.0]] * 2


def test_an_unknown_activation_is_named() -> None:
    """Turns red when a typing error in a checkpoint's config ends in a KeyError."""
    with pytest.raises(ConfigError, match=r"'swish2'.*Use one of"):
        reference("activation")(torch.ones(1), "swish2")


@pytest.mark.parametrize("k", [0, 1, 7, 40, 60])
def test_token_logprobs_list_the_best_without_a_sort_of_the_row(k: int) -> None:
    """Catches another order of equal logits, of -0.0 and of -inf, and a row sorted for a few."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randint(-2, 3, (5, 40), generator=random).float()
    logits[1, ::3] = -0.0
    logits[2, 5:] = -torch.inf
    logits[3] *= 1e-40  # below the normal numbers
    rows = torch.tensor([4, 2, 1, 0, 3])
    token_ids = torch.tensor([0, 4, 39, 12, 7], dtype=torch.int32)
    with profile(activities=[ProfilerActivity.CPU]) as steps:
        _, ranks, top_ids, top = reference("token_logprobs")(logits, rows, token_ids, k)
    assert not {event.key for event in steps.key_averages()} & {"aten::sort", "aten::argsort"}
    assert top_ids.dtype == torch.int32
    for place, row in enumerate(logits[rows].double()):
        order = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
        listed = [token for token in order[:k] if row[token] > -torch.inf]
        assert top_ids[place].tolist() == listed + [-1] * (k - len(listed))
        assert ranks[place] == 1 + order.index(int(token_ids[place]))
        expected = row.log_softmax(0).float()[listed].tolist()
        assert top[place].tolist() == pytest.approx(
            expected + [-math.inf] * (k - len(listed)), abs=1e-6
        )
