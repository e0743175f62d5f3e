"""Models with recurrent layers on the real engine, beside `transformers` without its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, ConfigError, RequestError, SamplingParams
from quire.config.families.mamba import SSDTraits
from tests.engine.greedy import (
    expected,
    folder,
    generate,
    give_families,
    make,
    prompt_of,
    test_beams_are_the_same_in_any_company,
    test_forks_are_samples_one_by_one,
    test_greedy_tokens_are_those_of_transformers,
    test_quantized_weights_serve,
    tokens_of,
)
from tests.models.families import GRANITE, Case
from tests.models.family_bases import BASES
from tests.small_engines import Maker

__all__ = [
    "expected",
    "folder",
    "make",
    "test_beams_are_the_same_in_any_company",
    "test_forks_are_samples_one_by_one",
    "test_greedy_tokens_are_those_of_transformers",
    "test_quantized_weights_serve",
]  # fixtures and laws of all families

NAMES = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_next", "granitemoehybrid", "mamba2")
CASES = (
    *(Case(name, name, {"max_position_embeddings": 512}) for name in NAMES),
    Case(
        "granite_moe",
        "granitemoehybrid",
        {**GRANITE, "max_position_embeddings": 512, "num_local_experts": 5},
    ),
)

KINDS = ("lfm2", "qwen3_next", "granitemoehybrid", "mamba2")
BY_KIND = (
    "test_a_later_turn_starts_from_a_checkpoint",
    "test_output_is_not_computed_again",
    "test_a_slot_has_nothing_of_its_last_tenant",
    "test_few_checkpoints_serve_as_well",
    "test_a_fresh_request_is_clean_in_a_poisoned_slot",
    "test_beams_are_the_same_in_any_company",
    "test_sleep_keeps_nothing_and_loses_nothing",
    "test_forks_are_samples_one_by_one",
    "test_int8_kv_serves",
)
"""Laws that families of a kind keep or break alike."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    give_families(metafunc, CASES, KINDS, BY_KIND)


def test_a_later_turn_starts_from_a_checkpoint(make: Maker) -> None:
    """Would catch a state that is kept under the name of other tokens."""
    llm, cold = make(), make(enable_prefix_caching=False)
    conversation, known = prompt_of(100), 0
    for turn in range(3):
        (output,) = generate(llm, [conversation], 40)
        assert tokens_of([output]) == tokens_of(generate(cold, [conversation], 40))
        assert output.num_cached_tokens >= known // 16 * 16
        known = len(conversation)
        conversation = [*conversation, *output.outputs[0].token_ids, *prompt_of(9, seed=turn)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_output_is_not_computed_again(make: Maker, depth: int) -> None:
    llm = make(depth=depth)
    (output,) = generate(llm, [prompt_of(100)], 40)
    later = [*prompt_of(100), *output.outputs[0].token_ids, 5]
    assert generate(llm, [later], 1)[0].num_cached_tokens == 139 // 16 * 16
    assert generate(llm, [later[:113]], 1)[0].num_cached_tokens == 96, "older ones were let go"


def test_a_slot_has_nothing_of_its_last_tenant(make: Maker) -> None:
    llm = make(max_num_seqs=1, enable_prefix_caching=False)
    first = tokens_of(generate(llm, [prompt_of(30)], 20))
    generate(llm, [prompt_of(200, seed=1)], 5)
    assert tokens_of(generate(llm, [prompt_of(30)], 20)) == first


def test_few_checkpoints_serve_as_well(make: Maker) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((40, 40, 70, 100, 130, 33))]
    want = tokens_of(generate(make(enable_prefix_caching=False), prompts, 20))
    for count in (0, 1, 3):
        llm = make(num_state_checkpoints=count)
        for _ in range(2):
            assert tokens_of(generate(llm, prompts, 20)) == want


def test_two_ranks_are_one(make: Maker, folder: Path) -> None:
    if "moe" in folder.name or "next" in folder.name:
        pytest.skip("ranks have different experts, so sums depend on their number")
    prompts = [prompt_of(length) for length in (5, 40, 17)]
    settings = {"rank_invariant": True, "dtype": "float32", "num_threads": 1}
    one = tokens_of(generate(make(**settings), prompts, 12))
    assert tokens_of(generate(make(**settings, tensor_parallel_size=2), prompts, 12)) == one


def test_a_fresh_request_is_clean_in_a_poisoned_slot(make: Maker) -> None:
    """Would catch a layer that multiplies what another tenant left by zero."""
    llm = make(depth=1)
    expected = tokens_of(generate(llm, [prompt_of(21), prompt_of(5)], 20))
    client: Any = llm.engine.client
    places = client._core._executor._worker._assembly.runner._changes._states._places
    assert llm.reset_prefix_cache()
    places.numpy().fill(0xFF)  # NaN in any dtype
    assert tokens_of(generate(llm, [prompt_of(21), prompt_of(5)], 20)) == expected


