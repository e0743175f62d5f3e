"""The laws of the design over the fake model: any wrong block becomes a wrong token."""

from __future__ import annotations

import pytest

from quire.protocol import FinishReason
from tests.engine.fake_engine import FakeEngine
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
WINDOWS = pytest.mark.parametrize("windows", [(None,), (6,), (None, 5, None, 5)])


@DEPTHS
@WINDOWS
def test_batched_is_alone(depth, windows):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=200)
    prompts = [[i, i + 1, *range(i * 3)] for i in range(1, 9)]
    handles = [engine.add(prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    engine.run()
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 8, i)
        assert engine.finished[handle].reason is FinishReason.LENGTH


@DEPTHS
@WINDOWS
@pytest.mark.parametrize("budget", [8, 9, 13])
def test_chunked_is_whole(depth, windows, budget):
    engine = FakeEngine(depth=depth, windows=windows, max_num_batched_tokens=budget, num_blocks=200)
    prompts = [list(range(50)), list(range(7, 44)), [3]]
    handles = [engine.add(prompt)[0] for prompt in prompts]
    engine.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 8, 0)


@DEPTHS
@WINDOWS
def test_prefix_hit_is_cold(depth, windows):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=200)
    shared = list(range(30))
    for suffix in ([1], [2, 3], [1]):
        (handle,) = engine.add([*shared, *suffix])
        engine.run()
        assert engine.tokens[handle] == engine.model.expected_tokens([*shared, *suffix], 8, 0)
    assert engine.num_cached == {0: 0, 1: 28, 2: 28}


@DEPTHS
@WINDOWS
def test_prefix_is_shared_within_one_plan(depth, windows):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=200, max_num_batched_tokens=64)
    prompt = list(range(20))
    handles = [engine.add([*prompt, i])[0] for i in range(4)]
    engine.run()
    for i, handle in enumerate(handles):
        assert engine.tokens[handle] == engine.model.expected_tokens([*prompt, i], 8, 0)
    assert [engine.num_cached[handle] for handle in handles] == [0, 20, 20, 20]


def test_salt_separates_tenants():
    engine = FakeEngine()
    prompt = list(range(20))
    for salt in ("a", "b", "a"):
        engine.add(prompt, salt=salt)
        engine.run()
    assert engine.num_cached == {0: 0, 1: 0, 2: 16}


@DEPTHS
@WINDOWS
def test_preempted_is_not(depth, windows):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=16 * len(set(windows)) * 2)
    prompts = [[i] * 10 for i in range(8)]
    handles = [engine.add(prompt, max_tokens=40, seed=i)[0] for i, prompt in enumerate(prompts)]
    engine.run()
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 40, i)
    if None in windows:
        assert engine.core.stats().preempted_total > 0


@DEPTHS
@WINDOWS
@pytest.mark.parametrize("prompt_len", [1, 8, 11])
def test_forked_is_copied(depth, windows, prompt_len):
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=400)
    prompt = list(range(prompt_len))
    handles = engine.add(prompt, n=6, seed=5)
    engine.run()
    for sample, handle in enumerate(handles):
        assert engine.tokens[handle] == engine.model.expected_tokens(prompt, 8, 5, sample)
    assert len({tuple(engine.tokens[handle]) for handle in handles}) == 6


def test_n_samples_need_one_prefill_and_share_its_blocks():
    engine = FakeEngine(num_blocks=64, block_size=4, depth=1)
    engine.add(list(range(10)), n=4, max_tokens=2)
    engine.step()
    assert engine.core.stats().num_used_blocks == 3
    engine.step()  # three samples copy the partly filled block, the last one writes in place
    engine.run()
    assert engine.core.stats().steps_total == 2


