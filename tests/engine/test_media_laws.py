"""The laws over the fake model, where parts of prompts come as media: words that no token id
could be. Any media that miss, or are another row's, become wrong tokens."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import EngineError, RequestError
from quire.compute.runner.rows import RowTable, ScheduledRows
from quire.protocol import EngineRequest, FinishReason, SamplingParams
from quire.protocol.media import Media
from quire.protocol.step import MediaSpan
from tests.engine.fake_engine import FakeEngine
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
WINDOWS = pytest.mark.parametrize("windows", [(None,), (6,), (None, 5, None, 5)])

WORD = 2**40
"""The first word that is no token id."""


def image(number: int, length: int) -> list[int]:
    return [WORD + 1000 * number + i for i in range(length)]


def mixed(number: int) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt of text and media, and where these are."""
    text = [number, 7, 8]
    first, second = image(number, 3 + number), image(2 * number, 5)
    prompt = [*text, *first, 9, *second, *text[: number % 3]]
    start = len(text) + len(first) + 1
    return prompt, [(3, 3 + len(first)), (start, start + len(second))]


@DEPTHS
@WINDOWS
@pytest.mark.parametrize("budget", [5, 9, 64])
def test_batched_and_chunked_is_alone_and_whole(depth, windows, budget):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=300, max_num_batched_tokens=budget)
    prompts = [mixed(i) for i in range(1, 8)]
    handles = [engine.add(p, given=g, seed=i)[0] for i, (p, g) in enumerate(prompts)]
    plain = engine.add([1, 2, 3])[0]
    engine.run()
    for i, (handle, (prompt, _)) in enumerate(zip(handles, prompts, strict=True)):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 8, i)
    assert engine.tokens[plain] == engine.model.expected_tokens([1, 2, 3], 8, 0)


@DEPTHS
def test_media_of_what_token_ids_say_are_token_ids(depth):
    prompt = list(range(2, 25))
    engine = FakeEngine(depth=depth)
    tokens = engine.add(prompt)[0]
    words = engine.add(prompt, given=[(0, len(prompt))])[0]
    engine.run()
    assert engine.tokens[tokens] == engine.tokens[words]
    assert engine.num_cached[words] == 0, "they are another content, whatever they compute"


@DEPTHS
@WINDOWS
@pytest.mark.parametrize(("budget", "threshold"), [(18, None), (21, 13), (64, 11)])
def test_media_that_are_whole_are_never_cut(depth, windows, budget, threshold):
    """In any batch; the fake model raises at a cut. The smallest budget is the longest span, of 11,
    and a token for each other sequence."""
    engine = FakeEngine(
        depth=depth,
        windows=windows,
        num_blocks=300,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    prompts = [mixed(i) for i in range(1, 9)] * 2
    handles: list[int] = []
    for i, (prompt, given) in enumerate(prompts):
        handles += engine.add(prompt, given=given, seed=i, is_whole=True)
        handles += engine.add([1, 2, 3] * (1 + i % 4), seed=i)
        engine.step()
    engine.run()
    for i, (prompt, _) in enumerate(prompts):
        image_handle, text_handle = handles[2 * i : 2 * i + 2]
        assert engine.tokens[image_handle] == engine.model.expected_tokens(prompt, 8, i)
        text = [1, 2, 3] * (1 + i % 4)
        assert engine.tokens[text_handle] == engine.model.expected_tokens(text, 8, i)


@DEPTHS
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_whole_media_of_preempted_requests_are_not_cut(depth, num_host_blocks):
    engine = FakeEngine(
        depth=depth,
        num_blocks=32,
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=19,
    )
    prompts = [[5, *image(i, 12), 6, *image(i + 9, 7)] for i in range(8)]
    handles = [
        engine.add(p, given=[(1, 13), (14, 21)], max_tokens=30, seed=i, is_whole=True)[0]
        for i, p in enumerate(prompts)
    ]
    engine.run()
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 30, i)
    assert engine.core.stats().preempted_total > 0


def test_whole_media_that_no_step_holds_are_refused():
    """Turns red when such a request waits for ever."""
    engine = FakeEngine(max_num_batched_tokens=18)
    with pytest.raises(RequestError, match=r"12 tokens, which one step must compute.*room for 11"):
        engine.add([1, *image(1, 12)], given=[(1, 13)], is_whole=True)


def test_a_step_that_would_end_within_whole_media_is_a_fault():
    """Turns red when the data side computes tokens that have yet to see the others of an image."""
    table = RowTable(2, 32, [4])
    table.media[0] = (MediaSpan(1, 9, 0, is_whole=True),)
    ones = np.ones(1, np.int64)
    rows = ScheduledRows(0 * ones, 0 * ones, 6 * ones, 0 * ones, ones > 1)
    with pytest.raises(EngineError, match="tokens up to 5 of media up to 9"):
        table.last_keys(rows)
    for computed, count, wanted in (
        (0, 12, [0, *[9] * 9, 10, 11]),
        (4, 7, [*[9] * 6, 10]),
        (10, 2, None),
    ):
        rows = ScheduledRows(0 * ones, computed * ones, count * ones, 0 * ones, ones > 1)
        found = table.last_keys(rows)
        assert (None if found is None else found.tolist()) == wanted


