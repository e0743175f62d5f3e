"""Plans and results survive the way between two processes, and garbage does not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protocol import SamplingParams
from quire.protocol.codec import GarbledMessageError
from quire.protocol.step import (
    EnterRow,
    ExtendPrompt,
    ForkRow,
    LateInput,
    PromptLogprobs,
    RowFailure,
    StepPlan,
    StepResult,
    TicketFailure,
    TokenCandidates,
    TokenLogprobs,
    TopTokens,
)
from quire.protocol.step_codec import (
    decode_late,
    decode_plan,
    decode_result,
    encode_late,
    encode_plan,
    encode_result,
)
from tests.profiles import examples

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(
    lambda items: np.array(items, np.int32)
)
FLOATS = st.lists(st.floats(-9, 9, width=32), max_size=3).map(
    lambda items: np.array(items, np.float32)
)
SMALL = st.integers(0, 1000)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=SMALL,
    logprob=st.floats(-50, 0),
    rank=SMALL,
    top=st.none()
    | st.builds(
        TopTokens,
        ids=INTS,
        logprobs=st.lists(st.floats(-9, 0, width=32), max_size=3).map(
            lambda items: np.array(items, np.float32)
        ),
    ),
    log_mass=st.none() | st.floats(-9, 0),
)
ENTER = st.builds(
    EnterRow,
    slot=SMALL,
    token_ids=INTS,
    num_prompt_tokens=SMALL,
    num_computed_tokens=SMALL,
    block_tables=st.lists(INTS, max_size=2).map(tuple),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
        logit_bias=st.none() | st.dictionaries(SMALL, st.floats(-9, 9), max_size=2),
    ),
    seed=st.integers(0, 2**64 - 1),
    sample_index=SMALL,
    stop_token_ids=st.frozensets(SMALL, max_size=2),
    num_candidates=SMALL,
    checkpoint=st.none() | SMALL,
    pooling=st.none() | st.sampled_from(["last", "cls", "mean"]),
)
PLANS = st.builds(
    StepPlan,
    step_id=st.integers(0, 2**62),
    enter=st.lists(ENTER, max_size=2).map(tuple),
    extend=st.lists(st.builds(ExtendPrompt, SMALL, INTS), max_size=2).map(tuple),
    forks=st.lists(st.builds(ForkRow, SMALL, SMALL, SMALL), max_size=2).map(tuple),
    **{
        each.name: INTS
        for each in fields(StepPlan)
        if each.name not in ("step_id", "enter", "extend", "forks")
    },
)
RESULTS = st.builds(
    StepResult,
    step_id=st.integers(0, 2**62),
    slots=INTS,
    token_ids=INTS,
    candidates=st.dictionaries(
        SMALL,
        st.lists(
            st.builds(
                TokenCandidates,
                INTS,
                st.lists(st.floats(-9, 0), max_size=3).map(np.array),
                st.lists(LOGPROBS, max_size=2).map(tuple),
            ),
            max_size=2,
        ).map(tuple),
        max_size=2,
    ),
    logprobs=st.dictionaries(SMALL, st.lists(LOGPROBS, max_size=2).map(tuple), max_size=2),
    prompt_logprobs=st.dictionaries(
        SMALL,
        st.builds(PromptLogprobs, SMALL, st.lists(LOGPROBS, max_size=2).map(tuple)),
        max_size=2,
    ),
    vectors=st.dictionaries(SMALL, FLOATS, max_size=2),
    failed=st.lists(st.builds(RowFailure, SMALL, st.text(), st.booleans()), max_size=2).map(tuple),
    seconds=st.floats(0, 10),
    counts=st.none() | INTS,
    num_drafts=st.none() | INTS,
    done=st.lists(SMALL, max_size=2).map(tuple),
    failed_tickets=st.lists(st.builds(TicketFailure, SMALL, INTS, st.text()), max_size=2).map(
        tuple
    ),
)


@st.composite
def lates(draw: st.DrawFn) -> LateInput:
    """Rows, each with positions that name masks or none."""
    num_masks, num_words = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    words = draw(st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12))
    counts = draw(st.lists(st.integers(0, 3), max_size=3))
    places = st.lists(st.integers(-1, num_masks - 1), min_size=sum(counts), max_size=sum(counts))
    return LateInput(
        draw(st.integers(0, 2**62)),
        np.array(draw(st.lists(SMALL, min_size=len(counts), max_size=len(counts))), np.int32),
        np.array(counts, np.int32),
        np.array(draw(places), np.int32),
        np.array(words[: num_masks * num_words], np.uint32).reshape(num_masks, num_words),
        tuple(draw(st.lists(st.builds(RowFailure, SMALL, st.text(), st.booleans()), max_size=2))),
    )


def plain(value: Any) -> Any:
    """With arrays as lists and their dtypes, so that messages can be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict) or type(value).__name__ == "mappingproxy":
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, msgspec.Struct):
        return [plain(getattr(value, name)) for name in value.__struct_fields__]
    return value


