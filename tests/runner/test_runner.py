"""The runner with rows that cannot be computed, on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
POISON = 77
BOOM = RuntimeError("boom")
GOOD = [[5, 6, 7], [9] * 20, [8] * 33]


class Poisoned:
    """A model in which one token id goes wrong: its hidden state is NaN, or it raises."""

    def __init__(self, model: Any, *, raises: bool, error: BaseException) -> None:
        self._model = model
        self._raises = raises
        self._error = error

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        bad = token_ids == POISON
        if self._raises and bad.any():
            raise self._error
        hidden = self._model.forward(token_ids, positions, step)
        wanted = step.wanted_tokens
        hidden[bad if wanted is None else bad[wanted]] = float("nan")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(
        quiet=True, num_kv_blocks=128, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16,
        dtype="float32", skip_tokenizer_init=True,
    ) as engine:  # fmt: skip
        yield engine


def poison(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    *,
    raises: bool,
    error: BaseException = BOOM,
) -> None:
    forward = llm.engine.client._core._executor._worker._assembly.runner._forward
    monkeypatch.setattr(forward, "_model", Poisoned(forward._model, raises=raises, error=error))


@pytest.mark.parametrize(
    ("raises", "error"),
    [(False, BOOM), (True, BOOM), (True, SystemExit(3)), (True, KeyboardInterrupt())],
    ids=["nan", "exception", "exit", "interrupt"],
)
@pytest.mark.parametrize("place", [15, 39], ids=["mid-prompt", "last-token"])
def test_a_broken_row_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, raises: bool, error: BaseException, place: int
) -> None:
    """Catches a step that fails whole, also by what a model's code raises that is no error, and
    broken rows that are noticed only when they sample."""
    expected = [output.outputs[0].token_ids for output in llm.generate(GOOD, GREEDY)]
    poison(llm, monkeypatch, raises=raises, error=error)
    bad = [4] * place + [POISON] + [4] * (39 - place)
    outputs = llm.generate([bad, *GOOD], GREEDY)
    assert [output.error is None for output in outputs] == [False, True, True, True]
    assert [output.outputs[0].token_ids for output in outputs[1:]] == expected
    assert llm.engine.client.stats().num_used_blocks == 0


def test_samples_of_a_broken_prompt_all_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(llm, monkeypatch, raises=True)
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    bad, good = llm.generate([[POISON], [5, 6]], params)
    assert bad.error is not None
    assert bad.finished
    assert [len(sample.token_ids) for sample in good.outputs] == [4, 4, 4]


@pytest.mark.parametrize("raises", [False, True], ids=["nan", "exception"])
def test_a_broken_beam_fails_its_search_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    expected = llm.beam_search(GOOD, params)
    poison(llm, monkeypatch, raises=raises)
    bad, *good = llm.beam_search([[4] * 20 + [POISON], *GOOD], params)
    assert bad.error is not None
    assert [s.tokens for output in good for s in output.sequences] == [
        s.tokens for output in expected for s in output.sequences
    ]
    assert llm.engine.client.stats().num_used_blocks == 0
