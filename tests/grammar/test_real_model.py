"""Structured output of the bundled model, which has opinions of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, RequestError, SamplingParams, StructuredOutputsParams
from tests.grammar.test_forced import DEPTHS
from tests.grammar.test_forced import SCHEMA as STATION

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPTS = ["Hello", "def main(", "Give me JSON: ", "Once upon a time " * 8]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    before = set(threading.enumerate())
    with LLM(quiet=True, max_model_len=256, max_num_seqs=8, dtype="float32") as engine:
        yield engine
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("quire-grammar")]


def params(**more: Any) -> SamplingParams:
    structured = more.pop("structured_outputs", StructuredOutputsParams(json=SCHEMA))
    asked = {"max_tokens": 100, "temperature": 1.0, "seed": 5, **more}
    return SamplingParams(structured_outputs=structured, **asked)


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_samples_log_probabilities_and_a_prefix_hit(llm: LLM) -> None:
    """Log-probabilities are those before the mask: a forbidden token may be more likely."""
    first = llm.generate(PROMPTS, params(n=3, logprobs=2), use_tqdm=False)
    again = llm.generate(PROMPTS, params(n=3, logprobs=2), use_tqdm=False)
    assert sum(output.num_cached_tokens or 0 for output in again) > 0
    ranks: list[int] = []
    for output, other in zip(first, again, strict=True):
        assert output.error is None
        assert len({sample.text for sample in output.outputs}) > 1
        for sample, same in zip(output.outputs, other.outputs, strict=True):
            assert sample.finish_reason == "stop"
            assert (sample.text, sample.logprobs) == (same.text, same.logprobs)
            check(sample.text)
            assert sample.logprobs is not None
            ranks += [
                entry[token].rank or 0
                for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)
            ]
    assert max(ranks) > 50


def test_plain_requests_beside_are_as_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=20, seed=1)
    alone = llm.generate(PROMPTS, plain, use_tqdm=False)
    mixed = llm.generate([*PROMPTS, *PROMPTS], [plain] * 4 + [params()] * 4, use_tqdm=False)
    assert [o.outputs[0].text for o in mixed[:4]] == [o.outputs[0].text for o in alone]
    for output in mixed[4:]:
        check(output.outputs[0].text)


def test_edits_stops_and_ends(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["abc", "xyz"])
    for more, texts in (
        ({"stop": ["b", "y"]}, ["a", "x"]),
        ({"min_tokens": 60}, ["abc", "xyz"]),
        ({"ignore_eos": True}, ["abc", "xyz"]),
        ({"presence_penalty": 2.0, "repetition_penalty": 1.3}, ["abc", "xyz"]),
        ({"temperature": 0.0}, ["abc", "xyz"]),
    ):
        (output,) = llm.generate("q", params(structured_outputs=choice, **more), use_tqdm=False)
        assert output.outputs[0].text in texts
        assert output.outputs[0].finish_reason == "stop"


def test_preempted_is_not(llm: LLM) -> None:
    """The masks follow from the output alone."""
    expected = llm.generate(PROMPTS, params(n=2), use_tqdm=False)
    with LLM(
        quiet=True, max_model_len=160, max_num_seqs=8, num_kv_blocks=14, dtype="float32", depth=3
    ) as small:
        got = small.generate(PROMPTS, params(n=2), use_tqdm=False)
        assert small.engine.client.stats().preempted_total > 0
    assert [[s.text for s in o.outputs] for o in got] == [
        [s.text for s in o.outputs] for o in expected
    ]


def test_what_is_refused_fails_alone(llm: LLM) -> None:
    wrong = params(structured_outputs=StructuredOutputsParams(json={"not": {}}))
    bad, good = llm.generate(["a", "b"], [wrong, params()], use_tqdm=False)
    assert bad.error is not None
    assert "$.not" in bad.error
    check(good.outputs[0].text)
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


def test_an_engine_without_a_tokenizer_says_so() -> None:
    with LLM(quiet=True, max_model_len=64, skip_tokenizer_init=True) as engine:
        (output,) = engine.generate([[5, 6]], params(detokenize=False), use_tqdm=False)
    assert output.error is not None
    assert "tokenizer" in output.error


@DEPTHS
def test_each_forced_token_has_its_log_probability(depth: int) -> None:
    """The model's, before the mask; by the bits as without forced tokens."""
    params = [
        SamplingParams(
            max_tokens=100, seed=i, n=1 + i, temperature=0.8, logprobs=3,
            structured_outputs=StructuredOutputsParams(json=STATION, disable_any_whitespace=True),
        )
        for i in range(2)
    ]  # fmt: skip
    prompts = ["The weather", "A station"]
    with LLM(quiet=True, num_kv_blocks=64, max_model_len=256, depth=depth) as llm:
        client: Any = llm.engine.client
        scheduler = client._core._scheduler
        runs: list[Any] = []
        steps: list[int] = []
        for takes_forced in (False, True):
            scheduler._drafts.takes_forced = takes_forced
            before = scheduler.stats().steps_total
            runs.append(llm.generate(prompts, params, use_tqdm=False))
            steps.append(scheduler.stats().steps_total - before)
    assert steps[1] < 0.75 * steps[0]
    for one, other in zip(*runs, strict=True):
        for sample, reference in zip(one.outputs, other.outputs, strict=True):
            assert sample.token_ids == reference.token_ids
            assert sample.logprobs == reference.logprobs
            assert len(sample.logprobs or ()) == len(sample.token_ids)
