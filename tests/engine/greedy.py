"""Greedy answers of the real engine, and those of `transformers` without its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire import LLM, RequestOutput, SamplingParams

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
    """Tokens behind prompts of `LENGTHS`, each by a forward over all tokens before it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[list[int]] = []
    for length in LENGTHS:
        tokens = prompt_of(length)
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        found.append(tokens[length:])
    return found
