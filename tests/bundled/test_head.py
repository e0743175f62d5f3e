"""The EAGLE layer beside the bundled model: small, exact, and often right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.test_laws import assert_same
from tests.speculation.test_laws import SETTINGS, eager_policy, totals

from quire import LLM, RequestOutput, SamplingParams
from quire.bundled import bundled_head_path

MEGABYTE = 1_000_000
QUESTIONS = (
    "What is the capital of France?",
    "What is 12 plus 30?",
    "Which module reads JSON in Python?",
    "What is the opposite of hot?",
)
CODE = ("def read_lines(path):\n    ", "import json\n\nclass Reader:\n    def __init__(self")
LENGTHS: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 400}


def ask(llm: LLM) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=48)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = llm.chat(chats, params, use_tqdm=False)
    return [*answers, *llm.generate(list(CODE), params, use_tqdm=False)]


def test_the_layer_stays_below_four_megabytes() -> None:
    folder = bundled_head_path()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * MEGABYTE
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_the_layer_is_often_right_and_changes_no_bit(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LLM(None, **{**SETTINGS, **LENGTHS})
    try:
        expected = ask(plain)
    finally:
        plain.shutdown()
    config = {"method": "eagle", "model": str(bundled_head_path()), "num_speculative_tokens": 3}
    llm = LLM(None, depth=depth, speculative_config=config, **{**SETTINGS, **LENGTHS})
    eager_policy(monkeypatch)
    try:
        assert_same(ask(llm), expected, exact=True)
        found = totals(llm)
    finally:
        llm.shutdown()
    assert found.accepted > 0.5 * found.rows, "tokens of a row beside its certain one"
