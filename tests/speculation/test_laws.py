"""Drafts on = drafts off on the real engine, to the bit: each method, at depth 1 to 3."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.compute.runner.launch import Runner
from quire.plan.scheduler import Scheduler
from quire.protocol import EngineRequest
from quire.sampling_params import StructuredOutputsParams
from tests.engine.test_laws import assert_same
from tests.small_engines import collect_and_freeze

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
METHODS: tuple[dict[str, Any], ...] = (
    {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    {"method": "suffix"},
    {"method": "auto", "num_speculative_tokens": 3},
)
BY_METHOD = pytest.mark.parametrize("config", METHODS, ids=lambda config: config["method"])
SETTINGS: dict[str, Any] = {
    "quiet": True,
    "num_kv_blocks": 160,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}
PROMPTS = (
    "one two three one two three one two",
    "The cat sat on the mat. The cat sat on the",
    "a b a b a b",
    "x = 1\ny = 2\nx = 1\ny =",
)


class Engines:
    """Made as they are asked for; they end with the test."""

    def __init__(self) -> None:
        self._made: list[LLM] = []

    def make(self, **more: Any) -> LLM:
        self._made.append(LLM(None, **{**SETTINGS, **more}))
        return self._made[-1]

    def end(self) -> None:
        for engine in self._made:
            engine.shutdown()
        collect_and_freeze()


@pytest.fixture
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.end()


def totals(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._scheduler._drafts.totals


def eager_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify all that is offered, whatever it costs here."""
    monkeypatch.setattr(
        "quire.plan.speculation.policy.DraftPolicy.counts",
        lambda _, num_tokens, chances, offered, most: within(offered, most),
    )
    monkeypatch.setattr(
        "quire.plan.speculation.policy.DraftPolicy.may_take",
        lambda _, num_tokens, chances, most: bool(chances) and most > 0,
    )


def within(offered: list[int], most: int) -> list[int]:
    counts: list[int] = []
    for count in offered:
        counts.append(max(min(count, most - sum(counts)), 0))
    return counts


def sampling() -> list[SamplingParams]:
    plain: dict[str, Any] = {"max_tokens": 20, "logprobs": 2}
    return [
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=0, ignore_eos=True, **plain),
        SamplingParams(temperature=0.8, seed=1, top_k=5, top_p=0.9, **plain),
        SamplingParams(temperature=1.0, seed=2, min_p=0.1, repetition_penalty=1.2, **plain),
        SamplingParams(
            temperature=0.3, seed=3, presence_penalty=0.5, frequency_penalty=0.5, **plain
        ),
        SamplingParams(temperature=0.9, seed=5, top_k=9, xtc_probability=0.5, **plain),
        SamplingParams(temperature=0, dry_multiplier=2.0, dry_allowed_length=1, **plain),
        SamplingParams(temperature=0, logit_bias={5: 2.0, 9: -100.0}, **plain),
        SamplingParams(temperature=0, bad_words=["the"], **plain),
        SamplingParams(temperature=0, stop=["cat", "wo t"], **plain),
        SamplingParams(temperature=0.7, seed=4, n=3, max_tokens=20),
        SamplingParams(temperature=0, min_tokens=12, max_tokens=24),
        SamplingParams(
            temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(ab)*c")
        ),
    ]


