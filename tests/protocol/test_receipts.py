"""Receipts: their contents, the weight of every bit, and refusals."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import RequestError
from quire.protocol import BeamRules, EngineRequest, FinishReason, SamplingParams, TokenLogprobs
from quire.protocol.adapters import AdapterRef
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.media import Media
from quire.protocol.parameters.declaration import Declared
from quire.protocol.receipts import (
    Receipt,
    Statement,
    Witness,
    first_difference,
    read_receipts,
)
from quire.protocol.request import Weights
from quire.protocol.sampling_params import SAMPLING_PARAMETERS, RepetitionDetectionParams
from quire.protocol.step import MediaSpan
from tests.profiles import machine_settings

REQUEST = EngineRequest(
    "id",
    7,
    np.array([3, 1, 4, 1, 5], np.int32),
    SamplingParams(n=2, seed=9, logprobs=0, deterministic=True),
    seed=9,
    stop_token_ids=frozenset({2, 11}),
)
TOKENS = [[5, 8, 9], [7]]
LOGPROBS = [[-0.5, -1.25, -0.1], [-3.0]]
SHARED: dict[str, dict[str, Any]] = {
    "engine": {"quire": "1.0", "kernels": "cpu", "rank_invariant": False},
    "model": {"weights": "ab", "config": "cd"},
    "text": {"tokenizer": "01", "template": "23"},
}

STATED = [each for each in SAMPLING_PARAMETERS.values() if each.facts.in_receipt]
OTHER: Mapping[str, Any] = {
    "logit_bias": {4: 1.0},
    "allowed_token_ids": [4, 5],
    "bad_words": ["no"],
    "stop": ["end"],
    "stop_token_ids": [4],
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=3),
    "bad_words_token_ids": [[4]],
    "dry_sequence_breakers": ["."],
    "dry_breaker_token_ids": [4],
}
"""Other values of parameters that are neither numbers nor switches."""


def other_value(each: Declared) -> Any:
    if each.name in OTHER:
        return OTHER[each.name]
    if each.kind is bool:
        return not each.default
    assert isinstance(each.default, int | float), f"{each.name}: give OTHER another value"
    if each.kind is int:
        return each.default + 2
    below = (each.default + max(each.facts.low, -10.0)) / 2
    return below if below != each.default else (each.default + min(each.facts.high, 10.0)) / 2


def entry(token_id: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1)


def receipt_of(
    request: EngineRequest = REQUEST,
    tokens: list[list[int]] = TOKENS,
    logprobs: list[list[float]] = LOGPROBS,
    reason: FinishReason = FinishReason.LENGTH,
    pieces: int = 1,
    **shared: Mapping[str, Any],
) -> Receipt:
    """A receipt. pieces: most tokens that come at a time."""
    witness = Witness(request, name="model", is_current=lambda: True, **{**SHARED, **shared})
    for index in range(request.params.n):
        ids, values = tokens[index % len(tokens)], logprobs[index % len(logprobs)]
        entries = [entry(*each) for each in zip(ids, values, strict=True)]
        for start in range(0, len(ids), pieces):
            assert witness.receipt(Weights()) is None
            end = start + pieces
            witness.take(index, ids[start:end], entries[start:end], None, None)
        witness.take(index, [], [], reason, None)
    found = witness.receipt(Weights())
    assert found is not None
    found.check()
    return found


def test_pieces_in_which_tokens_come_change_nothing() -> None:
    assert receipt_of(pieces=1) == receipt_of(pieces=2) == receipt_of(pieces=9)


def test_names_of_a_request_change_nothing() -> None:
    """The salt separates tenants, handles are the client's, a prediction saves time alone."""
    other = replace(
        REQUEST,
        request_id="other",
        first_handle=70,
        salt="tenant",
        arrival_time=5.0,
        prediction_token_ids=np.array([5], np.int32),
    )
    assert receipt_of(other) == receipt_of()


def test_what_others_are_shown_changes_nothing() -> None:
    for name, value in (("logprobs", 4), ("prompt_logprobs", 1), ("output_kind", 1), ("seed", 3)):
        params = REQUEST.params.clone(**{name: value})
        assert receipt_of(replace(REQUEST, params=params)).id == receipt_of().id, name


@pytest.mark.parametrize("each", STATED, ids=lambda each: each.name)
def test_another_value_of_a_parameter_is_another_receipt(each: Declared) -> None:
    params = REQUEST.params.clone(**{each.name: other_value(each)})
    assert params != REQUEST.params
    assert receipt_of(replace(REQUEST, params=params)).id != receipt_of().id


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 10},
        {"stop_token_ids": frozenset({2})},
        {"prompt_token_ids": np.array([3, 1, 4, 1, 6], np.int32)},
        {"grammar": GrammarSpec(GrammarKind.REGEX, "a")},
        {"grammar": GrammarSpec(GrammarKind.REGEX, "b")},
        {"beams": BeamRules(2)},
        {"adapter": AdapterRef("a", "/a", "digest")},
        {"media": (Media(b"digest", MediaSpan(7, 1, 2)),)},
        {"media": (Media(b"digest", MediaSpan(7, 2, 2)),)},
    ],
)
def test_another_request_is_another_receipt(change: dict[str, Any]) -> None:
    assert receipt_of(replace(REQUEST, **change)).id != receipt_of().id


