"""Prompts that arrive in pieces, on the real engine."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from quire import LLM, SamplingParams, SchedulingParams
from quire.base.errors import RequestError
from quire.engine.clients.prompt_stream import PromptStream
from quire.protocol import EngineRequest, StepPlan, StepResult
from quire.protocol.control import ExtendPrompt
from tests.pairs import BY_PAIRS
from tests.profiles import seeds

TEXT = "The capital of France is Paris, and the capital of Portugal is Lisbon; that of Italy is"
IDS = [5 + 7 * i % 400 for i in range(60)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        quiet=True, num_kv_blocks=40, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=16,
        dtype="float32", depth=request.param,
    ) as engine:  # fmt: skip
        yield engine
        assert engine.engine.client.stats().num_used_blocks == 0


@BY_PAIRS
@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("whole", [TEXT, IDS], ids=["text", "ids"])
def test_pieces_are_the_whole(llm: LLM, whole: str | list[int], seed: int) -> None:
    """Cut at random places, in the middle of words too; others run in between."""
    prompt = whole if isinstance(whole, str) else {"prompt_token_ids": whole}
    (expected,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(whole)) for _ in range(4))
    with llm.open_prompt(PARAMS) as stream:
        for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
            stream.append(whole[start:end])
            if rng.random() < 0.3:
                llm.generate("In between", SamplingParams(max_tokens=3), use_tqdm=False)
        output = stream.finish(whole[cuts[-1] :])
    assert output.outputs == expected.outputs
    assert output.prompt_token_ids == expected.prompt_token_ids


def test_pieces_are_computed_as_they_arrive(llm: LLM) -> None:
    """The first token after the end of a long prompt needs one short step."""
    with llm.open_prompt(SamplingParams(max_tokens=1), max_prompt_tokens=61) as stream:
        stream.append(IDS)
        steps = llm.engine.client.stats().steps_total
        stream.finish([9])
    assert llm.engine.client.stats().steps_total - steps <= 2


def test_a_text_whose_tokens_change_starts_again(llm: LLM) -> None:
    """One word of forty letters may be other tokens than its beginning was."""
    word = "internationalisation" * 3
    (expected,) = llm.generate(word, PARAMS, use_tqdm=False)
    with llm.open_prompt(PARAMS) as stream:
        for letter in word:
            stream.append(letter)
        assert stream.finish().outputs == expected.outputs


def test_an_idle_prompt_does_not_keep_others_waiting(llm: LLM) -> None:
    """It holds most of the cache, and its client says nothing."""
    with llm.open_prompt(PARAMS) as stream:
        stream.append([11 + i % 50 for i in range(110)])
        prompts = [{"prompt_token_ids": [3 + i] * 100} for i in range(8)]
        others = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert all(each.error is None for each in others)
        output = stream.finish([4])
    whole = {"prompt_token_ids": [*(11 + i % 50 for i in range(110)), 4]}
    assert output.outputs == llm.generate(whole, PARAMS, use_tqdm=False)[0].outputs


@pytest.mark.parametrize("piece", [5, None])
def test_a_piece_is_text_or_token_ids(llm: LLM, piece: object) -> None:
    for give in (PromptStream.append, PromptStream.finish):
        with (
            llm.open_prompt(PARAMS) as stream,
            pytest.raises(RequestError, match=f"a piece is {piece}: give text"),
        ):
            give(stream, piece)  # pyright: ignore[reportArgumentType]


def test_it_is_served_as_its_client_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when an open prompt loses its priority on the way to the scheduler."""
    asked = SchedulingParams(priority=-3)
    added: list[EngineRequest] = []
    with LLM(quiet=True, num_kv_blocks=40, scheduling_policy="priority") as llm:
        add = llm.engine.client.add

        def note(request: EngineRequest) -> None:
            added.append(request)
            add(request)

        monkeypatch.setattr(llm.engine.client, "add", note)
        with llm.open_prompt(PARAMS, scheduling_params=asked) as stream:
            stream.append(IDS)
            stream.finish()
        with llm.open_prompt(PARAMS) as stream:
            stream.finish(IDS)
    assert [request.scheduling for request in added] == [asked, SchedulingParams()]


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_as_a_request_is_queued_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: it comes when the engine has the request and the caller no handle of it."""
    client = llm.engine.client
    add = client._core.add

    def interrupted_add(request: EngineRequest) -> None:
        add(request)
        signal.raise_signal(signal.SIGINT)

    def num_requests() -> int:
        stats = client.stats()
        return stats.num_running + stats.num_waiting

    monkeypatch.setattr(client._core, "add", interrupted_add)
    with pytest.raises(KeyboardInterrupt), llm.open_prompt(PARAMS) as stream:
        stream.append(IDS)
    assert num_requests() == 0
    with pytest.raises(KeyboardInterrupt), llm.open_prompt(PARAMS) as stream:
        stream.finish(TEXT)
    assert num_requests() == 0
    with pytest.raises(KeyboardInterrupt):
        next(llm.stream(TEXT, PARAMS))
    assert num_requests() == 0
    with pytest.raises(KeyboardInterrupt):
        llm.enqueue(TEXT, PARAMS)
    assert num_requests() == 0
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_mistakes(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n=1"):
        llm.open_prompt(SamplingParams(n=2))
    with llm.open_prompt(PARAMS) as stream:
        stream.append("some text")
        with pytest.raises(RequestError, match="are text: give text"):
            stream.append([3])
        with pytest.raises(RequestError, match="has ended"):
            stream.append("more")
    with llm.open_prompt(PARAMS, max_prompt_tokens=20) as stream:
        stream.append(IDS[:20])
        with pytest.raises(RequestError, match="21 tokens, but may have 20"):
            stream.append([3])
    with llm.open_prompt(PARAMS) as stream, pytest.raises(RequestError, match="no tokens"):
        stream.finish()
    llm.generate("Others go on", PARAMS, use_tqdm=False)


def test_a_prompt_that_was_ended_takes_no_more(llm: LLM) -> None:
    """Fault: pieces for a request that is gone are swallowed, and the answer has no tokens."""
    client = llm.engine.client
    with llm.open_prompt(PARAMS) as stream:
        stream.append(IDS[:30])
        client.abort([stream.handle])
        with pytest.raises(RequestError, match="ended before its prompt did"):
            stream.append(IDS[30:])
    with llm.open_prompt(PARAMS) as stream:
        stream.append(IDS[:30])
        client.abort([stream.handle])
        with pytest.raises(RequestError, match="ended before its prompt did"):
            stream.finish()
    nothing = np.zeros(0, np.int32)
    assert not client.control(ExtendPrompt(10**6, nothing, is_last=False)).was_there


def test_a_prompt_awaits_its_rest_until_it_is_finished(llm: LLM) -> None:
    client, nothing = llm.engine.client, np.zeros(0, np.int32)
    with llm.open_prompt(PARAMS) as stream:
        more = ExtendPrompt(stream.handle, nothing, is_last=False)
        assert not client.control(more).was_there  # nothing was given to the engine yet
        stream.append(IDS)
        assert client.control(more).was_there
        stream.finish()
        assert not client.control(more).was_there
        with pytest.raises(RequestError, match="this prompt has ended"):
            stream.append(IDS)


def lost_step(plan: StepPlan) -> Future[StepResult]:
    future: Future[StepResult] = Future()
    future.set_exception(RuntimeError("the device was lost"))
    return future


def test_a_failure_while_a_piece_is_computed_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = llm.engine.client._core._executor
    with llm.open_prompt(PARAMS) as stream:
        stream.append(IDS[:30])
        with monkeypatch.context() as patch:
            patch.setattr(executor, "execute", lost_step)
            with pytest.raises(RequestError, match="the device was lost"):
                stream.append(IDS[30:])


def test_parameters_of_a_wrong_kind_are_refused_at_once(llm: LLM) -> None:
    """Turns red when a dict is found out only deep in the engine."""
    wrong: dict[str, Any] = {"priority": 1}
    with pytest.raises(RequestError, match="give SchedulingParams objects"):
        llm.open_prompt(PARAMS, scheduling_params=cast("SchedulingParams", wrong))
    with pytest.raises(RequestError, match="give SamplingParams"):
        llm.open_prompt(cast("SamplingParams", wrong))
    with pytest.raises(RequestError, match="give SchedulingParams objects"):
        next(llm.stream("a", PARAMS, scheduling_params=cast("SchedulingParams", wrong)))
    with pytest.raises(RequestError, match="give SamplingParams"):
        next(llm.stream("a", cast("SamplingParams", wrong)))
