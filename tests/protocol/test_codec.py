"""Messages survive the way to another process; anything else is refused, whatever it is."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.base.telemetry import EngineStats
from quire.protocol import (
    BeamRules,
    EngineOutput,
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    SequenceFinish,
    TokenLogprobs,
    WholeSequence,
)
from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.control import (
    Inspect,
    ListPins,
    Pause,
    Report,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Unpin,
    Wake,
)
from quire.protocol.messages import (
    Abort,
    Add,
    Answer,
    ClientMessage,
    Control,
    CoreMessage,
    Extend,
    Goodbye,
    Heartbeat,
    Hello,
    Output,
    Probe,
    Refused,
    Welcome,
)
from quire.protocol.pins import PinnedPrefix
from quire.protocol.request import Weights
from quire.protocol.status import EngineCapacity, StartPhase
from quire.protocol.step import TopTokens
from tests.profiles import machine_settings

FROM_CLIENT: Codec[ClientMessage] = Codec(ClientMessage)
FROM_CORE: Codec[CoreMessage] = Codec(CoreMessage)


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays, and demands their dtypes."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(
            same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def ints(dtype: type = np.int32) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, st.integers(0, 8), elements=st.integers(0, 2**31 - 1))


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 50),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    max_tokens=st.none() | st.integers(1, 99),
    logprobs=st.none() | st.integers(-1, 20),
    bad_words_token_ids=st.none() | st.lists(st.lists(st.integers(0, 9), min_size=1), max_size=2),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=st.text(max_size=5),
    first_handle=st.integers(0, 2**60),
    prompt_token_ids=ints(),
    params=PARAMS,
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.frozensets(st.integers(0, 99), max_size=3),
    output_token_ids=ints(),
    arrival_time=st.floats(0, 1e9),
    salt=st.text(max_size=5),
    first_sample=st.integers(0, 127),
    beams=st.none()
    | st.builds(
        BeamRules,
        st.integers(1, 9),
        st.floats(-2, 2),
        st.sampled_from([True, False, "never"]),
    ),
    is_open=st.booleans(),
    max_prompt_tokens=st.none() | st.integers(1, 99),
    pin_seconds=st.none() | st.floats(0, math.inf),
    pin_is_shared=st.booleans(),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    st.integers(0, 99),
    st.floats(-50, 0),
    st.integers(1, 99),
    st.none()
    | st.builds(
        TopTokens,
        ints(),
        hnp.arrays(np.float32, st.integers(0, 4), elements=st.floats(-50, 0, width=32)),
    ),
    st.none() | st.floats(-50, 0),
)
OUTPUTS = st.integers(0, 6).flatmap(
    lambda size: st.builds(
        EngineOutput,
        handles=hnp.arrays(np.int64, size, elements=st.integers(0, 2**60)),
        token_ids=hnp.arrays(np.int32, size, elements=st.integers(0, 2**31 - 1)),
        logprobs=st.dictionaries(st.integers(0, 9), st.lists(LOGPROBS, max_size=2), max_size=2),
        prompt_logprobs=st.dictionaries(
            st.integers(0, 9),
            st.builds(PromptLogprobs, st.integers(1, 9), st.tuples(LOGPROBS)),
            max_size=1,
        ),
        num_cached_tokens=st.dictionaries(st.integers(0, 9), st.integers(0, 99), max_size=2),
        finished=st.tuples(
            st.builds(
                SequenceFinish,
                st.integers(0, 9),
                st.sampled_from(FinishReason),
                st.none() | st.integers(0, 99),
                st.text(max_size=9),
                st.none()
                | st.builds(WholeSequence, ints(), st.floats(-50, 0), st.tuples(LOGPROBS)),
            )
        ),
    )
)
MODES = st.sampled_from(["keep", "wait", "abort"])
OPS = st.one_of(
    *(st.builds(kind) for kind in (Inspect, ListPins, Resume, Wake, StopProfile)),
    st.builds(Unpin, st.integers(0, 2**62)),
    st.builds(ResetPrefixCache, st.booleans()),
    st.builds(Pause, MODES),
    st.builds(Sleep, st.integers(1, 2), MODES),
    st.builds(StartProfile, st.text(max_size=9)),
)
FROM_CLIENTS = st.one_of(
    st.builds(Hello, st.integers(), st.integers(0, 99)).filter(lambda h: abs(h.version) < 2**62),
    st.builds(Add, REQUESTS),
    st.builds(Abort, st.lists(st.integers(0, 2**62), max_size=4)),
    st.builds(Extend, st.integers(0, 2**62), ints(), st.booleans()),
    st.builds(Control, st.integers(0, 2**62), OPS),
    st.just(Goodbye()),
)


@machine_settings(100)
@given(message=FROM_CLIENTS)
def test_messages_of_clients_survive(message: ClientMessage) -> None:
    assert same(FROM_CLIENT.decode(encode(message)), message)


@machine_settings(60)
@given(output=OUTPUTS)
def test_outputs_survive(output: EngineOutput) -> None:
    assert same(FROM_CORE.decode(encode(Output(output))), Output(output))


def test_other_messages_survive() -> None:
    capacity = EngineCapacity(128, 16, 64, 16, 100, 1600, ((None, 16), (128, 48)), True, "fast")
    pin = PinnedPrefix(7, 341, 22, 5, math.inf, "policy.txt", "", is_shared=True, key="k")
    report = Report("fast ones", "cpu", "invariant", 3, Weights("v", "ab"), pins=(pin, pin))
    answers = (Answer(3, report, "", 1), Answer(4, None, "it sleeps", 2), Probe())
    for message in (Welcome(3, capacity), Refused(7, "too long"), *answers):
        assert FROM_CORE.decode(encode(message)) == message
    beat = Heartbeat(
        2, (StartPhase("loading", 1.5, False),), capacity=capacity, stats=EngineStats(num_blocks=3)
    )
    assert Codec[Heartbeat](Heartbeat).decode(encode(beat)) == beat


@machine_settings(200)
@given(message=FROM_CLIENTS, data=st.data())
def test_garbled_bytes_are_refused_or_read_and_nothing_else(
    message: ClientMessage, data: st.DataObject
) -> None:
    """Bytes of a real message, cut, flipped, repeated or replaced by noise."""
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip" and raw:
            raw[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[place : place + data.draw(st.integers(1, 9))]
        else:
            raw[place:place] = data.draw(st.binary(max_size=9))
    try:
        FROM_CLIENT.decode(bytes(raw))
    except GarbledMessageError as error:
        assert str(len(raw)) in str(error)


@machine_settings(100)
@given(raw=st.binary(max_size=60))
def test_noise_is_refused(raw: bytes) -> None:
    with pytest.raises(GarbledMessageError):
        FROM_CLIENT.decode(raw)


def test_what_is_too_large_or_too_deep_is_refused() -> None:
    with pytest.raises(GarbledMessageError, match="while 10 are allowed"):
        Codec[ClientMessage](ClientMessage, 10).decode(encode(Abort(list(range(20)))))
    with pytest.raises(GarbledMessageError):
        FROM_CLIENT.decode(b"\x91" * 100_000 + b"\x01")


@pytest.mark.parametrize(
    "array", [["<i8", b"\0" * 8], ["<i4", b"\0" * 5], ["<i4"], 3, ["<i4", "x"]]
)
def test_arrays_of_another_kind_are_refused(array: object) -> None:
    request = EngineRequest("a", 0, np.zeros(2, np.int32), SamplingParams(), 0)
    raw = msgspec.msgpack.decode(encode(Add(request)))
    raw[1]["prompt_token_ids"] = array
    with pytest.raises(GarbledMessageError):
        FROM_CLIENT.decode(msgspec.msgpack.encode(raw))


def test_functions_cannot_leave_the_process() -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    request = EngineRequest("a", 0, np.zeros(2, np.int32), params, 0)
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        encode(Add(request))
