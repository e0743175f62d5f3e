"""all-MiniLM-L6-v2, a trained sentence encoder: vectors are those of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.real.packages import minilm_folder

from quire import LLM

TEXTS = [
    "The capital of France is Paris.",
    "Paris is the French capital, on the Seine.",
    "A recipe for sourdough bread with rye flour.",
    "def add(a, b): return a + b",
    "word " * 200,
    "Übergrößenträger naïve café 北京",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minilm_folder(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """Means of the states of the last layer, scaled to length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[np.ndarray] = []
    with torch.inference_mode():
        for text in TEXTS:
            inputs = tokenizer(text, return_tensors="pt")
            mean = model(**inputs).last_hidden_state[0].mean(0)
            found.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.stack(found)


@pytest.fixture
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(folder), quiet=True, dtype=request.param) as found:
        yield found


@pytest.mark.parametrize("llm", ["float32"], indirect=True)
def test_vectors(llm: LLM, expected: np.ndarray) -> None:
    found = np.array([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)]
    assert scores[0] > 0.8 > 0.2 > scores[1]


@pytest.mark.parametrize("llm", ["bfloat16"], indirect=True)
def test_cosines_in_bfloat16(llm: LLM, expected: np.ndarray) -> None:
    found = np.array([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
    assert (found * expected).sum(1).min() >= 0.9995
