"""A draft model beside the model: drafts on = drafts off to the bit, and the same model agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError
from quire.config.families.reader import read_model_spec
from quire.config.resolve import resolve
from quire.config.settings import EngineSettings
from quire.config.speculation.draft_model import DraftModel
from quire.protocol import EngineRequest
from quire.sampling_params import StructuredOutputsParams
from tests.config.specs import make_gpu_platform, make_platform
from tests.engine.test_laws import assert_same
from tests.speculation.shallow import BUNDLED, write_shallow
from tests.speculation.test_laws import (
    DEPTHS,
    PROMPTS,
    SETTINGS,
    Engines,
    eager_policy,
    engines,
    expected,
    run,
    totals,
)

__all__ = ["engines", "expected"]  # fixtures

SAMPLED = (
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_k=20, top_p=0.9, max_tokens=24, ignore_eos=True),
)
"""Ways of sampling without edits of logits, which a draft model does not see."""


def config(model: Path, count: int = 3) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": count}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow(tmp_path_factory.mktemp("shallow"), 5)


@DEPTHS
def test_a_draft_model_changes_no_bit(
    depth: int,
    shallow: Path,
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone and batched, forked, with edits, stops, a grammar and cached prefixes."""
    llm = engines.make(depth=depth, speculative_config=config(shallow))
    eager_policy(monkeypatch)
    assert_same(run(llm), expected, exact=True)
    assert 30 < totals(llm).accepted < totals(llm).drafts
    assert_same(run(llm), expected, exact=True)


@DEPTHS
@pytest.mark.parametrize("swap_space", ["0", "16MiB"], ids=["recomputed", "swapped"])
def test_preempted_requests_end_the_same(
    depth: int,
    swap_space: str,
    shallow: Path,
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few: dict[str, Any] = {"num_kv_blocks": 41, "swap_space": swap_space}
    llm = engines.make(depth=depth, speculative_config=config(shallow), **few)
    eager_policy(monkeypatch)
    assert_same(run(llm), expected, exact=True)
    core: Any = llm.engine.client
    assert core._core.stats().preempted_total > 0
    assert totals(llm).accepted > 5


def test_the_policy_changes_no_bit(
    shallow: Path, expected: list[RequestOutput], engines: Engines
) -> None:
    llm = engines.make(speculative_config=json.dumps(config(shallow)))
    assert_same(run(llm), expected, exact=True)


@pytest.fixture(scope="module")
def sampled() -> list[RequestOutput]:
    llm = LLM(None, **SETTINGS)
    try:
        return run_sampled(llm)
    finally:
        llm.shutdown()


def run_sampled(llm: LLM) -> list[RequestOutput]:
    """Prompts that share a prefix, longer than a step, by each way of sampling, then samples."""
    text = " ".join(PROMPTS)
    prompts = [f"{text} {prompt}" for prompt in PROMPTS]
    found: list[RequestOutput] = []
    for params in SAMPLED:
        found += llm.generate(prompts, params, use_tqdm=False)
    several = replace_n(SAMPLED[1], 3)
    return [*found, *llm.generate(prompts[0], several, use_tqdm=False)]


def replace_n(params: SamplingParams, n: int) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature, seed=params.seed, max_tokens=20, ignore_eos=True, n=n
    )


