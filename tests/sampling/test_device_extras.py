"""Edits and log-probabilities on a device are the host's; here with references, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.sampling import (
    BANNED,
    NO_TOKEN,
    DeviceColumns,
    DeviceExtras,
    DeviceHistory,
    DeviceSampler,
    ExtraSample,
    SamplingState,
)
from quire.compute.sampling.device_edits import DeviceEdits
from quire.compute.sampling.edits import edits_of
from quire.ops import ALL_OPS
from quire.protocol import SamplingParams
from quire.protocol.step import TokenLogprobs
from tests.profiles import examples
from tests.sampling.rows import Tokens, sampler
from tests.sampling.test_sampler_law import filter_params, some_logits

CPU = torch.device("cpu")
Histories = list[tuple[list[int], list[int]]]


def device_extras(state: SamplingState) -> DeviceExtras:
    ops = {name: ALL_OPS[name].reference for name in ("draw", "edit_logits", "token_logprobs")}
    plain = DeviceSampler(state, DeviceColumns.of_state(state, CPU), ops["draw"])
    return DeviceExtras(state, plain, ops["edit_logits"], ops["token_logprobs"], torch.from_numpy)


def device_history(histories: Histories) -> DeviceHistory:
    """Row i in slot i."""
    row_tokens = torch.full((len(histories), 40), -7, dtype=torch.int32)
    for slot, (prompt, output) in enumerate(histories):
        tokens = torch.tensor([*prompt, *output], dtype=torch.int32)
        row_tokens[slot, : len(tokens)] = tokens
    return DeviceHistory(
        row_tokens,
        torch.tensor([len(prompt) for prompt, _ in histories]),
        torch.tensor([len(prompt) + len(output) for prompt, output in histories]),
    )


def test_lists_begin_at_multiples_of_16_bytes() -> None:
    """Turns red when kernels are compiled anew for other numbers of biases and bans."""
    params = SamplingParams(logit_bias={3: 1.0}, bad_words_token_ids=[[1, 2], [4]], min_tokens=2)
    edits = edits_of(params, (7,))
    assert edits is not None
    tensors = DeviceEdits(torch.from_numpy).of([edits, edits, edits])
    assert len(tensors) == 9
    assert [each.storage_offset() * each.itemsize % 16 for each in tensors] == [0] * 9
    assert tensors[2].tolist() == [3, 3, 3]


def logprobs_of(sample: ExtraSample) -> dict[int, TokenLogprobs]:
    if sample.logprobs is None:
        return {}
    values = [tensor.numpy() for tensor in sample.logprobs.tensors]
    return sample.logprobs.by_slot(sample.token_ids.numpy(), values)


@st.composite
def asking_rows(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[int]]:
    """Parameters, prompt and output, of a vocabulary of 30."""
    token = st.integers(0, 29)
    tokens = st.lists(token, min_size=1, max_size=12)
    prompt, output = draw(tokens), draw(st.lists(token, max_size=12))
    words = draw(st.lists(tokens.map(lambda word: word[:3]), max_size=3))
    if output:
        words.append([*output[-draw(st.integers(1, 2)) :], draw(token)])
    params = replace(
        draw(filter_params()),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 0.3, 4.0]))),
        allowed_token_ids=draw(st.one_of(st.none(), st.lists(token, min_size=3, max_size=12))),
        bad_words_token_ids=words,
        min_tokens=draw(st.integers(0, 13)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.6, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -1.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, 2.0])),
        logprobs=draw(st.sampled_from([None, 0, 3, 30])),
    )
    return params, prompt, output


@examples(100)
@given(st.lists(asking_rows(), min_size=1, max_size=5), st.integers(0, 10_000))
def test_tokens_and_logprobs_are_those_of_the_host(many, seed):
    """Turns red when an edit is packed for another row, counted from another history, applied in
    another order, or when log-probabilities are those of edited logits."""
    state = SamplingState(len(many), 30)
    for slot, (params, _, _) in enumerate(many):
        state.enter(slot, replace(params, max_tokens=50), seed + slot, slot, stop_token_ids=[2, 9])
    histories = [(prompt, output) for _, prompt, output in many]
    slots = np.random.default_rng(seed).permutation(len(many))
    positions = np.array([sum(map(len, histories[slot])) for slot in slots])
    logits = torch.from_numpy(np.stack([some_logits(30, seed % 99 + i) for i in range(len(many))]))
    host = sampler(state).sample(logits, slots, positions, Tokens(dict(enumerate(histories))))
    extras = device_extras(state)
    assert extras.serves(slots).all()
    got = extras.sample(
        logits,
        slots,
        torch.from_numpy(slots),
        torch.from_numpy(positions),
        device_history(histories),
    )
    token_ids = got.token_ids.numpy()
    assert token_ids.clip(NO_TOKEN).tolist() == host.token_ids.tolist()
    failures = extras.failures(token_ids, slots, positions)
    for mine, theirs in zip(failures, host.failed, strict=True):
        assert (mine.slot, mine.is_request_fault) == (theirs.slot, theirs.is_request_fault)
    found = logprobs_of(got)
    assert found.keys() == host.logprobs.keys()
    for slot, mine in found.items():
        theirs = host.logprobs[slot]
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert mine.top_ids.tolist() == theirs.top_ids.tolist()
        assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-5)


def test_rows_that_the_host_must_draw_for():
    """Turns red when a Python function would be left out, or a table be too wide."""
    state = SamplingState(6, 30)
    state.enter(5, SamplingParams(dry_multiplier=0.8), 0, 0)
    state.enter(0, SamplingParams(logits_processors=[lambda _, row: row]), 0, 0)
    state.enter(4, SamplingParams(xtc_probability=0.1), 0, 0)
    state.enter(1, SamplingParams(logprobs=-1), 0, 0)
    state.enter(2, SamplingParams(), 0, 0, num_candidates=3)
    state.enter(3, SamplingParams(logprobs=5, presence_penalty=1.0), 0, 0)
    served = device_extras(state).serves(np.arange(6))
    assert served.tolist() == [False, False, False, True, False, False]


def test_a_broken_row_has_no_token_whatever_is_banned():
    """Turns red when a ban hides that the model's logits are no numbers, or when the cause that is
    told is not the row's own."""
    state = SamplingState(3, 30)
    state.enter(0, SamplingParams(allowed_token_ids=[1, 2]), 0, 0)
    state.enter(1, SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]]), 0, 0)
    state.enter(2, SamplingParams(logprobs=1), 0, 0)
    logits = torch.from_numpy(np.stack([some_logits(30, i) for i in range(3)]))
    logits[0, 20], logits[2, 3] = torch.nan, torch.inf
    slots, extras = np.arange(3), device_extras(state)
    got = extras.sample(
        logits, slots, torch.arange(3), torch.full((3,), 2), device_history([([5, 6], [])] * 3)
    )
    assert got.token_ids.tolist() == [NO_TOKEN, BANNED, NO_TOKEN]
    assert got.logprobs is not None
    assert logprobs_of(got) == {}
    failures = extras.failures(got.token_ids.numpy(), slots, np.full(3, 2))
    assert [failure.is_request_fault for failure in failures] == [False, True, False]
    assert "every token is banned" in failures[1].message
    assert failures[2].message.startswith("the model's logits for position 2")
