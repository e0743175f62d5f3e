"""Beam search on the real engine: equal to `transformers`, and to itself in any company."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from quire.protocol import BeamRules, EngineRequest
from quire.protocol.scheduling_params import SchedulingParams
from quire.text.rendering import RenderedPrompt
from tests.models.families import CASES, random_sequences, write_checkpoint

STOPS = tuple(range(3, 120, 9))
"""So many tokens end a sequence that random models end many."""

FAMILIES = [
    case
    for case in CASES
    if case.name in ("llama", "mistral-window", "qwen2-mixed", "qwen3", "opt", "gpt2")
]
PROMPTS = list(random_sequences((5, 1, 12)).values())
RULES: list[dict[str, Any]] = [
    {"beam_width": 4},
    {"beam_width": 3, "early_stopping": True},
    {"beam_width": 3, "early_stopping": "never", "length_penalty": 2.0},
    {"beam_width": 2, "early_stopping": "never", "length_penalty": 0.0},
    {"beam_width": 6, "length_penalty": -1.0},
    {"beam_width": 5, "length_penalty": 1.5, "min_tokens": 4},
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda case: case.name)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """A tiny random model in `transformers` and in the engine."""
    folder: Path = tmp_path_factory.mktemp(request.param.name)
    theirs = write_checkpoint(request.param, folder)
    num_threads = torch.get_num_threads()
    with start(folder) as llm:
        torch.set_num_threads(1)  # else its threads and the engine's wait for one another
        yield theirs, llm
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_checkpoint(FAMILIES[0], folder)
    with start(folder) as engine:
        yield engine


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder), quiet=True, skip_tokenizer_init=True, dtype="float32", num_kv_blocks=256,
        block_size=4, max_num_seqs=12, max_num_batched_tokens=64, max_model_len=64, **settings,
    )  # fmt: skip


def search(
    llm: LLM, prompts: list[list[int]], max_tokens: int = 12, **rules: Any
) -> list[BeamSearchOutput]:
    params = BeamSearchParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=STOPS, **rules)
    return llm.beam_search(prompts, params, use_tqdm=False)


def generate(
    model: Any, prompt: list[int], beam_width: int, min_tokens: int = 0, **rules: Any
) -> tuple[list[list[int]], list[float]]:
    """Return the result of `transformers`: tokens without padding, and scores."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            num_beams=beam_width, num_return_sequences=beam_width, max_new_tokens=12,
            min_new_tokens=min_tokens or None, eos_token_id=list(STOPS), pad_token_id=STOPS[0],
            return_dict_in_generate=True, output_scores=True, **rules,
        )  # fmt: skip
    return [unpadded(row, len(prompt)) for row in found.sequences.tolist()], (
        found.sequences_scores.tolist()
    )


def unpadded(tokens: list[int], num_prompt: int) -> list[int]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in STOPS and i >= num_prompt]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_equals_transformers(pair: tuple[Any, LLM], rules: dict[str, Any]) -> None:
    theirs, ours = pair
    prompts = PROMPTS[1:]
    for prompt, output in zip(prompts, search(ours, prompts, **rules), strict=True):
        tokens, scores = generate(theirs, prompt, **rules)
        assert [sequence.tokens for sequence in output.sequences] == tokens
        assert [sequence.score for sequence in output.sequences] == pytest.approx(scores, abs=1e-4)


def test_is_the_same_in_any_company(llm: LLM) -> None:
    """Beams, samples, greedy and seeded requests in one batch, each as it is alone."""
    client = llm.engine.client
    alone = [search(llm, [prompt], beam_width=4, logprobs=2)[0] for prompt in PROMPTS]
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True),
    ]
    others = [llm.generate(PROMPTS[0], one, use_tqdm=False)[0] for one in params]
    streams = [llm.stream(PROMPTS[0], one) for one in params]
    growing = [next(stream) for stream in streams]
    together = search(llm, PROMPTS, beam_width=4, logprobs=2)
    for stream in streams:
        assert list(stream)
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.cum_logprob == pytest.approx(b.cum_logprob, abs=1e-4)
    for one, other in zip(others, growing, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
    assert client.stats().num_used_blocks == 0


def test_samples_that_branch_off_beside_beams_read_their_own_logits(llm: LLM) -> None:
    """Both prompts end in one step. As many rows draw as there are logits, but not one from
    each."""
    samples = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True)
    alone = _tokens_of(llm, [_request(1000, samples)], [1000, 1001])
    beams = _request(2000, SamplingParams(max_tokens=6), BeamRules(2))
    assert _tokens_of(llm, [beams, _request(1000, samples)], [1000, 1001]) == alone


