"""Drafts on = drafts off with recurrent states, to the bit: each row goes on from the state after
the last draft that it accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, ConfigError, RequestOutput, SamplingParams
from quire.base.errors import EngineError
from quire.compute.runner.forward import Forward, ForwardPass
from quire.compute.runner.rows import ScheduledRows
from quire.plan.speculation.ngram import NgramDrafter
from quire.protocol.step import IntArray
from tests.engine.greedy import prompt_of
from tests.engine.test_laws import assert_same
from tests.models.families import Case, write_checkpoint
from tests.pairs import LAWS_BY_PAIRS
from tests.small_engines import Maker, small_engines
from tests.speculation.test_laws import eager_policy, totals

pytestmark = LAWS_BY_PAIRS

NAMES = ("lfm2", "qwen3_5_text", "qwen3_next", "granitemoehybrid", "mamba2")
SETTINGS: dict[str, Any] = {"block_size": 16, "max_model_len": 256, "num_kv_blocks": 128}
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
NGRAM = {"method": "ngram", "num_speculative_tokens": 6}
RIGHT = pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
"""Share of the drafts that are right."""


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(Case(request.param, request.param, {"max_position_embeddings": 256}), path)
    return path


@pytest.fixture
def make(folder: Path) -> Iterator[Maker]:
    with small_engines(str(folder), **SETTINGS) as maker:
        yield maker


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((40, 1, 17, 63, 30))]


def sampling(count: int = 24) -> list[SamplingParams]:
    plain: dict[str, Any] = {"max_tokens": count, "logprobs": 1, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=1.0, seed=1, **plain),
        SamplingParams(temperature=0, repetition_penalty=1.3, **plain),
        SamplingParams(temperature=1.0, seed=2, top_p=0.9, **plain),
        SamplingParams(temperature=1.0, seed=3, n=3, **plain),
    ]


def run(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[RequestOutput]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, sampling()[: len(prompts)], use_tqdm=False)


def knows(outputs: Sequence[RequestOutput], right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let look-ups find what these outputs say, with so many of the tokens right."""
    rng = np.random.default_rng(0)
    texts: list[list[int]] = []
    for output in outputs:
        assert output.prompt_token_ids is not None
        texts += [[*output.prompt_token_ids, *each.token_ids] for each in output.outputs]

    def propose(self: Any, known: IntArray, num_in_flight: int, most: int) -> list[int]:
        del self
        done = known.tolist()
        for text in texts:
            if text[: len(done)] == done:
                rest = text[len(done) + num_in_flight :][:most]
                return [t if rng.random() < right else (t + 1) % 128 for t in rest]
        return []

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    eager_policy(monkeypatch)


def check(llm: LLM, expected: Sequence[RequestOutput], right: float) -> None:
    assert_same(run(llm), expected)
    made, accepted = totals(llm).drafts, totals(llm).accepted
    assert made > 50
    if right == 1.0:
        assert accepted > 0.9 * made, "a sample is only taken for another one where they part"
    else:
        assert accepted < made, "nothing had to be taken back"


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    """Without drafts; the laws of the engine say that neither depth nor batch changes it."""
    with small_engines(str(folder), **SETTINGS) as make:
        return run(make(enable_prefix_caching=False))