@DEPTHS
@WINDOWS
def test_prefix_hit_is_cold(depth, windows):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=300)
    same, other = image(1, 21), image(2, 21)
    for words in (same, same, other, same):
        (handle,) = engine.add([1, *words, 5], given=[(1, 22)])
        engine.run()
        assert engine.tokens[handle] == engine.model.expected_tokens([1, *words, 5], 8, 0)
    assert list(engine.num_cached.values()) == [0, 20, 0, 20]


@DEPTHS
def test_a_prompt_whose_last_token_alone_is_computed_reads_its_media(depth):
    """A step of one token that samples, as a decode step is."""
    engine = FakeEngine(depth=depth, num_blocks=300)
    words = image(1, 21)
    for _ in range(2):
        (handle,) = engine.add(words, given=[(0, 21)])
        engine.run()
        assert engine.tokens[handle] == engine.model.expected_tokens(words, 8, 0)
    assert engine.num_cached[handle] == 20


@DEPTHS
@WINDOWS
def test_preempted_is_not(depth, windows):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=16 * len(set(windows)) * 2)
    prompts = [image(i, 10) for i in range(8)]
    handles = [
        engine.add(prompt, given=[(0, 10)], max_tokens=40, seed=i)[0]
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 40, i)
    if None in windows:
        assert engine.core.stats().preempted_total > 0


@DEPTHS
def test_forked_is_copied(depth):
    engine = FakeEngine(depth=depth, num_blocks=400, max_num_batched_tokens=8)
    prompt = image(3, 11)
    handles = engine.add(prompt, n=6, seed=5, given=[(0, 11)])
    engine.run()
    for sample, handle in enumerate(handles):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 8, 5, sample)


@DEPTHS
def test_resumed_is_uninterrupted(depth):
    prompt = image(1, 9)
    whole = FakeEngine().model.expected_tokens(prompt, 12, 3)
    for cut in range(12):
        engine = FakeEngine(depth=depth)
        (handle,) = engine.add(prompt, given=[(0, 9)], max_tokens=12, seed=3, output=whole[:cut])
        engine.run()
        assert engine.tokens[handle] == whole


@DEPTHS
@pytest.mark.parametrize("steps", range(6))
def test_media_may_be_dropped_as_soon_as_their_request_ends(depth, steps):
    """Steps in flight may still compute with them."""
    engine = FakeEngine(depth=depth, num_blocks=200, max_num_batched_tokens=6)
    prompt = image(1, 30)
    (handle,) = engine.add(prompt, given=[(0, 30)])
    (other,) = engine.add([4, 5, 6])
    for _ in range(steps):
        engine.step()
    engine.core.abort([handle])
    engine.core.drop_media([0])
    engine.run()
    assert engine.finished[handle].reason is FinishReason.ABORT
    assert engine.tokens[other] == engine.model.expected_tokens([4, 5, 6], 8, 0)
    engine.executor.run_queued()
    assert engine.executor.media == {}


def request(media: tuple[Media, ...], **params: int) -> EngineRequest:
    tokens = np.zeros(10, np.int32)
    return EngineRequest("bad", 5, tokens, SamplingParams(max_tokens=2, **params), 0, media=media)


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 0)],
        [(-1, 3)],
        [(8, 3)],
        [(4, 2), (2, 2)],
        [(2, 3), (4, 2)],
    ],
)
def test_spans_outside_of_the_prompt_or_over_each_other_are_refused(spans):
    engine = FakeEngine()
    media = tuple(Media(b"x", MediaSpan(start, length, 0)) for start, length in spans)
    with pytest.raises(RequestError, match="within the prompt"):
        engine.core.add(request(media))


def test_positions_of_another_length_are_refused():
    span = MediaSpan(2, 3, 0, np.zeros(3, np.int32))
    with pytest.raises(RequestError, match="give none, or 9"):
        FakeEngine().core.add(request((Media(b"x", span),)))


def test_log_probabilities_of_a_prompt_of_media_are_refused():
    with pytest.raises(RequestError, match="prompt_logprobs"):
        FakeEngine().core.add(request((Media(b"x", MediaSpan(2, 3, 0)),), prompt_logprobs=1))


def test_media_that_cannot_be_read_are_refused_and_nothing_else_is_lost():
    engine = FakeEngine()
    (good,) = engine.add([1, 2, 3])
    with pytest.raises(RequestError, match="8 bytes"):
        engine.core.put_media(77, b"123")
    engine.run()
    assert engine.tokens[good] == engine.model.expected_tokens([1, 2, 3], 8, 0)
