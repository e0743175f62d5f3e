"""Preempted requests that wait in host memory, on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, EngineError
from quire.compute.kv_transfer.block_copies import DirectCopies
from quire.compute.kv_transfer.host_pages import HostPages
from quire.config.settings import EngineSettings

Maker = Any


@pytest.fixture
def make() -> Iterator[Maker]:
    """Engines of the bundled model; closed at the end."""
    with ExitStack() as stack:

        def build(**changes: Any) -> LLM:
            settings = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
            chosen = {**settings, "dtype": "float32", "skip_tokenizer_init": True, **changes}
            return stack.enter_context(LLM(quiet=True, **chosen))

        yield build


def outputs(llm: LLM, n: int = 1) -> list[Any]:
    rng = np.random.default_rng(5)
    asks = [{"prompt_token_ids": rng.integers(5, 900, 12 + 3 * i).tolist()} for i in range(6)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=9, temperature=0.8, n=n)
    return llm.generate(asks, params, use_tqdm=False)


def tokens(results: list[Any]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in each.outputs] for each in results]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("n", "blocks"), [(1, 9), (3, 18)])
def test_swapped_is_not_preempted(make: Maker, n: int, blocks: int, kv_cache_dtype: str) -> None:
    """A pool for about two of six requests: most are swapped, some again and again."""
    roomy = make(kv_cache_dtype=kv_cache_dtype)
    tight = make(
        num_kv_blocks=blocks,
        swap_space="64MiB",
        preemption_mode="swap",
        kv_cache_dtype=kv_cache_dtype,
    )
    assert tokens(outputs(tight, n)) == tokens(outputs(roomy, n))
    stats = tight.engine.client.stats()
    assert stats.swapped_in_total > 2
    assert stats.num_used_host_blocks == 0


def test_a_full_host_computes_again(make: Maker) -> None:
    page = make().engine.resolved.layout.page_bytes
    tight = make(num_kv_blocks=9, swap_space=f"{page}B", preemption_mode="swap")
    assert tokens(outputs(tight)) == tokens(outputs(make()))
    stats = tight.engine.client.stats()
    assert stats.preempted_total > stats.swapped_out_total


def test_what_a_failed_copy_lost_is_computed_again(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third copy raises, out or in: nobody fails, and nobody reads what is not there."""
    expected = tokens(outputs(make()))
    llm = make(num_kv_blocks=9, swap_space="64MiB", preemption_mode="swap")
    host: HostPages = llm.engine.client._core._executor._worker._assembly.tiers.host
    copies = host._copies
    assert isinstance(copies, DirectCopies)
    whole, calls = copies._swap_blocks, 0

    def breaks(*args: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise EngineError("the copy engine stumbled")
        whole(*args)

    monkeypatch.setattr(copies, "_swap_blocks", breaks)
    assert tokens(outputs(llm)) == expected
    assert calls > 6
    assert llm.engine.client.stats().num_used_host_blocks == 0
    monkeypatch.undo()
    assert tokens(outputs(llm)) == expected


def test_auto_measures_what_is_cheaper(make: Maker) -> None:
    """Copying a block takes microseconds, computing 16 tokens far longer."""
    llm = make(num_kv_blocks=9, swap_space="64MiB")
    assert llm.engine.resolved.settings.preemption_mode == "auto"
    assert tokens(outputs(llm)) == tokens(outputs(make()))
    assert llm.engine.client.stats().swapped_in_total > 0


def test_settings() -> None:
    assert EngineSettings.from_options({"swap_space": 4}).swap_space == 4 * 2**30
    assert EngineSettings.from_options({"swap_space": "0.5"}).swap_space == 2**29
    assert EngineSettings.from_options({"swap_space": "64MiB"}).swap_space == 64 * 2**20
    with pytest.raises(ConfigError, match="preemption_mode='swap' has no memory to swap to"):
        EngineSettings(preemption_mode="swap")
    with pytest.raises(ConfigError, match="swap_space cannot be 'much'"):
        EngineSettings.from_options({"swap_space": "much"})


def test_a_swap_space_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="hold no KV block"):
        LLM(quiet=True, swap_space="100B")
