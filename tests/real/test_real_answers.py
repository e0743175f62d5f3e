"""Answers of real models on the numbers that their GGUF files hold: quire's own models, its generic
path and `transformers` give the same.

The files come with packages of requirements-real.txt (`make test-real`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.real.greedy import most_probable
from tests.real.inputs import PROMPTS
from tests.real.packages import gemma3_file, smollm2_file

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.convert import convert_model

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a folder."""
    folder = tmp_path_factory.mktemp("smollm2") / "folder"
    convert_model(smollm2_file(), folder)
    return folder


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gemma 3 270M as a folder."""
    place = tmp_path_factory.mktemp("gemma3")
    file = gemma3_file(place)
    convert_model(file, place / "folder")
    file.unlink()
    yield place / "folder"
    for weights in place.rglob("*.safetensors"):
        weights.unlink()


def answers(folder: Path, model_impl: str) -> list[RequestOutput]:
    with LLM(
        str(folder),
        quiet=True,
        dtype="float32",
        model_impl=model_impl,
        max_model_len=128,
        num_kv_blocks=64,
    ) as llm:
        return llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)


def test_gemma3_answers_are_those_of_transformers(gemma3: Path) -> None:
    from transformers import AutoModelForCausalLM

    outputs = answers(gemma3, "quire")
    model: Any = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32).eval()
    for output in outputs:
        answer = list(output.outputs[0].token_ids)
        assert len(answer) == NUM_TOKENS and answer == most_probable(model, output)


def test_smollm2_through_the_generic_path_answers_as_quires_own(smollm2: Path) -> None:
    own, generic = (
        answers(smollm2, implementation) for implementation in ("quire", "transformers")
    )
    assert [each.outputs[0].token_ids for each in generic] == [
        each.outputs[0].token_ids for each in own
    ]
    assert len({each.outputs[0].text for each in own}) == len(own)
