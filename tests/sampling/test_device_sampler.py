"""The sampler of devices draws the host sampler's tokens; here with the reference, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import EngineError
from quire.compute.sampling import (
    NO_TOKEN,
    DeviceColumns,
    DeviceSampler,
    SamplingState,
    failures_of,
)
from quire.ops import ALL_OPS
from quire.protocol import SamplingParams
from tests.profiles import examples
from tests.sampling.rows import Tokens, sampler
from tests.sampling.test_sampler_law import filter_params, some_logits

CPU = torch.device("cpu")


def make_state(many: Sequence[SamplingParams], vocab_size: int, num_slots: int) -> SamplingState:
    """Row i is in slot num_slots - 1 - i."""
    state = SamplingState(num_slots, vocab_size)
    for index, params in enumerate(many):
        state.enter(num_slots - 1 - index, params, seed=(index - 2) * 2**62 + 7, sample_index=index)
    return state


def device_sampler(state: SamplingState) -> DeviceSampler:
    return DeviceSampler(state, DeviceColumns.of_state(state, CPU), ALL_OPS["draw"].reference)


@examples(80)
@given(
    st.lists(filter_params(), min_size=1, max_size=6),
    st.integers(0, 2**20),
    st.sampled_from([3, 90, 4096]),
    st.sampled_from([0.0, 1.0, 6.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_tokens_are_those_of_the_host(many, position, vocab_size, scale, dtype):
    """Turns red when a column is staged in the wrong place or read as another type."""
    state = make_state(many, vocab_size, len(many) + 2)
    slots = np.arange(len(many) + 1, 1, -1)
    positions = position + np.arange(len(many))
    rows = np.stack([some_logits(vocab_size, position + i, scale) for i in range(len(many))])
    logits = torch.from_numpy(rows).to(dtype)
    expected = sampler(state).sample(logits, slots, positions, Tokens())
    device = device_sampler(state)
    got = device.sample(logits, torch.from_numpy(slots), torch.from_numpy(positions))
    assert device.is_graphable(slots)
    assert got.token_ids.dtype == torch.int32
    assert got.token_ids.tolist() == expected.token_ids.tolist()


def test_slots_may_share_a_row_of_logits():
    """Turns red when forked rows draw alike, or from other logits than their source's."""
    state = make_state([SamplingParams(seed=1)], 300, 4)
    for dst in range(3):
        state.fork(3, dst, dst + 1)
    logits = torch.from_numpy(np.stack([some_logits(300, 1), some_logits(300, 2)]))
    slots, rows = np.array([3, 0, 1, 2]), torch.tensor([1, 1, 1, 0])
    expected = sampler(state).sample(logits[rows], slots, [5] * 4, Tokens())
    got = device_sampler(state).sample(logits, torch.from_numpy(slots), torch.full((4,), 5), rows)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert len(set(got.token_ids.tolist())) > 1


def test_rows_that_are_no_numbers_fail_alone():
    """Turns red when a broken row gets a token, or takes its neighbour's."""
    state = make_state([SamplingParams(), SamplingParams(temperature=0), SamplingParams()], 20, 3)
    logits = torch.from_numpy(np.stack([some_logits(20, i) for i in range(3)]))
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    slots, positions = np.array([2, 1, 0]), np.array([4, 5, 6])
    device = device_sampler(state)
    got = device.sample(logits, torch.from_numpy(slots), torch.from_numpy(positions))
    expected = sampler(state).sample(logits, slots, positions, Tokens())
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.token_ids.tolist()[:2] == [NO_TOKEN, NO_TOKEN]
    failures = failures_of(got.token_ids.numpy(), slots, positions)
    assert [failure.slot for failure in failures] == [2, 1]
    assert "position 4 are not finite" in failures[0].message


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logprobs=0), SamplingParams(min_tokens=2), SamplingParams(logit_bias={1: 2})],
)
def test_rows_that_ask_for_more_are_told(params):
    """Turns red when a graph would be replayed for rows that it does not serve."""
    state = SamplingState(3, 9)
    state.enter(0, SamplingParams(), 0, 0)
    state.enter(1, params, 0, 0, stop_token_ids=[3])
    state.enter(2, SamplingParams(), 0, 0, num_candidates=2)
    device = device_sampler(state)
    assert device.is_graphable(np.array([0]))
    assert not device.is_graphable(np.array([0, 1]))
    assert not device.is_graphable(np.array([2]))


def test_columns_are_views_of_the_words_that_are_staged():
    """Turns red when a runner's (word, value) pairs do not reach the columns."""
    state = make_state([SamplingParams(temperature=0.5, top_k=4, top_p=0.25, min_p=0.125)], 9, 3)
    arena = torch.zeros(6 + DeviceColumns.num_words(3), dtype=torch.int32)
    columns = DeviceColumns.over(arena[6:])
    indices, values = DeviceColumns.updates(state, 2)
    arena[6 + torch.from_numpy(indices)] = torch.from_numpy(values)
    assert columns.temperature.tolist() == [0.0, 0.0, 0.5]
    assert (columns.top_p[2], columns.min_p[2]) == (0.25, 0.125)
    assert columns.top_k.tolist() == [0, 0, 4]
    assert int(columns.seed[2]) % 2**64 == int(state.seed[2])
    with pytest.raises(EngineError, match="12 for each slot"):
        DeviceColumns.over(arena[1:])
