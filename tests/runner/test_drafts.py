"""Drafts on = drafts off on the real engine: the same tokens and log-probabilities, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestOutput, SamplingParams
from tests.engine.test_device_laws import assert_as_on_host
from tests.engine.test_laws import assert_same, params, workload
from tests.models.families import CASES, write_checkpoint
from tests.pairs import BY_PAIRS
from tests.small_engines import SMALL

BY_NAME = {case.name: case for case in CASES}
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


class FromOutputs:
    """Drafts what the same requests gave before: up to `num_right` right tokens, then a wrong one.

    outputs: tokens by prompt and sample.
    """

    def __init__(self, results: Sequence[RequestOutput], wrong: int) -> None:
        self._outputs = {
            (tuple(result.prompt_token_ids or ()), sample.index): list(sample.token_ids)
            for result in results
            for sample in result.outputs
        }
        self._rng = np.random.default_rng(0)
        self._wrong = wrong
        self.num_right = 0

    def propose(
        self, sequence: Any, known: np.ndarray, num_in_flight: int, max_drafts: int
    ) -> np.ndarray:
        prompt = tuple(sequence.group.request.prompt_token_ids.tolist())
        output = self._outputs.get((prompt, sequence.sample_index), [])
        right = output[len(known) - len(prompt) + num_in_flight :][: int(self._rng.integers(0, 4))]
        self.num_right += len(right)
        return np.array([*right, self._wrong][:max_drafts], np.int32)


class Watch:
    """Draft counts of the results."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        client: Any = llm.engine.client
        self.scheduler = client._core._scheduler
        apply = self.scheduler.apply

        def watch(result: Any) -> Any:
            if result.counts is not None:
                self.most = max(self.most, int(result.counts.max()))
            return apply(result)

        monkeypatch.setattr(self.scheduler, "apply", watch)

    def draft(self, proposer: FromOutputs) -> None:
        self.scheduler._drafts._proposer = proposer


def asked() -> list[SamplingParams]:
    """Greedy, random, filtered, edited by what was given before, and stopped."""
    plain = [params(i) for i in range(4)]
    return [
        *plain,
        replace(params(4), presence_penalty=1.5, repetition_penalty=1.3),
        replace(params(5), top_k=7, top_p=0.9, frequency_penalty=0.7),
        replace(params(6), min_tokens=6, ignore_eos=False),
        replace(params(7), logprobs=None, max_tokens=9),
    ]


def generate(llm: LLM, sampling: Sequence[SamplingParams]) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in workload(len(sampling))]
    return llm.generate(prompts, list(sampling), use_tqdm=False)


def same(got: Sequence[RequestOutput], expected: Sequence[RequestOutput], on_device: bool) -> None:
    """The host verifies drafts: beside rows on a device it sums log-probabilities otherwise."""
    if on_device:
        assert_as_on_host(got, expected)
    else:
        assert_same(got, expected, exact=True)


@BY_PAIRS
@DEPTHS
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("mistral-window", {"num_kv_blocks": 48}),
        ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("opt", {"enforce_eager": True, "max_num_batched_tokens": 24}),
    ],
    ids=str,
)
def test_drafts_change_no_bit(
    depth: int, name: str, more: dict[str, Any], on_device: bool, tmp_path: Path,
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Turns red when a draw sees other logits, noise or history than it would have, when rejected
    K/V are read, or when a row goes on from a wrong place."""
    write_checkpoint(BY_NAME[name], tmp_path)
    llm = LLM(str(tmp_path), **{**SMALL, **more, "depth": depth})
    engines.append(llm)
    expected = generate(llm, asked())
    watch = Watch(llm, monkeypatch)
    for wrong in (3, 90):
        watch.draft(FromOutputs(expected, wrong))
        same(generate(llm, asked()), expected, on_device)
    assert watch.most > 2


def test_samples_and_stops_are_those_without_drafts(
    on_device: bool, engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(None, **SMALL)
    engines.append(llm)
    sampling = [
        SamplingParams(n=3, temperature=0.9, seed=2, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    ]
    free = generate(llm, sampling)
    stop = free[1].outputs[0].token_ids[4]
    sampling[1] = replace(sampling[1], stop_token_ids=(stop,))
    expected = generate(llm, sampling)
    watch = Watch(llm, monkeypatch)
    watch.draft(FromOutputs(free, wrong=5))
    got = generate(llm, sampling)
    same(got, expected, on_device)
    assert got[1].outputs[0].stop_reason == expected[1].outputs[0].stop_reason == stop
    assert watch.most > 1


def test_a_draft_that_cannot_be_computed_costs_no_request(
    on_device: bool, engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a guess outside the vocabulary ends the row that it was made for."""
    llm = LLM(None, **SMALL)
    engines.append(llm)
    sampling = [params(i, 10) for i in range(3)]
    expected = generate(llm, sampling)
    Watch(llm, monkeypatch).draft(FromOutputs(expected, wrong=10**6))
    same(generate(llm, sampling), expected, on_device)
