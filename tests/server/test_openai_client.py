"""The official client, which refuses every shape that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.running import MODEL, RunningServer

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def lenient(server: RunningServer) -> Iterator[openai.OpenAI]:
    """For text completions as the API itself sends them: its chunks have no finish_reason before
    the last, and the first token of an echo no log-probability, which the strict types forbid."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found
    server.wait_until_idle()


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 5},
    {"n": 3, "temperature": 0.8, "seed": 7},
    {"stop": ["e"], "max_tokens": 40},
    {"stop": "zzz", "max_tokens": 5},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "top_p": 0.9},
    {"logit_bias": {"17": 5, "18": -100}},
    {"user": "someone", "extra_body": {"metadata": {"a": "b"}}},
    {
        "extra_body": {
            "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
            "stop_token_ids": [5], "ignore_eos": True, "bad_words": ["no"],
            "allowed_token_ids": [30, 31, 32], "include_stop_str_in_output": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False,
            "cache_salt": "mine", "return_token_ids": True, "add_special_tokens": True,
            "return_timeline": True, "truncate_prompt_tokens": 4, "request_id": "named",
        }
    },
]  # fmt: skip


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_chat(client: openai.OpenAI, parameters: dict[str, Any]) -> None:
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, **parameters}
    answer = client.chat.completions.create(**given)
    assert [choice.index for choice in answer.choices] == list(range(given.get("n", 1)))
    assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    texts = [""] * given.get("n", 1)
    ends: list[str] = []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert len(ends) == len(texts)
    if "seed" in given or given.get("temperature") == 0:
        assert texts == [choice.message.content for choice in answer.choices]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_completion(client: openai.OpenAI, parameters: dict[str, Any]) -> None:
    given = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, **parameters}
    answer = client.completions.create(**given)
    assert [choice.index for choice in answer.choices] == list(range(given.get("n", 1)))
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_completion_stream(lenient: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "prompt": ["One", "Two"], "n": 2, "seed": 3, "max_tokens": 9}
    answer = lenient.completions.create(**given)
    texts = [""] * 4
    for chunk in lenient.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    assert len(set(texts)) > 1


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, seed=1
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert len(found.content) == answer.usage.completion_tokens  # pyright: ignore
    assert all(len(entry.top_logprobs) == 3 for entry in found.content)
    spelled = b"".join(bytes(entry.bytes or ()) for entry in found.content)
    assert spelled.decode("utf-8", "replace") == answer.choices[0].message.content
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        seed=1,
        stream=True,
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        for entry in (choice.logprobs and choice.logprobs.content) or ()
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in found.content]


def test_logprobs_of_completion(lenient: openai.OpenAI) -> None:
    answer = lenient.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=4, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    assert answer.usage is not None and choice.logprobs is not None
    logprobs = choice.logprobs
    assert logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert choice.text.startswith("Once upon a time")
    assert len(logprobs.tokens) == answer.usage.total_tokens == len(logprobs.token_logprobs)
    assert logprobs.token_logprobs[0] is None
    assert None not in logprobs.token_logprobs[1:]


def test_loglikelihood_needs_no_output(lenient: openai.OpenAI) -> None:
    """Evaluation harnesses score a text with echo, logprobs, and no token to generate."""
    answer = lenient.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=0, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    assert choice.text == "Once upon a time"
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    def chunks(**options: Any) -> list[Any]:
        return list(
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
            )  # pyright: ignore
        )

    plain = chunks(include_usage=False)
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    with_end = chunks(include_usage=True)
    assert [chunk.usage is not None for chunk in with_end] == [False] * (len(with_end) - 1) + [True]
    assert with_end[-1].choices == [] and with_end[-1].usage.completion_tokens == 5
    in_each = chunks(include_usage=True, continuous_usage_stats=True)
    counts = [chunk.usage.completion_tokens for chunk in in_each]
    assert counts == sorted(counts) and counts[-1] == 5
    off = chunks(include_usage=False, continuous_usage_stats=True)  # fault: guidellm got a 400
    assert all(chunk.usage is None and chunk.choices for chunk in off)


def test_answers_have_every_field_that_the_api_always_gives(client: openai.OpenAI) -> None:
    """Fields that may be null are there too; the client itself asks for the others. A message has
    annotations, which readers of searches iterate."""
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    text = client.completions.create(model=MODEL, prompt="hi", max_tokens=2)
    response = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    for model, names in (
        (chat.choices[0], {"logprobs"}),
        (chat.choices[0].message, {"content", "refusal", "annotations"}),
        (text.choices[0], {"logprobs"}),
        (response, {"error", "incomplete_details", "instructions", "metadata"}),
        (response, {"temperature", "top_p", "usage", "text", "reasoning"}),
    ):
        assert names <= model.model_fields_set, (type(model), names - model.model_fields_set)
    assert chat.choices[0].message.annotations == []


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "other-name"]
    assert client.models.retrieve("other-name").owned_by == "quire"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("absent")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="absent", messages=MESSAGES)


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert found.value.param == "temperature" or "temperature" in found.value.message
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.completions.create(model=MODEL, prompt="word " * 600, max_tokens=5)


def test_error_within_a_stream_is_raised(server: RunningServer, client: openai.OpenAI) -> None:
    server.call(lambda: setattr(server.client, "fail_after", 3))
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=50, stream=True
    )
    with pytest.raises(openai.APIError, match="engine was lost"):
        list(stream)