@DEPTHS
def test_more_samples_than_fit_run_as_independent_sequences(depth):
    engine = FakeEngine(depth=depth, num_blocks=16, max_num_seqs=4)
    handles = engine.add(list(range(9)), n=9, max_tokens=20)
    engine.run()
    for sample, handle in enumerate(handles):
        expected = engine.model.expected_tokens(list(range(9)), 20, 0, sample)
        assert engine.tokens[handle] == expected


@DEPTHS
def test_resumed_is_uninterrupted(depth):
    prompt = list(range(11))
    whole = FakeEngine().model.expected_tokens(prompt, 12, 3)
    for cut in range(12):
        engine = FakeEngine(depth=depth)
        (handle,) = engine.add(prompt, max_tokens=12, seed=3, output=whole[:cut])
        engine.run()
        assert engine.tokens[handle] == whole


@DEPTHS
def test_stop_token_ends_a_sequence_although_the_next_step_was_planned(depth):
    expected = FakeEngine().model.expected_tokens([1, 2, 3], 20, 0)
    engine = FakeEngine(depth=depth)
    (handle,) = engine.add([1, 2, 3], max_tokens=20, stop=frozenset({expected[6], 5000}))
    engine.run()
    cut = expected.index(expected[6]) + 1
    assert engine.tokens[handle] == expected[:cut]
    assert engine.finished[handle].reason is FinishReason.STOP
    assert engine.finished[handle].stop_token_id == expected[6]


@DEPTHS
def test_a_failed_row_fails_its_request_and_nobody_elses(depth):
    engine = FakeEngine(depth=depth, poison=999, num_blocks=200, max_num_batched_tokens=16)
    shared = list(range(24))
    (bad,) = engine.add([*shared, 999, 1, 2])
    (good,) = engine.add([7, 8, 9])
    (reader,) = engine.add([*shared, 999, 3])  # reads blocks that the failing row publishes
    (sibling,) = engine.add([*shared, 5])
    engine.run()
    assert engine.finished[bad].reason is FinishReason.ERROR
    assert "999" in engine.finished[bad].message
    assert engine.finished[reader].reason is FinishReason.ERROR
    assert engine.tokens[good] == engine.model.expected_tokens([7, 8, 9], 8, 0)
    assert engine.tokens[sibling] == engine.model.expected_tokens([*shared, 5], 8, 0)


@DEPTHS
def test_readers_of_a_failed_rows_blocks_are_computed_again(depth):
    # The poison sits in the last chunk together with good tokens of a full block. They were
    # published when the chunk was planned, and hold garbage once the chunk has failed.
    engine = FakeEngine(depth=depth, poison=999, num_blocks=200, max_num_batched_tokens=64)
    shared = list(range(24))
    (bad,) = engine.add([*shared, 999])
    (reader,) = engine.add([*shared, 5])
    engine.run()
    assert engine.finished[bad].reason is FinishReason.ERROR
    assert engine.tokens[reader] == engine.model.expected_tokens([*shared, 5], 8, 0)


@DEPTHS
@pytest.mark.parametrize("steps", range(8))
def test_abort_in_every_state_leaves_nothing_behind(depth, steps):
    engine = FakeEngine(depth=depth, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=8)
    handles = [h for i in range(4) for h in engine.add([i] * 10, n=2, max_tokens=12)]
    for _ in range(steps):
        engine.step()
    engine.core.abort(handles)
    engine.core.abort(handles)
    engine.run()
    assert engine.finished.keys() == set(handles)
    assert engine.core.stats().num_used_blocks == 0


@DEPTHS
def test_abort_of_the_first_sample_keeps_the_others(depth):
    engine = FakeEngine(depth=depth, num_blocks=200, max_num_batched_tokens=8)
    handles = engine.add(list(range(30)), n=3, seed=2)
    engine.step()
    engine.core.abort(handles[:1])
    engine.run()
    assert engine.finished[handles[0]].reason is FinishReason.ABORT
    for sample in (1, 2):
        expected = engine.model.expected_tokens(list(range(30)), 8, 2, sample)
        assert engine.tokens[handles[sample]] == expected