@pytest.mark.parametrize("depth", [1, 3])
def test_chunks_and_preemption_change_no_bit(make: Maker, depth: int) -> None:
    """Would catch a state that was advanced twice, or from another token than the first."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((40, 33, 70, 51))]
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]

    expected = answers(make(depth=depth))
    for tokens in (9, 17, 50):
        chunked = make(depth=depth, max_num_batched_tokens=tokens)
        assert answers(chunked) == expected, f"chunks of {tokens}"
    few: dict[str, Any] = {"num_kv_blocks": 14, "max_model_len": 128}
    tight = make(depth=depth, **few)
    assert answers(tight) == expected, "preempted"
    assert tight.engine.client.stats().preempted_total > 0
    if not tight.engine.resolved.spec.has_kv:
        return
    swaps = make(depth=depth, preemption_mode="swap", swap_space="4MiB", **few)
    assert answers(swaps) == expected, "swapped"
    assert swaps.engine.client.stats().swapped_out_total > 0


def test_sleep_keeps_nothing_and_loses_nothing(make: Maker) -> None:
    llm = make()
    expected = tokens_of(generate(llm, [prompt_of(40)], 20))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens_of(generate(llm, [prompt_of(40)], 20)) == expected


@pytest.mark.parametrize("setting", ["kv_cache_dtype", "kv_cache_memory", "swap_space"])
def test_settings_of_kv_are_refused_without_any(folder: Path, setting: str) -> None:
    value = "int8" if setting == "kv_cache_dtype" else "1MiB"
    if "mamba2" not in folder.name:
        pytest.skip("some layers have K/V")
    with pytest.raises(ConfigError, match=f"{setting}=.*no layer has K and V"):
        LLM(str(folder), skip_tokenizer_init=True, **{setting: value})


def test_int8_kv_serves(make: Maker, folder: Path) -> None:
    if "mamba2" in folder.name:
        pytest.skip("no layer has K/V")
    prompts = [prompt_of(length) for length in (5, 40)]
    llm = make(kv_cache_dtype="int8")
    together = tokens_of(generate(llm, prompts, 12))
    assert [tokens_of(generate(llm, [prompt], 12))[0] for prompt in prompts] == together


def test_a_pinned_prefix_is_there_after_a_flood(make: Maker) -> None:
    """It keeps its blocks and its state while others fill both; tenants of all salts share it."""
    llm, prefix = make(num_state_checkpoints=4, num_kv_blocks=64), prompt_of(100)
    ends = [prompt_of(9), prompt_of(30)]
    cold = tokens_of(generate(make(), [[*prefix, *end] for end in ends], 12))
    pin = llm.pin_prefix({"prompt_token_ids": prefix})
    for i in range(8):
        generate(llm, [[50 + i, *prompt_of(90)]], 12)
    for end, wanted in zip(ends, cold, strict=True):
        (found,) = generate(llm, [[*prefix, *end]], 12)
        assert (found.num_cached_tokens, tokens_of([found])) == (96, [wanted])
    (held,) = llm.pinned_prefixes()
    assert (held.key, held.hits) == (pin.key, 2)
    assert llm.unpin_prefix(held)


def test_pins_leave_half_of_the_checkpoints(make: Maker) -> None:
    llm = make(num_state_checkpoints=3)
    llm.pin_prefix({"prompt_token_ids": prompt_of(40)})
    with pytest.raises(RequestError, match="of 3 at most half are for pins"):
        llm.pin_prefix({"prompt_token_ids": [5, *prompt_of(40)]})
    with pytest.raises(RequestError, match="of 0 at most half are for pins"):
        make(enable_prefix_caching=False).pin_prefix({"prompt_token_ids": prompt_of(40)})


def test_the_plan_states_their_bytes(make: Maker) -> None:
    resolved = make(num_state_checkpoints=5).engine.resolved
    if "lfm2" in resolved.spec.model_type:
        per_layer = 2 * BASES["lfm2"]["hidden_size"] * 4  # two tokens in float32
        inputs = 3 * BASES["lfm2"]["hidden_size"] * 4
    elif isinstance(resolved.spec.traits, SSDTraits):
        # Three tokens of four heads' x and two groups' B and C, and the heads' matrices.
        per_layer = 3 * (4 * 16 + 2 * 2 * 12) * 4 + 4 * 16 * 12 * 4
        inputs = (2 * (4 * 16 + 2 * 2 * 12) + 4) * 4  # of the convolution, and of the state
    else:  # three tokens of four key heads' q and k and eight heads' v, and their matrices
        per_layer = 3 * (2 * 4 * 12 + 8 * 16) * 4 + 8 * 12 * 16 * 4
        inputs = 2 * (2 * 4 * 12 + 8 * 16 + 8) * 4  # of the convolution, and of the rule
    assert per_layer % 64 == 0, "nothing is added to align it"
    assert resolved.layout.state_bytes == 3 * per_layer
    kept = (8 + 16) * 3 * inputs  # tokens of rows with drafts
    assert resolved.memory.fixed.states == (2 * 8 + 5) * 3 * per_layer + kept
