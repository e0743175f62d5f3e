"""Drafts beside images: the methods that guess from token ids change no token of an answer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.image_oracle import SETTINGS, asked, tokens
from tests.image_writer import picture

from quire import LLM, SamplingParams
from quire.config.settings import EngineSettings
from quire.config.startup import find_model

NUM_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(mark: str) -> list[Any]:
    """Images alone, twice, around text, and beside text alone. Texts repeat themselves."""
    return [
        asked(f"One two three, one two {mark} three, one two three", picture(60, 30)),
        asked(f"{mark} a b a b a b {mark} a b", picture(30, 40, 1), picture(40, 30, 2)),
        asked(f"So {mark}", picture(60, 30)),
        "One two three, one two three, one two",
    ]


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    """Allow few tokens, so that the answers of random weights repeat themselves; all in one."""
    few = [11, 12, 13]
    given: list[dict[str, Any]] = [
        {"temperature": 0.0, "allowed_token_ids": few},
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7, "allowed_token_ids": few},
        {"temperature": 0.0, "allowed_token_ids": few},
    ]
    return [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **each) for each in given]


@pytest.fixture(scope="module")
def wanted(
    kind_folder: Path, prompts: list[Any], params: list[SamplingParams]
) -> Iterator[list[list[int]]]:
    """Answers without drafts, one prompt at a time."""
    with LLM(str(kind_folder), **SETTINGS) as llm:
        yield [
            tokens(*llm.generate(prompt, each, use_tqdm=False))
            for prompt, each in zip(prompts, params, strict=True)
        ]


def test_a_draft_model_sees_image_tokens_as_text(
    kind: str,
    kind_folder: Path,
    prompts: list[Any],
    params: list[SamplingParams],
    wanted: list[list[int]],
    tmp_path: Path,
) -> None:
    """It has no encoder: its guesses are worse, and change nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = find_model(EngineSettings(model=str(kind_folder))).spec.vocab_size
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(kind_folder / "tokenizer.json", tmp_path)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    for cut in ({}, {"max_num_batched_tokens": 20, "max_num_seqs": 4}):
        with LLM(str(kind_folder), **SETTINGS, **cut, speculative_config=speculation) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [tokens(each) for each in outputs] == wanted
            assert llm.engine.client.stats().draft_tokens_total > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_drafts_change_no_token(
    method: str,
    kind_folder: Path,
    prompts: list[Any],
    params: list[SamplingParams],
    wanted: list[list[int]],
) -> None:
    """Together, so that rows with drafts compute beside the images of others; whole and in chunks;
    and from the cache."""
    speculation = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    for cut in ({}, {"max_num_batched_tokens": 20, "max_num_seqs": 4}):
        with LLM(str(kind_folder), **SETTINGS, **cut, speculative_config=speculation) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [tokens(each) for each in outputs] == wanted
            stats = llm.engine.client.stats()
            assert stats.accepted_drafts_total > 0 and stats.mm_cache_hits_total > 0
