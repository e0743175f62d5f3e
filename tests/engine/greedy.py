"""Greedy answers of the real engine, and those of `transformers` without its cache. Fixtures and
laws of families, for the files that give these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from tests.models.families import Case, write_checkpoint
from tests.profiles import SCALE
from tests.small_engines import Maker, small_engines

LENGTHS = (1, 15, 16, 17, 63, 300)
NEW_TOKENS = 40
"""More than two blocks."""
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


def chosen_names(
    metafunc: pytest.Metafunc, names: Sequence[str], kinds: Sequence[str], laws: Sequence[str]
) -> Sequence[str]:
    """Return all names, but for `laws`, outside of a soak, one of each kind."""
    return kinds if SCALE == 1 and metafunc.function.__name__ in laws else names


def give_families(
    metafunc: pytest.Metafunc, cases: Sequence[Case], kinds: Sequence[str], laws: Sequence[str]
) -> None:
    """Give the fixture `folder` all cases, but `laws`, outside of a soak, one of each kind."""
    if "folder" in metafunc.fixturenames:
        names = chosen_names(metafunc, [case.name for case in cases], kinds, laws)
        chosen = [case for case in cases if case.name in names]
        ids = [case.name for case in chosen]
        metafunc.parametrize("folder", chosen, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param.name)
    write_checkpoint(request.param, path)
    return path


@pytest.fixture
def make(folder: Path) -> Iterator[Maker]:
    with small_engines(str(folder), **SETTINGS) as maker:
        yield maker


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return tokens_by_transformers(folder)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["captured", "eager"])
def test_greedy_tokens_are_those_of_transformers(
    make: Maker, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    llm = make(**settings)
    prompts = [prompt_of(length) for length in LENGTHS]
    assert tokens_of(generate(llm, prompts)) == expected, "in one batch"
    assert tokens_of([generate(llm, [prompt])[0] for prompt in prompts]) == expected, "alone"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_serve(make: Maker, quantization: str) -> None:
    prompts = [prompt_of(length) for length in (5, 40)]
    llm = make(quantization=quantization)
    together = tokens_of(generate(llm, prompts, 12))
    assert [tokens_of(generate(llm, [prompt], 12))[0] for prompt in prompts] == together


def test_beams_are_the_same_in_any_company(make: Maker) -> None:
    llm, params = make(), BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in (21, 5, 40)]
    together = llm.beam_search(prompts, params, use_tqdm=False)
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = llm.beam_search([prompt], params, use_tqdm=False)
        found = [sequence.tokens for sequence in one.sequences]
        assert [sequence.tokens for sequence in alone.sequences] == found
        assert len({tuple(tokens) for tokens in found}) == 3


def test_forks_are_samples_one_by_one(make: Maker) -> None:
    llm, alone = make(), make(max_num_seqs=1)
    ask = {"prompt_token_ids": prompt_of(21)}
    sampling = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
    forked = llm.generate(ask, sampling, use_tqdm=False)[0]
    one_by_one = alone.generate(ask, sampling, use_tqdm=False)[0]
    tokens = [output.token_ids for output in forked.outputs]
    assert tokens == [output.token_ids for output in one_by_one.outputs]
    assert len({tuple(sample) for sample in tokens}) > 1
