"""Models with latent attention on the real engine, beside `transformers` without its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, ConfigError, SamplingParams
from quire.base.platform import detect_platform
from quire.compute.attention import AttentionNeeds, select_backend
from quire.config.render_plan import render_plan
from tests.engine.greedy import (
    LENGTHS,
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
from tests.models.families import Case, write_checkpoint
from tests.small_engines import Maker, small_engines

__all__ = [
    "expected",
    "folder",
    "make",
    "test_beams_are_the_same_in_any_company",
    "test_forks_are_samples_one_by_one",
    "test_greedy_tokens_are_those_of_transformers",
    "test_quantized_weights_serve",
]  # fixtures and laws of all families

LONG = {"max_position_embeddings": 512, "index_topk": 512}
NAMES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "glm_moe_dsa")
CASES = tuple(Case(name, name, LONG) for name in NAMES)

KINDS = ("deepseek_v3", "minicpm3")
BY_KIND = (
    "test_beams_are_the_same_in_any_company",
    "test_forks_are_samples_one_by_one",
    "test_chunks_and_preemption_change_no_bit",
    "test_drafts_change_no_token",
    "test_later_turns_find_their_prefix",
    "test_sleep_loses_nothing",
    "test_vectors_in_int8_serve_in_a_quarter_of_the_memory",
)
"""Laws that families of a kind keep or break alike."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    give_families(metafunc, CASES, KINDS, BY_KIND)


def attention_by_kernels() -> bool:
    """Return whether no sum of attention depends on the step. Torch's do."""
    needs = AttentionNeeds(torch.float32, torch.float32, 24 + 8, 4, 1, value_dim=24)
    return select_backend(detect_platform(), needs).backend.name != "reference"


def test_chunks_and_preemption_change_no_bit(make: Maker) -> None:
    """Would catch a token whose bits depend on the step that computes it."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((300, 33, 170, 51))]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    exact = attention_by_kernels()

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        return [(each.outputs[0].token_ids, exact and each.outputs[0].logprobs) for each in outputs]

    expected = answers(make(max_num_batched_tokens=2048))
    for tokens in (7, 100, 170, 171):
        chunked = make(max_num_batched_tokens=tokens, max_num_seqs=4)
        assert answers(chunked) == expected, f"chunks of {tokens}"
    for mode in ("recompute", "swap"):
        space = 1 if mode == "swap" else None
        tight = make(num_kv_blocks=26, max_model_len=400, preemption_mode=mode, swap_space=space)
        assert answers(tight) == expected, mode
        assert tight.engine.client.stats().preempted_total > 0


def test_two_ranks_are_one(make: Maker, expected: list[list[int]]) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    llm = make(tensor_parallel_size=2, num_threads=1)
    assert tokens_of(generate(llm, prompts)) == expected


def test_drafts_change_no_token(make: Maker, expected: list[list[int]]) -> None:
    llm = make(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    prompts = [prompt_of(length) for length in LENGTHS]
    assert tokens_of(generate(llm, prompts)) == expected


def test_later_turns_find_their_prefix(make: Maker) -> None:
    llm, cold = make(), make(enable_prefix_caching=False)
    first = prompt_of(100)
    (output,) = generate(llm, [first], 20)
    later = [*first, *output.outputs[0].token_ids, *prompt_of(9)]
    (output,) = generate(llm, [later], 20)
    assert output.num_cached_tokens == 112
    assert tokens_of([output]) == tokens_of(generate(cold, [later], 20))


def test_sleep_loses_nothing(make: Maker) -> None:
    llm = make()
    expected = tokens_of(generate(llm, [prompt_of(40)], 20))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens_of(generate(llm, [prompt_of(40)], 20)) == expected


def test_a_token_takes_one_vector_in_each_layer(make: Maker) -> None:
    """Would catch keys and values that are cached for each head."""
    resolved = make().engine.resolved
    assert resolved.memory.kv_per_token == 3 * (24 + 8) * 4
    assert resolved.spec.expanded_kv_elements == 3 * 4 * (12 + 8 + 10)
    assert "tokens of 384 B (keys and values of all heads: 1.41 KiB)" in render_plan(resolved)


def test_vectors_in_float8_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not kept in float8"):
        LLM(str(folder), skip_tokenizer_init=True, kv_cache_dtype="fp8")


def test_vectors_in_int8_serve_in_a_quarter_of_the_memory(make: Maker) -> None:
    """Chunks, batches and cached prefixes give the tokens of a whole prompt alone, and first tokens
    are nearly as likely as by exact vectors. Would catch a scale that belongs to another part, or
    one that a copy of a block leaves behind."""
    prompts = [prompt_of(length) for length in (17, 63, 300)]
    whole = make(kv_cache_dtype="int8", max_num_batched_tokens=512)
    assert whole.engine.resolved.memory.kv_per_token == 3 * (24 + 8 + 2 * 4)
    alone = [tokens_of(generate(whole, [prompt], 20))[0] for prompt in prompts]
    chunked = make(kv_cache_dtype="int8", max_num_batched_tokens=23, max_num_seqs=4)
    assert tokens_of(generate(chunked, prompts, 20)) == alone
    assert tokens_of(generate(chunked, prompts, 20)) == alone, "behind cached prefixes"
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    exact = make(max_num_batched_tokens=512).generate(asked, sampling, use_tqdm=False)
    for one, other in zip(exact, whole.generate(asked, sampling, use_tqdm=False), strict=True):
        expected, found = (each.outputs[0].logprobs[0] for each in (one, other))
        shared = expected.keys() & found.keys()
        assert len(shared) >= 4
        for token in shared:
            assert abs(expected[token].logprob - found[token].logprob) < 0.1


def test_contexts_beyond_the_index_are_refused(tmp_path: Path) -> None:
    """Would catch attention to all tokens where the model was trained to choose some."""
    write_checkpoint(Case("glm_moe_dsa", "glm_moe_dsa", {**LONG, "index_topk": 48}), tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=49 exceeds index_topk=48 tokens"):
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=49)
    with small_engines(str(tmp_path), block_size=16, max_model_len=None) as make:
        llm = make()
        assert llm.engine.resolved.settings.max_model_len == 48
        (output,) = generate(llm, [prompt_of(49)], 1)
        assert output.error is not None and "48" in str(output.error)
