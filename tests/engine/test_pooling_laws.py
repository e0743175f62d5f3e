"""Vectors of prompts over the fake model: equal to those computed from the tokens alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.compute.runner.pooling import PoolPiece, VectorPools
from quire.config.kv_layout import KVFormat, KVLayout
from quire.engine.core.client_table import split_by_client
from quire.protocol import FinishReason, SamplingParams
from quire.protocol.messages import HANDLES_PER_CLIENT
from quire.protocol.request import EngineOutput, EngineRequest
from quire.protocol.step import EMPTY_INTS
from tests.engine.fake_engine import FakeEngine
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
POOLINGS = pytest.mark.parametrize("pooling", ["last", "cls", "mean"])
WINDOWS = pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)])
PROMPTS = [list(range(50)), [3], list(range(7, 44)), list(range(20)), list(range(21))]


def assert_vectors(engine: FakeEngine, handles: list[int], prompts: list[list[int]], pooling):
    for handle, prompt in zip(handles, prompts, strict=True):
        np.testing.assert_array_equal(
            engine.vectors[handle], engine.model.expected_vector(prompt, pooling)
        )
        assert engine.tokens[handle] == []
        assert engine.finished[handle].reason is FinishReason.STOP


@DEPTHS
@POOLINGS
@WINDOWS
@pytest.mark.parametrize("budget", [8, 13, 200])
def test_vectors_do_not_depend_on_chunks_or_the_batch(depth, pooling, windows, budget) -> None:
    """Fault: a sum that starts anew with each chunk, or rounds otherwise; a row that draws."""
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=200, max_num_batched_tokens=budget)
    handles = [engine.add(prompt, pooling=pooling)[0] for prompt in PROMPTS]
    drawing = [engine.add(prompt, seed=7)[0] for prompt in PROMPTS]
    engine.run()
    assert_vectors(engine, handles, PROMPTS, pooling)
    for handle, prompt in zip(drawing, PROMPTS, strict=True):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 8, 7)


@DEPTHS
@POOLINGS
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_preempted_prompt_gives_the_same_vector(depth, pooling, num_host_blocks) -> None:
    """Fault: a sum whose first part is lost with the slot, or that counts tokens twice."""
    engine = FakeEngine(
        depth=depth,
        num_blocks=32,
        max_num_batched_tokens=12,
        num_host_blocks=num_host_blocks,
    )
    prompts = [[i + 1] * 40 for i in range(6)]
    handles, drawing = [], []
    for i, prompt in enumerate(prompts):
        drawing.append(engine.add([i, *range(10)], max_tokens=40, seed=i)[0])
        handles.append(engine.add(prompt, pooling=pooling)[0])
    engine.run()
    assert_vectors(engine, handles, prompts, pooling)
    for i, handle in enumerate(drawing):
        assert engine.tokens[handle] == engine.model.expected_tokens([i, *range(10)], 40, i)
    assert engine.core.stats().preempted_total > 0


@DEPTHS
def test_only_the_last_token_may_follow_a_cached_prefix(depth) -> None:
    """Fault: a mean over the tokens that the cache did not have."""
    engine = FakeEngine(depth=depth, num_blocks=200)
    prompt = list(range(30))
    for pooling, num_cached in (("mean", 0), ("last", 28), ("cls", 0), ("mean", 0), ("last", 28)):
        (handle,) = engine.add(prompt, pooling=pooling)
        engine.run()
        assert_vectors(engine, [handle], [prompt], pooling)
        assert engine.num_cached[handle] == num_cached
    (handle,) = engine.add([*prompt, 1, 2])  # what pools publishes its blocks like others
    engine.run()
    assert engine.num_cached[handle] == 28


@DEPTHS
@POOLINGS
def test_a_step_that_is_computed_twice_counts_once(depth, pooling) -> None:
    engine = FakeEngine(depth=depth, num_blocks=200, max_num_batched_tokens=9, breaks=True)
    handles = [engine.add(prompt, pooling=pooling)[0] for prompt in PROMPTS]
    engine.run()
    assert_vectors(engine, handles, PROMPTS, pooling)


@DEPTHS
@POOLINGS
def test_recurrent_states_are_pooled_too(depth, pooling) -> None:
    layout = KVLayout.of_windows((None,), 4, KVFormat(1, 1, 1, 4))
    engine = FakeEngine(
        depth=depth,
        layout=replace(layout, state_bytes=8),
        num_blocks=200,
        max_num_batched_tokens=9,
        num_checkpoints=8,
    )
    handles = [engine.add(prompt, pooling=pooling)[0] for prompt in PROMPTS]
    engine.run()
    handles += [engine.add(prompt, pooling=pooling)[0] for prompt in PROMPTS]
    engine.run()
    assert_vectors(engine, handles, PROMPTS * 2, pooling)


@DEPTHS
@POOLINGS
def test_a_row_that_fails_gives_no_vector(depth, pooling) -> None:
    engine = FakeEngine(depth=depth, poison=999, num_blocks=200, max_num_batched_tokens=8)
    prompts = [[*range(12), 999, 1, 2], [*range(12), 5, 6, 7], [9] * 30]
    handles = [engine.add(prompt, pooling=pooling)[0] for prompt in prompts]
    engine.run()
    assert engine.finished[handles[0]].reason is FinishReason.ERROR
    assert handles[0] not in engine.vectors
    assert_vectors(engine, handles[1:], prompts[1:], pooling)


@DEPTHS
@POOLINGS
@pytest.mark.parametrize("steps", range(5))
def test_abort_leaves_nothing_behind(depth, pooling, steps) -> None:
    engine = FakeEngine(depth=depth, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=8)
    handles = [engine.add([i] * 20, pooling=pooling)[0] for i in range(4)]
    for _ in range(steps):
        engine.step()
    engine.core.abort(handles)
    engine.run()
    assert engine.finished.keys() == set(handles)
    (handle,) = engine.add([8] * 20, pooling=pooling)  # in a slot of one that was aborted
    engine.run()
    assert_vectors(engine, [handle], [[8] * 20], pooling)
    assert engine.core.stats().num_used_blocks == 0


def test_a_prompt_may_fill_the_context() -> None:
    """Fault: room for a token that is never drawn."""
    engine = FakeEngine(num_blocks=16, max_model_len=64)
    prompt = list(range(64))
    (handle,) = engine.add(prompt, pooling="mean")
    engine.run()
    assert_vectors(engine, [handle], [prompt], "mean")
    with pytest.raises(RequestError, match="65 tokens, but the context holds 64"):
        engine.add([*prompt, 1], pooling="last")
    with pytest.raises(RequestError, match="all 15 blocks"):
        FakeEngine(num_blocks=15, max_model_len=64).add(prompt, pooling="last")


@pytest.mark.parametrize(
    "change",
    [
        {"params": SamplingParams(n=2, max_tokens=1, temperature=0.0)},
        {"params": SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)},
        {"output_token_ids": np.array([1], np.int32)},
        {"is_open": True},
        {"pin_seconds": 1.0},
    ],
)
def test_what_has_to_do_with_tokens_is_refused(change) -> None:
    engine = FakeEngine()
    good = EngineRequest("1", 5, np.array([1, 2], np.int32), SamplingParams(), 0, pooling="last")
    with pytest.raises(RequestError, match="draws no tokens"):
        engine.core.add(replace(good, **change))
    with pytest.raises(RequestError, match="sampling parameters"):
        engine.core.add(good)


def test_vectors_go_to_their_clients() -> None:
    vectors = {h: np.array([h], np.float32) for h in (3, HANDLES_PER_CLIENT + 1)}
    output = EngineOutput(np.zeros(0, np.int64), EMPTY_INTS, vectors=vectors)
    parts = split_by_client(output)
    assert {client: list(part.vectors) for client, part in parts.items()} == {
        0: [3],
        1: [HANDLES_PER_CLIENT + 1],
    }


@pytest.mark.parametrize("shape", [(1, 8), (70, 384), (2000, 5), (3, 4096)])
def test_a_mean_is_summed_in_the_order_of_tokens(shape: tuple[int, int]) -> None:
    """Fault: an array library sums in another order, which depends on how the prompt was cut."""
    hidden = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    total = np.zeros(shape[1], np.float64)
    for state in hidden:
        total += state
    for cut in {shape[0], 1, shape[0] // 3 or 1}:
        pools, ends = VectorPools(), [*range(cut, shape[0], cut), shape[0]]
        found = None
        for start, end in zip([0, *ends], ends, strict=False):
            piece = PoolPiece(0, "mean", start, end, 0, end == shape[0])
            found = pools.take(piece, hidden[start:end])
        assert found is not None
        np.testing.assert_array_equal(found, (total / shape[0]).astype(np.float32))
