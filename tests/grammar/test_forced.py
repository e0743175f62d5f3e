"""Tokens without alternative are computed in one step, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.plan.grammar.guidance import GuidanceGrammars
from quire.protocol import EngineRequest, FinishReason, SamplingParams
from quire.protocol.grammar import GrammarSpec, StructuredOutputsParams
from tests.engine.fake_engine import FakeEngine
from tests.grammar.bundled_tokens import EOS, grammars, text_of, tokenizer

V = 4096
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_in_celsius": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_measured_outside": {"type": "boolean"},
        "name_of_the_station": {"enum": ["the northern one", "the southern one"]},
    },
    "required": ["temperature_in_celsius", "is_measured_outside", "name_of_the_station"],
    "additionalProperties": False,
}
SPEC = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True).spec


@pytest.fixture(scope="module")
def shared() -> Iterator[GuidanceGrammars]:
    found = grammars(V)
    yield found
    found.close()


def run(
    shared: GuidanceGrammars, depth: int, num_blocks: int, *, takes_forced: bool
) -> tuple[list[list[int]], int]:
    """Tokens of several requests, with plain ones beside them, and the number of steps."""
    engine = FakeEngine(
        depth=depth, num_blocks=num_blocks, vocab_size=V, max_model_len=140, grammars=shared
    )
    engine.scheduler._drafts.takes_forced = takes_forced
    handles: list[int] = []
    for i in range(3):
        handles += engine.add(
            [7, i] * 9, n=1 + i, max_tokens=100, seed=i, stop=frozenset([EOS]), grammar=SPEC
        )
        handles += engine.add([8, i], max_tokens=20, seed=i)
    engine.run()
    handles += engine.add([7, 2] * 9, max_tokens=100, stop=frozenset([EOS]), grammar=SPEC)
    engine.run()
    if num_blocks == 200:
        assert engine.num_cached[handles[-1]] > 0
    else:
        assert engine.core.stats().preempted_total > 0
    return [engine.tokens[handle] for handle in handles], engine.core.stats().steps_total


@DEPTHS
@pytest.mark.parametrize("num_blocks", [200, 36])
def test_forced_tokens_save_steps_and_change_nothing(
    depth: int, num_blocks: int, shared: GuidanceGrammars
) -> None:
    """With samples, prefix hits, preemption, and plain rows in the same steps."""
    slow, many = run(shared, depth, num_blocks, takes_forced=False)
    quick, few = run(shared, depth, num_blocks, takes_forced=True)
    assert quick == slow
    assert json.loads(text_of(quick[-1])).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    if num_blocks == 200:
        assert few < 0.75 * many


def test_plain_rows_are_not_asked(shared: GuidanceGrammars, monkeypatch: Any) -> None:
    engine = FakeEngine(num_blocks=200, vocab_size=V, max_model_len=140, grammars=shared)
    asked: list[int] = []
    propose = engine.scheduler._drafts._forced._of_row
    monkeypatch.setattr(
        engine.scheduler._drafts._forced,
        "_of_row",
        lambda slot, left: (asked.append(slot), propose(slot, left))[1],
    )
    engine.add([8, 1], max_tokens=20)
    engine.run()
    assert not asked
    engine.add([8, 1], max_tokens=100, stop=frozenset([EOS]), grammar=SPEC)
    engine.run()
    assert asked
    assert engine.scheduler._drafts.totals.drafts == 0, "what a grammar forces is no guess"


@pytest.mark.parametrize("output", ["", '{"te', '{"temperature_in_celsius":'])
def test_what_is_forced_is_what_the_masks_say(shared: GuidanceGrammars, output: str) -> None:
    tokens = [i for i in tokenizer().encode(output, add_special_tokens=False) if i != 1]
    request = EngineRequest(
        "", 0, np.zeros(1, np.int32), SamplingParams(), 0, frozenset([EOS]), grammar=SPEC
    )
    matcher = shared.open(request).result().matcher()
    known = np.array(tokens, np.int32)
    forced = matcher.forced(known)
    assert (len(forced) > 0) == (output != '{"temperature_in_celsius":')
    masks = matcher.masks(known, forced)
    for token, mask in zip(forced.tolist(), masks, strict=False):
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert allowed.tolist() == [token]
    last = masks[-1]
    assert last is not None
    assert np.unpackbits(last.view(np.uint8)).sum() > 1


def test_a_forced_end_is_seen(shared: GuidanceGrammars) -> None:
    """A text with one spelling alone ends with its stop token."""
    engine = FakeEngine(num_blocks=200, vocab_size=V, max_model_len=140, grammars=shared)
    spec = GrammarSpec(SPEC.kind, json.dumps({"const": "one spelling alone"}), whitespace="")
    for max_tokens in (5, 60):
        (handle,) = engine.add([5], max_tokens=max_tokens, stop=frozenset([EOS]), grammar=spec)
        engine.run()
        reason = FinishReason.LENGTH if max_tokens == 5 else FinishReason.STOP
        assert engine.finished[handle].reason is reason
        assert '"one spelling alone"'.startswith(text_of(engine.tokens[handle]))
