"""Greedy answers of the real engine, and those of `transformers` without its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from tests.models.families import Case
from tests.profiles import SCALE
from tests.small_engines import small_engines

LENGTHS = (1, 15, 16, 17, 63, 300)
NEW_TOKENS = 64
SETTINGS: dict[str, Any] = {"block_size": 16, "max_model_len": 512, "num_kv_blocks": 256}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 128, (length,), generator=generator).tolist()


def generate(
    llm: LLM, prompts: Sequence[list[int]], count: int = NEW_TOKENS
) -> list[RequestOutput]:
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, sampling, use_tqdm=False)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def tokens_by_transformers(folder: Path) -> list[list[int]]:
    """Tokens behind prompts of `LENGTHS`. One forward without a cache gives those after all tokens
    of the engine's answer; where one of these is wrong, the next forward goes on behind it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [prompt_of(length) for length in LENGTHS]
    with small_engines(str(folder), **SETTINGS) as make:
        answers = tokens_of(generate(make(), prompts))
    found: list[list[int]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        right: list[int] = []
        while len(right) < NEW_TOKENS:
            guessed = answer[len(right) : NEW_TOKENS - 1]
            with torch.inference_mode():
                whole = torch.tensor([[*prompt, *right, *guessed]])
                logits = model(whole, use_cache=False).logits[0, len(prompt) + len(right) - 1 :]
            best = logits.argmax(-1).tolist()
            wrong = (i for i, token in enumerate(guessed) if token != best[i])
            right += best[: next(wrong, len(guessed)) + 1]
        found.append(right)
    return found


def give_families(
    metafunc: pytest.Metafunc, cases: Sequence[Case], kinds: Sequence[str], laws: Sequence[str]
) -> None:
    """Give the fixture `folder` all cases, but `laws`, outside of a soak, one of each kind."""
    if "folder" in metafunc.fixturenames:
        is_by_kind = SCALE == 1 and metafunc.function.__name__ in laws
        chosen = [case for case in cases if case.name in kinds or not is_by_kind]
        ids = [case.name for case in chosen]
        metafunc.parametrize("folder", chosen, ids=ids, indirect=True, scope="module")