def run(llm: LLM) -> list[RequestOutput]:
    """Every way of sampling on two prompts; these meet cached prefixes."""
    every = sampling()
    pairs = [(PROMPTS[(i + k) % 4], each) for i, each in enumerate(every) for k in range(2)]
    prompts, each = [prompt for prompt, _ in pairs], [params for _, params in pairs]
    return llm.generate(prompts, each, use_tqdm=False)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Without drafts; the laws of the engine say that neither depth nor batch changes it."""
    llm = LLM(None, **SETTINGS)
    try:
        return run(llm)
    finally:
        llm.shutdown()


@BY_METHOD
@DEPTHS
def test_drafts_change_no_bit(
    depth: int,
    config: dict[str, Any],
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = engines.make(depth=depth, speculative_config=config)
    eager_policy(monkeypatch)
    assert_same(run(llm), expected, exact=True)
    assert 30 < totals(llm).accepted < totals(llm).drafts


@DEPTHS
def test_preempted_requests_are_drafted_for_and_end_the_same(
    depth: int,
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few: dict[str, Any] = {"num_kv_blocks": 41, "swap_space": "16MiB"}
    llm = engines.make(depth=depth, speculative_config=METHODS[0], **few)
    eager_policy(monkeypatch)
    assert_same(run(llm), expected, exact=True)
    core: Any = llm.engine.client
    assert core._core.stats().preempted_total > 0
    assert totals(llm).accepted > 10


@BY_METHOD
def test_the_policy_changes_no_bit(
    config: dict[str, Any], expected: list[RequestOutput], engines: Engines
) -> None:
    llm = engines.make(speculative_config=json.dumps(config))
    assert_same(run(llm), expected, exact=True)


@DEPTHS
@pytest.mark.parametrize("changed", [0.0, 0.2, 1.0])
def test_a_prediction_changes_no_bit_and_needs_no_flag(
    depth: int, changed: float, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut and resumed ones too: the rest of the prediction is followed."""
    llm = engines.make(depth=depth)
    prompts = [{"prompt": prompt} for prompt in PROMPTS]
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True)
    plain = llm.generate(prompts, params, use_tqdm=False)
    eager_policy(monkeypatch)
    client, rng = llm.engine.client, np.random.default_rng(0)
    for cut in (0, 17):
        outputs: dict[int, list[int]] = {}
        for i, result in enumerate(plain):
            tokens = np.array(result.outputs[0].token_ids, np.int32)
            wrong = rng.random(len(tokens)) < changed
            handle = 10**6 + 100 * cut + i
            outputs[handle] = tokens[:cut].tolist()
            client.add(
                EngineRequest(
                    str(handle),
                    handle,
                    np.array(result.prompt_token_ids, np.int32),
                    params,
                    7,
                    output_token_ids=tokens[:cut],
                    prediction_token_ids=np.where(wrong, (tokens + 1) % 300, tokens),
                )
            )
        while client.has_unfinished:
            output = client.step()
            for handle, token in zip(
                output.handles.tolist(), output.token_ids.tolist(), strict=True
            ):
                outputs[handle].append(token)
        assert list(outputs.values()) == [list(result.outputs[0].token_ids) for result in plain]
    if changed < 1:
        assert totals(llm).accepted > 150 * (1 - changed)
    assert totals(llm).drafts > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_drafts_that_do_not_pay_leave_steps_as_they_are(
    method: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when steps wait for each other, or are not repeated from a capture, because drafts
    are on of which none is worth its time."""
    counts: Counter[str] = Counter()
    for name in ("_repeat", "_launch"):
        monkeypatch.setattr(Runner, name, counting(getattr(Runner, name), name, counts))
    plan = Scheduler.plan

    def counted(scheduler: Scheduler, now: float) -> Any:
        found = plan(scheduler, now)
        counts[f"planned with {scheduler._num_in_flight} in flight"] += found is not None
        return found

    monkeypatch.setattr(Scheduler, "plan", counted)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found: list[dict[str, int]] = []
    for settings in (None, {"method": method}):
        llm = engines.make(speculative_config=settings)
        core: Any = llm.engine.client
        policy = core._core._scheduler._drafts._guesses.policy
        policy._credit = -100.0  # spent
        for prompts in (PROMPTS[:1], PROMPTS):
            counts.clear()
            llm.generate(list(prompts), params, use_tqdm=False)
            found.append(dict(counts))
        assert totals(llm).drafts == 0
    assert found[2:] == found[:2]
    assert found[0]["_repeat"] > 50
    assert found[0]["planned with 2 in flight"] > 50


def counting(call: Any, name: str, counts: Counter[str]) -> Any:
    def counted(*args: Any, **more: Any) -> Any:
        counts[name] += 1
        return call(*args, **more)

    return counted