@DEPTHS
@pytest.mark.parametrize(
    "more",
    [{}, {"num_kv_blocks": 40}, {"num_kv_blocks": 40, "swap_space": "16MiB"}],
    ids=["roomy", "recomputed", "swapped"],
)
def test_the_model_as_its_own_draft_model_agrees_with_itself(
    depth: int,
    more: dict[str, Any],
    sampled: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns red when K/V of the draft model are of other tokens than the row's: after rejected
    drafts, chunks, hits, copies of blocks, or a way to the host and back."""
    llm = engines.make(depth=depth, speculative_config=config(BUNDLED), **more)
    eager_policy(monkeypatch)
    for _ in range(2):  # then with cached prefixes
        assert_same(run_sampled(llm), sampled, exact=True)
    core: Any = llm.engine.client
    assert bool(more) == (core._core.stats().preempted_total > 0)
    assert totals(llm).drafts > 300
    assert totals(llm).accepted == totals(llm).drafts


def test_drafts_after_rejected_ones_are_as_good(
    shallow: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the draft model goes on from what it computed of rejected drafts: each of its
    drafts is the one that it gives for a fresh prompt."""
    llm = engines.make(speculative_config=config(shallow, 1), enable_prefix_caching=False)
    eager_policy(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (result,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    assert result.prompt_token_ids is not None
    tokens = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    first, at = totals(llm), len(result.prompt_token_ids)
    draft = LLM(str(shallow), **SETTINGS)
    try:
        rows = accepted = 0
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        while at < len(tokens) - 1:  # a step's draft follows the tokens before `at`
            prompt = {"prompt_token_ids": tokens[:at]}
            (guess,) = draft.generate([prompt], one, use_tqdm=False)
            is_right = guess.outputs[0].token_ids[0] == tokens[at]
            rows, accepted, at = rows + 1, accepted + is_right, at + 1 + is_right
    finally:
        draft.shutdown()
    assert (first.rows, first.accepted) == (rows, accepted)
    assert 0 < accepted < rows


GUIDED = [
    SamplingParams(temperature=0, max_tokens=30, structured_outputs=of)
    for of in (
        None,
        StructuredOutputsParams(regex="[a-z ]{4,40}"),
        StructuredOutputsParams(regex="[^a-d]{4,40}"),
    )
]
"""A row without a grammar beside two with one."""


@pytest.fixture(scope="module")
def guided() -> list[RequestOutput]:
    llm = LLM(None, **SETTINGS)
    try:
        return llm.generate(list(PROMPTS[:3]), GUIDED, use_tqdm=False)
    finally:
        llm.shutdown()


@DEPTHS
def test_rows_with_a_grammar_are_drafted_for(
    depth: int,
    guided: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside rows without one. A model that is its own draft model is right where its grammar does
    not decide."""
    prompts = list(PROMPTS[:3])
    llm = engines.make(depth=depth, speculative_config=config(BUNDLED))
    eager_policy(monkeypatch)
    assert_same(llm.generate(prompts[1:], GUIDED[1:], use_tqdm=False), guided[1:], exact=True)
    assert totals(llm).accepted > 10
    assert_same(llm.generate(prompts, GUIDED, use_tqdm=False), guided, exact=True)


@DEPTHS
def test_requests_that_come_with_output_are_drafted_for(
    depth: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.make(depth=depth, speculative_config=config(BUNDLED))
    eager_policy(monkeypatch)
    params = SAMPLED[1]
    (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    tokens, client = np.array(whole.outputs[0].token_ids, np.int32), llm.engine.client
    prompt = np.array(whole.prompt_token_ids, np.int32)
    client.add(EngineRequest("cut", 10**6, prompt, params, 3, output_token_ids=tokens[:11]))
    found = tokens[:11].tolist()
    while client.has_unfinished:
        found += client.step().token_ids.tolist()
    assert found == tokens.tolist()
    assert totals(llm).accepted == totals(llm).drafts


def test_an_engine_that_has_slept_drafts_as_before(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the draft model's weights or blocks do not come back."""
    llm = engines.make(speculative_config=config(BUNDLED))
    eager_policy(monkeypatch)
    before = llm.generate(PROMPTS[0], SAMPLED[1], use_tqdm=False)
    llm.sleep(2)
    llm.wake_up()
    assert_same(llm.generate(PROMPTS[0], SAMPLED[1], use_tqdm=False), before, exact=True)
    assert totals(llm).accepted == totals(llm).drafts > 30


def test_a_draft_model_that_breaks_costs_no_request(
    sampled: list[RequestOutput], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.make(speculative_config=config(BUNDLED))
    eager_policy(monkeypatch)

    asked: list[None] = []

    def broken(*_: object) -> torch.Tensor:
        asked.append(None)
        raise RuntimeError("out of luck")

    monkeypatch.setattr("quire.compute.runner.drafting.model.ModelDrafter.forward", broken)
    assert_same(run_sampled(llm), sampled, exact=True)
    assert asked
    assert totals(llm).drafts == 0  # none was made


def test_a_draft_model_that_is_not_finite_costs_no_request(
    sampled: list[RequestOutput], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.make(speculative_config=config(BUNDLED))
    eager_policy(monkeypatch)

    asked: list[None] = []

    def nothing(_self: object, slots: np.ndarray, *_: object) -> torch.Tensor:
        asked.append(None)
        return torch.full((len(slots), 4096), torch.nan)

    monkeypatch.setattr("quire.compute.runner.drafting.model.ModelDrafter.forward", nothing)
    assert_same(run_sampled(llm), sampled, exact=True)
    assert asked
    assert totals(llm).drafts == 0  # none was made


# --- what is refused ------------------------------------------------------------------------------


def start(**more: Any) -> None:
    LLM(None, **{**SETTINGS, **more}).shutdown()


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    fewer = write_shallow(tmp_path / "fewer", 1, vocab_size=4000)
    with pytest.raises(ConfigError, match="has 4,000 tokens and the model 4,096"):
        start(speculative_config=config(fewer))
    other = write_shallow(tmp_path / "other", 1)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    names = list(tokenizer["model"]["vocab"])
    vocab = tokenizer["model"]["vocab"]
    vocab[names[300]], vocab[names[301]] = vocab[names[301]], vocab[names[300]]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"tokenizer\.json gives tokens other numbers"):
        start(speculative_config=config(other))


def test_what_a_draft_model_cannot_read_is_refused(shallow: Path) -> None:
    with pytest.raises(ConfigError, match="reads tokens alone"):
        start(speculative_config=config(shallow), enable_prompt_embeds=True)
    with pytest.raises(ConfigError, match="no such folder"):
        start(speculative_config=config(shallow / "none"))


def test_the_memory_plan_counts_weights_and_blocks_of_the_draft_model(shallow: Path) -> None:
    spec, draft = read_model_spec(BUNDLED), read_model_spec(shallow)
    settings = EngineSettings(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    platform = make_platform()
    alone = resolve(settings, spec, None, platform).memory
    both = resolve(settings, spec, None, platform, DraftModel(shallow, draft, None)).memory
    assert both.fixed.weights > alone.fixed.weights + draft.num_parameters * draft.dtype_bytes
    told = resolve(settings, spec, None, platform, DraftModel(shallow, draft, None)).decisions
    assert "draft_model" in [decision.name for decision in told]
    assert both.page * 6 == alone.page * 11  # 5 layers more, alike
    with pytest.raises(ConfigError, match="draft models run on CPUs alone"):
        resolve(settings, spec, None, make_gpu_platform(), DraftModel(shallow, draft, None))