def _request(handle: int, params: SamplingParams, beams: BeamRules | None = None) -> EngineRequest:
    prompt = np.array(PROMPTS[1 if beams else 2], np.int32)
    return EngineRequest(str(handle), handle, prompt, params, params.seed or 0, beams=beams)


def _tokens_of(llm: LLM, requests: list[EngineRequest], handles: list[int]) -> list[list[int]]:
    """Return the tokens of some handles, when all requests have ended."""
    client = llm.engine.client
    found: dict[int, list[int]] = {handle: [] for handle in handles}
    for request in requests:
        client.add(request)
    while client.has_unfinished:
        output = client.step()
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            found[handle].append(token)
    return list(found.values())


def test_is_the_same_after_preemption_at_any_depth(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[1], tmp_path)
    tokens = []
    for settings in ({"depth": 1}, {"depth": 3}, {"depth": 2, "enable_prefix_caching": False}):
        with start(tmp_path, **settings) as engine:
            scheduler = scheduler_of(engine)
            outputs = [
                preempted_search(engine, prompt, every=2 if settings["depth"] > 1 else 0)
                for prompt in PROMPTS
            ]
            tokens.append([[s.tokens for s in output.sequences] for output in outputs])
            assert (scheduler.stats().preempted_total > 0) == (settings["depth"] > 1)
    assert tokens[0] == tokens[1] == tokens[2]


def scheduler_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._scheduler


def preempted_search(llm: LLM, prompt: list[int], every: int) -> BeamSearchOutput:
    """A search that is preempted before one in `every` plans; 0: never."""
    scheduler = scheduler_of(llm)
    plan, count = scheduler.plan, 0

    def plan_and_preempt(now: float) -> Any:
        nonlocal count
        count += 1
        if every and count % every == 0 and count < 16 and scheduler.state.roster.running:
            scheduler._lifecycle.preempt(scheduler.state.roster.running[0])
        return plan(now)

    scheduler.plan = plan_and_preempt
    try:
        return search(llm, [prompt], beam_width=3)[0]
    finally:
        scheduler.plan = plan


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """Whatever the temperature that the search goes by."""
    for temperature in (0.0, 0.5):
        (output,) = search(llm, PROMPTS[:1], beam_width=3, logprobs=1, temperature=temperature)
        for sequence in output.sequences:
            chosen = sequence.tokens[len(PROMPTS[0]) :]
            entries = sequence.logprobs or []
            own = sum(entry[token].logprob for entry, token in zip(entries, chosen, strict=True))
            assert (own == pytest.approx(sequence.cum_logprob)) == (temperature == 0)
            params = SamplingParams(prompt_logprobs=0, max_tokens=1)
            (scored,) = llm.generate(sequence.tokens, params, use_tqdm=False)
            tail = (scored.prompt_logprobs or [])[len(PROMPTS[0]) :]
            model = sum(entry[t].logprob for entry, t in zip(tail, chosen, strict=True) if entry)
            assert own == pytest.approx(model, abs=1e-3)


