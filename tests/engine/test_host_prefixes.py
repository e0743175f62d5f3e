"""Evicted prefixes in host memory, on the real engine: the numbers that come back are the computed
ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, LoRARequest, RequestOutput
from quire.base.errors import EngineError
from quire.compute.kv_transfer.block_copies import DirectCopies
from tests.engine.test_laws import assert_same, params
from tests.lora.adapters import write_adapter
from tests.models.families import Case, write_checkpoint
from tests.small_engines import Maker, small_engines

LENGTH = 41
PROMPT = np.random.default_rng(2).integers(5, 900, LENGTH).tolist()
OTHERS = np.random.default_rng(3).integers(5, 900, (6, 50)).tolist()
TIGHT = {"num_kv_blocks": 30, "swap_space": "64MiB"}
"""The others evict the prompt from the device."""


@pytest.fixture
def make() -> Iterator[Maker]:
    with small_engines(None) as maker:
        yield maker


def ask(
    llm: LLM, prompt: list[int] = PROMPT, *, adapter: LoRARequest | None = None, salt: str = "",
    **more: Any,
) -> RequestOutput:  # fmt: skip
    """The answer to a prompt of ids."""
    given: dict[str, Any] = {"prompt_token_ids": prompt}
    if salt:
        given["cache_salt"] = salt
    (found,) = llm.generate(given, params(1, 8, **more), use_tqdm=False, lora_request=adapter)
    return found


def evict(llm: LLM) -> None:
    for prompt in OTHERS:
        ask(llm, prompt)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_hit_in_host_memory_is_cold(make: Maker, kv_cache_dtype: str, n: int) -> None:
    llm = make(kv_cache_dtype=kv_cache_dtype, **TIGHT)
    cold = ask(llm, n=n)
    assert cold.num_cached_tokens == 0
    evict(llm)
    warm = ask(llm, n=n)
    assert warm.num_cached_tokens == LENGTH - 1
    assert_same([warm], [cold])
    assert llm.engine.client.stats().blocks_loaded_total == LENGTH // 4


def test_without_host_memory_it_is_computed(make: Maker) -> None:
    """An engine starts without host memory: nobody has lent it any."""
    llm = make(num_kv_blocks=30)
    cold = ask(llm)
    evict(llm)
    warm = ask(llm)
    assert warm.num_cached_tokens == 0
    assert_same([warm], [cold])
    assert llm.engine.client.stats().blocks_stored_total == 0


def test_another_tenants_prefix_is_not_loaded(make: Maker) -> None:
    llm = make(**TIGHT)
    cold = ask(llm, salt="one")
    evict(llm)
    assert ask(llm, salt="other").num_cached_tokens == 0
    evict(llm)
    again = ask(llm, salt="one")
    assert again.num_cached_tokens == LENGTH - 1
    assert_same([again], [cold])


def test_an_adapter_has_its_own_prefixes(tmp_path: Path) -> None:
    write_checkpoint(Case("base", "llama", {"vocab_size": 1024}), tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", ("q_proj", "v_proj"))
    adapter = LoRARequest("adapter", 1, str(folder))
    with small_engines(str(tmp_path / "base"), enable_lora=True) as make:
        llm = make(**TIGHT)
        plain, adapted = ask(llm), ask(llm, adapter=adapter)
        assert plain.outputs[0].logprobs != adapted.outputs[0].logprobs
        evict(llm)
        for _ in range(2):
            for cold, own in ((plain, None), (adapted, adapter)):
                warm = ask(llm, adapter=own)
                assert warm.num_cached_tokens == LENGTH - 1
                assert_same([warm], [cold])
            evict(llm)


def test_copies_that_fail_cost_time_alone(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second copy raises, out or in."""
    llm: Any = make(**TIGHT)
    cold = ask(llm)
    copies = llm.engine.client._core._executor._worker._assembly.tiers.host._copies
    assert isinstance(copies, DirectCopies)
    whole, calls = copies._swap_blocks, 0

    def breaks(*args: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise EngineError("the copy engine stumbled")
        whole(*args)

    monkeypatch.setattr(copies, "_swap_blocks", breaks)
    for _ in range(4):
        evict(llm)
        assert_same([ask(llm)], [cold])
    stats = llm.engine.client.stats()
    assert stats.blocks_unstored_total > 0
    assert stats.blocks_stored_total > 0


def test_new_weights_and_resets_drop_what_the_host_holds(make: Maker) -> None:
    llm = make(**TIGHT)
    cold = ask(llm)
    evict(llm)
    llm.reset_prefix_cache()
    again = ask(llm)
    assert again.num_cached_tokens == 0
    assert_same([again], [cold])
    evict(llm)
    llm.sleep(level=1)
    llm.wake_up()
    awake = ask(llm)
    assert awake.num_cached_tokens == 0
    assert_same([awake], [cold])