@DEPTHS
@RIGHT
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_drafts_change_no_bit(
    make: Maker,
    expected: list[RequestOutput],
    depth: int,
    right: float,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone and batched, forked, greedy and drawn. In the second run the prompts come from the
    cache."""
    knows(expected, right, monkeypatch)
    llm = make(depth=depth, enforce_eager=eager, speculative_config=NGRAM)
    check(llm, expected, right)
    check(llm, expected, right)
    alone = llm.generate({"prompt_token_ids": PROMPTS[0]}, sampling()[0], use_tqdm=False)
    assert_same(alone, expected[:1])


@DEPTHS
@RIGHT
@pytest.mark.parametrize("budget", [9, 17, 64])
def test_preempted_and_chunked_ones_change_no_bit(
    make: Maker,
    expected: list[RequestOutput],
    depth: int,
    right: float,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knows(expected, right, monkeypatch)
    few: dict[str, Any] = {"num_kv_blocks": 16, "num_state_checkpoints": 5, "max_model_len": 160}
    llm = make(depth=depth, max_num_batched_tokens=budget, speculative_config=NGRAM, **few)
    assert_same(run(llm), expected)
    assert llm.engine.client.stats().preempted_total > 0
    assert totals(llm).drafts > 10


@DEPTHS
@RIGHT
def test_steps_that_are_computed_twice_change_no_bit(
    make: Maker,
    expected: list[RequestOutput],
    depth: int,
    right: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch breaks after it was computed, and each row with drafts every third time, so that
    it is computed without them."""
    knows(expected, right, monkeypatch)
    compute: Any = ForwardPass._compute
    count = 0

    def breaking(self: ForwardPass, rows: ScheduledRows) -> Forward:
        nonlocal count
        found: Forward = compute(self, rows)
        count += 1
        if len(rows.slots) > 1 or (rows.num_drafts.any() and count % 3 == 0):
            raise EngineError("the step breaks after its rows were computed")
        return found

    monkeypatch.setattr(ForwardPass, "_compute", breaking)
    assert_same(run(make(depth=depth, speculative_config=NGRAM)), expected)
    assert count > 100


@DEPTHS
@RIGHT
def test_a_later_turn_starts_within_the_output(
    make: Maker, depth: int, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a checkpoint that drafts went past, and one that no step wrote."""
    params, prompt = sampling(60)[0], prompt_of(100)
    cold = make(enable_prefix_caching=False)
    asked = {"prompt_token_ids": prompt}
    expected = cold.generate(asked, params, use_tqdm=False)
    knows(expected, right, monkeypatch)
    llm = make(depth=depth, speculative_config=NGRAM)
    assert_same(llm.generate(asked, params, use_tqdm=False), expected)
    later = {"prompt_token_ids": [*prompt, *expected[0].outputs[0].token_ids, 5]}
    (found,) = llm.generate(later, params, use_tqdm=False)
    assert_same([found], cold.generate(later, params, use_tqdm=False))
    assert found.num_cached_tokens == 159 // 16 * 16, "the output is computed again"


@pytest.mark.parametrize("right", [0.7])
def test_two_ranks_take_their_states_back(
    make: Maker, folder: Path, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "next" in folder.name:
        pytest.skip("ranks have different experts, so sums depend on their number")
    settings: dict[str, Any] = {"rank_invariant": True, "num_threads": 1}
    outputs = run(make(**settings))
    knows(outputs, right, monkeypatch)
    llm = make(**settings, tensor_parallel_size=2, speculative_config=NGRAM)
    check(llm, outputs, right)


@DEPTHS
def test_a_draft_model_changes_no_bit(
    make: Maker,
    folder: Path,
    expected: list[RequestOutput],
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise decides much at temperature 1, so that some drafts are right by it alone."""
    if "mamba2" in folder.name:
        pytest.skip("no layer of the model attends")
    case = Case("llama", "llama", {"max_position_embeddings": 256})
    write_checkpoint(case, tmp_path)
    eager_policy(monkeypatch)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    llm = make(depth=depth, speculative_config=config)
    assert_same(run(llm), expected)
    assert 0 < totals(llm).accepted < totals(llm).drafts


def test_a_draft_model_with_states_is_refused(folder: Path) -> None:
    config = {"method": "draft_model", "model": str(folder)}
    reason = "recurrent states are not offered for draft models"
    if "mamba2" in folder.name:  # whoever it would draft for has states alone
        reason = "needs a layer with full attention"
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folder), skip_tokenizer_init=True, quiet=True, speculative_config=config)


@DEPTHS
def test_a_prediction_needs_no_setting(
    make: Maker, expected: list[RequestOutput], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poisoned slot too: nothing that another tenant left is read."""
    knows(expected, 0.7, monkeypatch)
    llm = make(depth=depth, speculative_config=NGRAM)
    run(llm)
    client: Any = llm.engine.client
    states = client._core._executor._worker._assembly.runner._changes._states
    assert llm.reset_prefix_cache()
    for memory in (states._places, states._kept):
        memory.numpy().fill(0xFF)  # NaN in any dtype
    check(llm, expected, 0.7)


def test_the_plan_counts_tokens_that_are_kept(make: Maker) -> None:
    llm = make(num_state_checkpoints=0)
    client: Any = llm.engine.client
    states = client._core._executor._worker._assembly.runner._changes._states
    planned = llm.engine.resolved.memory.fixed.states
    assert planned == states._places.nbytes + states._kept.nbytes
    assert states._kept.dtype == torch.uint8