def test_temperature_flattens_what_the_search_goes_by(llm: LLM) -> None:
    """One beam of one token: log softmax of logits / temperature."""
    logprobs = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    (output,) = llm.generate(PROMPTS[0], logprobs, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    scores = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
    expected = torch.log_softmax(torch.tensor(list(scores.values())) / 0.5, 0).max().item()
    params = BeamSearchParams(beam_width=1, max_tokens=1, temperature=0.5)
    (found,) = llm.beam_search(PROMPTS[0], params, use_tqdm=False)
    assert found.sequences[0].cum_logprob == pytest.approx(expected, abs=1e-4)


def test_ends_on_the_models_own_end_token(tmp_path: Path) -> None:
    """A checkpoint is told that a token which its best sequence has is its end."""
    write_checkpoint(FAMILIES[0], tmp_path)
    params: dict[str, Any] = {"beam_width": 4, "max_tokens": 20}
    with start(tmp_path) as engine:
        (free,) = engine.beam_search(PROMPTS[0], BeamSearchParams(**params), use_tqdm=False)
    end = free.sequences[0].tokens[len(PROMPTS[0]) + 2]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**config, "eos_token_id": end}))
    with start(tmp_path) as engine:
        (ended,) = engine.beam_search(PROMPTS[0], BeamSearchParams(**params), use_tqdm=False)
        ignoring = BeamSearchParams(**params, ignore_eos=True)
        (ignored,) = engine.beam_search(PROMPTS[0], ignoring, use_tqdm=False)
    assert ignored.sequences == free.sequences
    assert any(sequence.finish_reason == "stop" for sequence in ended.sequences)
    for sequence in ended.sequences:
        assert sequence.finish_reason == ("stop" if sequence.tokens[-1] == end else "length")
        assert sequence.stop_reason is None
        assert end not in sequence.tokens[len(PROMPTS[0]) : -1]


def test_one_bad_prompt_fails_alone(llm: LLM) -> None:
    bad, good = search(llm, [[500], PROMPTS[0]], beam_width=3)
    assert "500" in (bad.error or "")
    assert [each.finish_reason for each in bad.sequences] == ["error"]
    assert len(good.sequences) == 3
    with pytest.raises(RequestError, match="computes 12 sequences at a time"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=13), use_tqdm=False)


def _search(llm: LLM, prompt: RenderedPrompt, params: SamplingParams) -> list[RequestOutput]:
    """A search of width 2 with parameters that `beam_search` has no place for."""
    scheduling = [SchedulingParams()]
    return llm._run([prompt], params, scheduling, False, is_single=False, beams=BeamRules(2))


def test_bans_that_leave_too_few_sequences_are_told(llm: LLM) -> None:
    """And a beam that comes to a dead end leaves the others alone."""
    prompt = RenderedPrompt(PROMPTS[0], None)
    common = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
    one = SamplingParams(n=2, allowed_token_ids=[5], **common)
    (output,) = _search(llm, prompt, one)
    assert "only 1 sequences" in (output.error or "")
    words = [[5, 7], [7, 5], [5, 5, 5], [7, 7, 7]]  # nothing is three tokens long
    late = SamplingParams(n=2, allowed_token_ids=[5, 7], bad_words_token_ids=words, **common)
    (output,) = _search(llm, prompt, late)
    assert "no more than 0 sequences" in (output.error or "")
    words = [[5, 5], [5, 7]]  # after a 5 nothing may follow
    two = SamplingParams(allowed_token_ids=[5, 7], bad_words_token_ids=words, **common)
    (output,) = _search(llm, prompt, two)
    assert output.outputs[0].token_ids[:2] == [7, 7]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("beam_width", 0, "beam width is 0"),
        ("beam_width", True, "beam width is True"),
        ("length_penalty", float("nan"), "length_penalty is nan"),
        ("early_stopping", "sometimes", "early_stopping is 'sometimes'"),
        ("max_tokens", 0, "max_tokens is 0"),
        ("temperature", -1.0, "temperature is -1"),
    ],
)
def test_parameters_are_checked(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        BeamSearchParams(**{"beam_width": 2, field: value})


@pytest.mark.parametrize("given", [None, SamplingParams(), {"beam_width": 2}])
def test_other_parameters_are_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(RequestError, match=r"give BeamSearchParams\(beam_width=…\)"):
        llm.beam_search([[1, 2, 3]], given)