@machine_settings(100)
@given(st.data())
def test_a_flipped_bit_of_the_answer_is_another_receipt(data: st.DataObject) -> None:
    """Turns red when the chain leaves out a token, or a bit of a log-probability."""
    tokens, logprobs = copy.deepcopy(TOKENS), copy.deepcopy(LOGPROBS)
    sample = data.draw(st.integers(0, 1))
    place = data.draw(st.integers(0, len(tokens[sample]) - 1))
    if data.draw(st.booleans()):
        tokens[sample][place] ^= 1 << data.draw(st.integers(0, 30))
    else:
        bit = data.draw(st.sampled_from([*range(23), 31]))  # an exponent might become NaN
        bits = struct.unpack("<I", struct.pack("<f", logprobs[sample][place]))[0]
        logprobs[sample][place] = struct.unpack("<f", struct.pack("<I", bits ^ 1 << bit))[0]
    assert receipt_of(tokens=tokens, logprobs=logprobs).id != receipt_of().id


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in cast("Iterator[tuple[Any, Any]]", pairs):
        if isinstance(each, dict | list) and each:
            yield from leaves(each, (*path, name))
        else:
            yield (*path, name)


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value + "x" if isinstance(value, str) else "x"


def test_every_field_of_a_statement_counts() -> None:
    receipt = receipt_of()
    stated: dict[str, Any] = msgspec.to_builtins(receipt.statement)
    found = list(leaves(stated))
    assert len(found) > 45
    for path in found:
        other = copy.deepcopy(stated)
        holder: Any = other
        for name in path[:-1]:
            holder = holder[name]
        holder[path[-1]] = changed(holder[path[-1]])
        try:
            made = msgspec.convert(other, Statement)
        except msgspec.ValidationError:
            continue  # a number of tokens cannot be a text
        assert made.id != receipt.id, path
        sections = [each for each in stated if each != "samples"]
        difference = first_difference(stated, other, sections)
        if path[0] in sections:
            assert difference is not None
            assert difference.field.startswith(".".join(map(str, path[:2]))), path


def test_a_receipt_is_read_back() -> None:
    receipt = receipt_of().signed(b"0123456789abcdef")
    text = receipt.to_json()
    assert read_receipts(text.encode()) == [receipt]
    listed = json.dumps({"object": "list", "data": [json.loads(text)] * 2})
    assert read_receipts(listed.encode()) == [receipt, receipt]


def test_a_signature_names_its_key() -> None:
    receipt = receipt_of()
    key, other = b"0123456789abcdef", b"0123456789abcdeF"
    assert receipt.signed(key).is_signed_by(key)
    assert not receipt.signed(key).is_signed_by(other)
    assert not receipt.is_signed_by(key)
    assert not msgspec.structs.replace(receipt, signature="é").is_signed_by(key)
    assert not receipt_of(tokens=[[5, 8, 1], [7]]).signed(other).is_signed_by(key)


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda r: r["statement"]["choice"].update(seed=1), "id"),
        (lambda r: r["evidence"]["prompt_token_ids"].append(1), "text.prompt"),
        (lambda r: r["evidence"]["samples"].pop(), "samples"),
        (lambda r: r["evidence"]["samples"][0]["token_ids"].pop(), r"samples\[0\]"),
        (lambda r: r["evidence"]["samples"][1]["token_ids"].__setitem__(0, 8), r"\[1\].chain"),
        (lambda r: r["evidence"]["samples"][0]["logprobs"].__setitem__(2, "0" * 8), "chain"),
        (lambda r: r.update(format="quire receipt 2"), "format"),
    ],
)
def test_an_edited_receipt_is_refused(edit: Any, place: str) -> None:
    document = json.loads(receipt_of().to_json())
    edit(document)
    with pytest.raises(RequestError, match=f"contradicts itself at .*{place}"):
        read_receipts(json.dumps(document).encode())


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'"x"', b"\xff", b'{"data": [1]}', b'{"data": 5}', b'{"data": []}'],
)
def test_other_files_are_no_receipts(content: bytes) -> None:
    with pytest.raises(RequestError, match="no receipt"):
        read_receipts(content)


@pytest.mark.parametrize("ids", [[-1], [2**40]])
def test_impossible_evidence_is_refused(ids: list[int]) -> None:
    document = json.loads(receipt_of(replace(REQUEST, params=SamplingParams(n=1))).to_json())
    document["evidence"]["samples"][0]["token_ids"] = ids * 3
    with pytest.raises(RequestError):
        read_receipts(json.dumps(document).encode())


@pytest.mark.parametrize("reason", FinishReason)
def test_ends_that_do_not_follow_from_tokens_give_no_receipt(reason: FinishReason) -> None:
    own = reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
    for is_current in (True, False):
        witness = Witness(
            replace(REQUEST, params=SamplingParams(n=1)),
            name="",
            is_current=lambda said=is_current: said,
            **SHARED,
        )
        witness.take(0, [5], [entry(5, -1.0)], reason, None)
        assert (witness.receipt(Weights()) is not None) == (own and is_current)


def test_a_receipt_states_the_weights_in_use() -> None:
    """Turns red when tensors in place of the checkpoint's do not count, or a name of a version
    does: only numbers decide bits."""
    witness = Witness(
        replace(REQUEST, params=SamplingParams(n=1)), name="", is_current=lambda: True, **SHARED
    )
    witness.take(0, [5], [entry(5, -0.5)], FinishReason.LENGTH, None)
    cases = (Weights(), Weights("a", "11"), Weights("b", "11"), Weights("a", "22"))
    plain, one, same, other = (witness.receipt(each) for each in cases)
    assert plain is not None and one is not None and same is not None and other is not None
    assert len({plain.id, one.id, other.id}) == 3 and one.id == same.id
    assert plain.statement.model["weights"] == SHARED["model"]["weights"]
    assert (one.evidence.weights_version, same.evidence.weights_version) == ("a", "b")
    assert witness.receipt(None) is None
