"""A slot's state is that of its row alone, whatever was there before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import EngineError, RequestError
from quire.compute.sampling import SamplingState
from quire.protocol import SamplingParams
from tests.profiles import examples

SLOTS, V = 5, 32

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(top_k=4, top_p=0.5, min_p=0.1),
    SamplingParams(allowed_token_ids=[1, 2], logit_bias={3: 1.0}, presence_penalty=1.0),
    SamplingParams(min_tokens=3, bad_words_token_ids=[[1, 2]], repetition_penalty=1.2),
)


def contents(state: SamplingState, slot: int) -> tuple[object, ...]:
    return (*(column[slot] for column in state._columns()), repr(state.edits.get(slot)))


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "fork", "leave"]),
            st.integers(0, SLOTS - 1),
            st.integers(0, SLOTS - 1),
            st.sampled_from(PARAMS),
            st.integers(0, 2**64 - 1),
        ),
        max_size=30,
    )
)
def test_any_history_equals_a_fresh_state(operations):
    """Catches a mask, penalty or seed that stays behind in a slot for the next request."""
    state = SamplingState(SLOTS, V)
    live: dict[int, tuple[SamplingParams, int, int]] = {}
    for index, (what, slot, src, params, seed) in enumerate(operations):
        if what == "enter" and slot not in live:
            state.enter(slot, params, seed, 0, [7])
            live[slot] = (params, seed, 0)
        elif what == "fork" and slot not in live and src in live:
            state.fork(src, slot, index)
            live[slot] = (*live[src][:2], index)
        elif what == "leave":
            state.leave(slot)
            live.pop(slot, None)
    for slot in range(SLOTS):
        fresh = SamplingState(SLOTS, V)
        if slot in live:
            params, seed, sample_index = live[slot]
            fresh.enter(slot, params, seed, sample_index, [7])
        assert contents(state, slot) == contents(fresh, slot)


def test_a_taken_slot_is_refused():
    """Catches two rows that share a slot unnoticed."""
    state = SamplingState(2, V)
    state.enter(0, SamplingParams(), 1, 0)
    with pytest.raises(EngineError, match="slot 0 is taken"):
        state.enter(0, SamplingParams(), 1, 0)
    with pytest.raises(EngineError, match="0 is taken"):
        state.fork(0, 0, 1)
    with pytest.raises(EngineError, match="1 is empty"):
        state.leave(0)
        state.fork(1, 0, 1)


def test_ids_outside_the_vocabulary_change_nothing():
    """Catches an index error in the middle of a step, or a negative id that wraps around."""
    state = SamplingState(1, V)
    with pytest.raises(RequestError, match=f"token id {V}"):
        state.enter(0, SamplingParams(allowed_token_ids=[V]), 1, 0)
    assert not state.occupied.any()
    state.enter(0, SamplingParams(min_tokens=2), 1, 0, [V + 3])
    assert not state.edited[0]


def test_extreme_temperatures_are_kept_workable():
    """Catches an inverse temperature of 0, which makes a ban (-inf) into NaN."""
    state = SamplingState(1, V)
    state.enter(0, SamplingParams(temperature=1e300), 1, 0)
    assert np.float32(1 / state.temperature[0]) > 0
