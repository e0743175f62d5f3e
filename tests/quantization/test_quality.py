"""The bundled model still makes sense with 8 and 4 bits; figures are in docs/quantization.md."""

from __future__ import annotations

import heapq
import inspect

import pytest
import torch

from quire import LLM, SamplingParams
from quire.bundled import bundled_model_path
from quire.config.quantization import INT4_FORMATS, QUANTIZATIONS
from quire.text.rendering import Tokenizer
from tests.models.harness import PagedModel

LENGTH = 250
COUNT = 4
"""Sequences of so many tokens, that together fit the pool of the harness."""


@pytest.fixture(scope="module")
def sequences() -> dict[int, list[int]]:
    """Source code that every Python has, cut into pieces."""
    tokenizer = Tokenizer.from_folder(bundled_model_path())
    ids = tokenizer.encode(inspect.getsource(heapq))
    return {i: [1, *ids[i * LENGTH : (i + 1) * LENGTH - 1]] for i in range(COUNT)}


def predictions(sequences: dict[int, list[int]], quantization: str | None) -> torch.Tensor:
    """The most probable next token at every place."""
    model = PagedModel(bundled_model_path(), "best", LENGTH, quantization)
    return torch.cat([logits.argmax(1) for logits in model.step(sequences).values()])


@pytest.mark.parametrize(
    ("quantization", "bound"), [("int8", 0.97), *((name, 0.85) for name in INT4_FORMATS)]
)
def test_most_predictions_stay(
    sequences: dict[int, list[int]], quantization: str, bound: float
) -> None:
    """Loose bounds: catches a format that ruins a model, not one that is a little worse."""
    same = predictions(sequences, quantization) == predictions(sequences, None)
    assert same.float().mean() >= bound


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_answers_stay(quantization: str) -> None:
    """The whole way from the setting to text."""
    with LLM(quantization=quantization, num_kv_blocks=64, max_model_len=256, quiet=True) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        greedy = SamplingParams(temperature=0, max_tokens=32)
        answer = llm.chat(question, greedy, use_tqdm=False)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
