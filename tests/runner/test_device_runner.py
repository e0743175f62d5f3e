"""Rows on a device that cannot be computed: they fail late, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.compute.runner.launch import Runner
from tests.pairs import BY_PAIRS
from tests.runner.late_device import keep_rows_on_device

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BROKEN_AT = 45
BAD, GOOD = [4] * 40, [[5, 6, 7], [9] * 20, [8] * 29]


class BrokenAt:
    """A model that goes wrong at one position of BAD: its hidden state is NaN, or it raises."""

    def __init__(self, model: Any, *, position: int, raises: bool) -> None:
        self._model = model
        self._position = position
        self._raises = raises

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        bad = (positions == self._position) & ((token_ids == 4) | (self._position == BROKEN_AT))
        if self._raises and bad.any():
            raise RuntimeError("boom")
        hidden = self._model.forward(token_ids, positions, step)
        wanted = step.wanted_tokens
        hidden[bad if wanted is None else bad[wanted]] = float("nan")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


@pytest.fixture(params=[1, 2, 3])
def llm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    keep_rows_on_device(monkeypatch)
    with LLM(
        quiet=True, num_kv_blocks=128, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16,
        dtype="float32", skip_tokenizer_init=True, depth=request.param,
    ) as engine:  # fmt: skip
        yield engine


def runner_of(llm: LLM) -> Runner:
    client: Any = llm.engine.client
    return client._core._executor._worker._assembly.runner


def break_model(llm: LLM, monkeypatch: pytest.MonkeyPatch, position: int, *, raises: bool) -> None:
    runner = runner_of(llm)
    for owner in (runner._forward, runner._decode):
        model = BrokenAt(owner._model, position=position, raises=raises)
        monkeypatch.setattr(owner, "_model", model)


@BY_PAIRS
@pytest.mark.parametrize("raises", [False, True], ids=["nan", "exception"])
@pytest.mark.parametrize("position", [15, 39, BROKEN_AT], ids=["mid-prompt", "prompt", "decode"])
def test_a_broken_row_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, raises: bool, position: int
) -> None:
    """Catches a late step of a failed row that gives tokens or a second failure, and a row that
    enters its slot and fails for it."""
    expected = [output.outputs[0].token_ids for output in llm.generate(GOOD, GREEDY)]
    break_model(llm, monkeypatch, position, raises=raises)
    for _ in range(3):
        bad, *good = llm.generate([BAD, *GOOD], GREEDY)
        assert bad.error is not None
        assert "not finite" in bad.error or "boom" in bad.error
        assert len(bad.outputs[0].token_ids) == max(position - 39, 0)
        assert [output.outputs[0].token_ids for output in good] == expected
    assert llm.engine.client.stats().num_used_blocks == 0


def test_samples_and_beams_of_a_broken_prompt_all_fail(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_model(llm, monkeypatch, 39, raises=False)
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    bad, good = llm.generate([BAD, [5, 6]], params)
    assert bad.error is not None
    assert [len(sample.token_ids) for sample in good.outputs] == [4, 4, 4]
    search = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    bad_beams, good_beams = llm.beam_search([BAD, [5, 6]], search)
    assert bad_beams.error is not None
    assert len(good_beams.sequences) == 3


@pytest.mark.parametrize("more", [{}, {"logprobs": 1, "presence_penalty": 0.5, "min_tokens": 3}])
def test_steps_are_launched_before_the_tokens_of_the_last_one_are_known(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a row that the device can draw for waits for the host."""
    keep_rows_on_device(monkeypatch)
    with LLM(quiet=True, max_model_len=64, skip_tokenizer_init=True, depth=2) as engine:
        runner, ahead = runner_of(engine), 0
        settle = runner._settle

        def watch(*, wait: bool) -> None:
            nonlocal ahead
            assert not wait
            settle(wait=wait)
            ahead += len(runner._in_flight) == 1

        monkeypatch.setattr(runner, "_settle", watch)
        outputs: list[RequestOutput] = engine.generate([[5, 6, 7]], replace(GREEDY, **more))
        assert len(outputs[0].outputs[0].token_ids) == 12
        assert ahead > 0
