"""Outputs of a random model under random schemas: they are what the schema says, whatever happens
to their rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire.plan.grammar.guidance import GuidanceGrammars
from quire.protocol import EngineRequest, FinishReason, IntArray, SamplingParams
from quire.protocol.grammar import GrammarKind, GrammarSpec, StructuredOutputsParams
from tests.engine.fake_engine import FakeEngine
from tests.grammar.bundled_tokens import EOS, grammars, text_of, tokenizer
from tests.grammar.schemas import schemas
from tests.profiles import SCALE, examples

V = 1024
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@pytest.fixture(scope="module")
def shared() -> Iterator[GuidanceGrammars]:
    found = grammars(V)
    yield found
    found.close()


class Guesses:
    """Drafts at random, many of them not allowed."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def propose(self, sequence: Any, known: IntArray, num_in_flight: int, most: int) -> IntArray:
        common = [
            i for i in range(V) if tokenizer().token_bytes(i) in (b'"', b"{", b"}", b"0", b",")
        ]
        count = min(int(self._rng.integers(0, 4)), most)
        return self._rng.choice([*common, EOS, 700], count).astype(np.int32)


def complete(found: GuidanceGrammars, spec: GrammarSpec, output: list[int]) -> list[int] | None:
    """An output that begins like this and ends; None if the walk does not end."""
    request = EngineRequest(
        "", 0, np.zeros(1, np.int32), SamplingParams(), 0, frozenset([EOS]), grammar=spec
    )
    matcher = found.open(request).result().matcher()
    wishes = [b'"', b"}", b"]", b":", b",", b"e", b"0", b"1", b"-", b"."]
    order = {tokenizer().token_bytes(i): i for i in reversed(range(V))}
    rng = np.random.default_rng(0)
    tokens = list(output)
    for step in range(400):
        (mask,) = matcher.masks(np.array(tokens, np.int32), np.zeros(0, np.int32))
        assert mask is not None
        allowed = set(
            np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        )
        assert allowed, "a prefix that can't be completed"
        if EOS in allowed:
            return tokens
        wished = [order[wish] for wish in wishes if order.get(wish) in allowed]
        takes_wish = wished and step % 4 != 3
        tokens.append(wished[0] if takes_wish else int(rng.choice(sorted(allowed))))
    return None


@DEPTHS
def test_strict_outputs_are_instances(depth: int, shared: GuidanceGrammars) -> None:
    """With drafts and without, preempted and not."""
    counts: Counter[str] = Counter()

    @examples(
        60,
        deadline=None,
        database=None,
        derandomize=SCALE == 1,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        schema=schemas(), seed=st.integers(0, 2**32), drafts=st.booleans(), preempts=st.booleans()
    )
    def check(schema: dict[str, Any], seed: int, drafts: bool, preempts: bool) -> None:
        spec = StructuredOutputsParams(json=schema).spec
        engine = FakeEngine(
            depth=depth, num_blocks=24 if preempts else 200, vocab_size=V, max_model_len=90,
            max_num_seqs=3, grammars=shared,
        )  # fmt: skip
        if drafts:
            engine.scheduler._drafts._proposer = Guesses()
        handles = [
            engine.add(
                [5 + i] * 30, max_tokens=55, seed=seed + i, stop=frozenset([EOS]), grammar=spec
            )[0]
            for i in range(3)
        ]
        engine.run()
        counts["preempted"] += engine.core.stats().preempted_total
        for handle in handles:
            finish = engine.finished[handle]
            counts[finish.reason.value] += 1
            if finish.reason is FinishReason.ERROR:
                assert finish.is_request_fault, finish.message
                assert not engine.tokens[handle], finish.message
                counts[finish.message[:60]] += 1
                continue
            tokens = engine.tokens[handle]
            if finish.reason is FinishReason.LENGTH:
                longer = complete(shared, spec, tokens)
                if longer is None:
                    counts["walk"] += 1
                    continue
                tokens = longer
            value = json.loads(text_of(tokens))
            jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)

    check()
    total = counts["stop"] + counts["length"] + counts["error"]
    assert counts["error"] <= 0.3 * total, counts
    assert counts["walk"] <= 0.1 * total, counts
    assert counts["stop"] > 0.3 * total, counts
    assert counts["preempted"] > 0, counts


@DEPTHS
def test_drafts_and_preemption_change_nothing(depth: int, shared: GuidanceGrammars) -> None:
    schema = {
        "type": "array",
        "items": {"enum": ["a", "bb", 12, None]},
        "minItems": 12,
        "maxItems": 14,
    }
    spec = StructuredOutputsParams(json=schema).spec
    results: list[list[list[int]]] = []
    for num_blocks, drafts in ((200, False), (200, True), (20, False), (20, True)):
        engine = FakeEngine(
            depth=depth, num_blocks=num_blocks, vocab_size=V, max_model_len=80, grammars=shared
        )
        if drafts:
            engine.scheduler._drafts._proposer = Guesses()
        handles = [
            engine.add([7, i], max_tokens=70, seed=i, stop=frozenset([EOS]), grammar=spec)[0]
            for i in range(5)
        ]
        handles += engine.add([9, 9], n=3, max_tokens=70, stop=frozenset([EOS]), grammar=spec)
        engine.run()
        assert (engine.core.stats().preempted_total > 0) == (num_blocks == 20)
        results.append([engine.tokens[handle] for handle in handles])
    assert results[0] == results[1] == results[2] == results[3]


def test_a_resumed_output_goes_on_as_it_was(shared: GuidanceGrammars) -> None:
    """Resume an output, as after a crash of the core."""
    spec = GrammarSpec(GrammarKind.REGEX, "([a-z]{3} ){4}end")
    whole: list[int] = []
    for cut in (0, 1, 4, 7):
        engine = FakeEngine(vocab_size=V, grammars=shared)
        (handle,) = engine.add(
            [5], max_tokens=40, seed=3, stop=frozenset([EOS]), grammar=spec, output=whole[:cut]
        )
        engine.run()
        whole = whole or engine.tokens[handle]
        assert engine.tokens[handle] == whole
        assert engine.finished[handle].reason is FinishReason.STOP
    assert text_of(whole).endswith("end")