@examples(100)
@given(PLANS)
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    """Fault: a field that was added to plans does not travel."""
    assert plain(decode_plan(encode_plan(plan))) == plain(plan)


@examples(100)
@given(RESULTS)
def test_a_result_comes_back_as_it_was(result: StepResult) -> None:
    assert plain(decode_result(encode_result(result))) == plain(result)


@examples(100)
@given(lates())
def test_late_input_comes_back_as_it_was(late: LateInput) -> None:
    """Fault: the shape of the masks is lost, above all where there are none."""
    found = decode_late(encode_late(late))
    assert plain(found) == plain(late)
    assert found.masks.shape == late.masks.shape


def test_a_step_that_changes_nothing_is_short() -> None:
    assert len(encode_plan(StepPlan(2**60))) < 64
    one = np.array([3], np.int32)
    assert len(encode_result(StepResult(7, one, one))) < 64


@examples(100)
@given(st.data(), PLANS)
def test_garbage_is_refused_as_such(data: st.DataObject, plan: StepPlan) -> None:
    """Fault: another exception, or memory for a length that the bytes only claim."""
    good = encode_plan(plan)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    for garbled in (bytes(bad), good[: data.draw(st.integers(0, len(good) - 1))], good + b"x"):
        try:
            decode_plan(garbled)
        except GarbledMessageError:
            continue
        assert garbled not in (good[:-1], good + b"x")


@examples(100)
@given(st.data(), lates())
def test_garbled_late_input_is_refused_or_fits_together(
    data: st.DataObject, late: LateInput
) -> None:
    """Fault: an index that reads beside the masks, or positions that belong to no row."""
    good = encode_late(late)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    for garbled in (bytes(bad), good[: data.draw(st.integers(0, len(good) - 1))], good + b"x"):
        try:
            found = decode_late(garbled)
        except GarbledMessageError:
            continue
        assert garbled == bytes(bad)
        assert len(found.slots) == len(found.counts)
        assert found.counts.sum() == len(found.index)
        assert all(-1 <= i < len(found.masks) for i in found.index.tolist())


@pytest.mark.parametrize(
    "change",
    [
        {"index": np.array([0, 2], np.int32)},
        {"index": np.array([0, -2], np.int32)},
        {"index": np.array([0], np.int32)},
        {"counts": np.array([3, -1], np.int32)},
        {"slots": np.array([1, 2, 3], np.int32)},
    ],
    ids=str,
)
def test_late_input_that_does_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    two = np.array([1, 1], np.int32)
    late = LateInput(1, two, two, np.array([0, -1], np.int32), np.zeros((2, 3), np.uint32))
    assert plain(decode_late(encode_late(late))) == plain(late)
    with pytest.raises(GarbledMessageError):
        decode_late(encode_late(replace(late, **change)))


def test_kinds_are_not_mixed_up() -> None:
    with pytest.raises(GarbledMessageError):
        decode_late(encode_plan(StepPlan(1)))
    none = np.zeros(0, np.int32)
    with pytest.raises(GarbledMessageError):
        decode_plan(encode_late(LateInput(1, none, none, none, np.zeros((0, 0), np.uint32))))


def test_a_function_does_not_leave_the_process() -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    none = np.zeros(0, np.int32)
    with pytest.raises(TypeError, match="cannot be sent"):
        encode_plan(StepPlan(1, enter=(EnterRow(0, none, 0, 0, (none,), params, 0, 0),)))
