"""The engine over an int8 cache: the laws hold to the bit, and the text hardly changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.engine.test_laws import assert_same, has_kernels, run, run_alone, workload
from tests.small_engines import SMALL

SETTINGS = {**SMALL, "kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    llm = LLM(None, **SETTINGS)
    yield llm
    llm.shutdown()


@pytest.mark.skipif(not has_kernels(), reason="plain torch may round by the size of a batch")
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"num_kv_blocks": 20, "depth": 1},
        {"enable_prefix_caching": False},
        {"block_size": 16, "num_kv_blocks": 64},
    ],
    ids=["batched", "chunked", "preempted", "no-prefix-cache", "other-pages"],
)
def test_other_ways_to_compute_give_the_same_bits(engine: LLM, other: dict[str, Any]) -> None:
    """Turns red when a token is read before it was quantized, or its scale stays behind when a
    block is copied, evicted or found again."""
    alone = run_alone(engine, workload())
    second = LLM(None, **{**SETTINGS, **other})
    try:
        assert_same(run(second, workload()), alone)
    finally:
        second.shutdown()


def test_forked_samples_equal_their_own_requests(engine: LLM) -> None:
    """Turns red when copying a shared block forgets its scales."""
    prompt = {"prompt_token_ids": workload()[0]}
    options = {"temperature": 0.9, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    [three] = engine.generate(prompt, SamplingParams(n=3, **options), use_tqdm=False)
    [one] = engine.generate(prompt, SamplingParams(n=1, **options), use_tqdm=False)
    assert three.outputs[0].token_ids == one.outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in three.outputs}) > 1
