"""Answers of the fake engine under their grammar, with drafts and preempted: calls validate, and a
budget of thinking holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.plan.grammar.guidance import GuidanceGrammars
from quire.protocol import EngineRequest, FinishReason, SamplingParams
from quire.protocol.grammar import GrammarKind, StructuredOutputsParams
from quire.text.dialect import Thinking, Tool, answer_grammar
from quire.text.dialect.families import DIALECTS
from tests.dialect.answers import parsed, read
from tests.engine.fake_engine import FakeEngine
from tests.grammar.bundled_tokens import EOS, grammars, tokenizer
from tests.grammar.test_laws import Guesses

V = 1024
TOOLS = (
    Tool(
        "move",
        {
            "type": "object",
            "properties": {
                "to": {"enum": ["left", "right"]},
                "steps": {"type": "integer", "minimum": 1, "maximum": 9},
                "note": {"type": "string", "maxLength": 3},
            },
            "required": ["to", "steps"],
        },
    ),
    Tool("stay"),
)
DIALECT = replace(DIALECTS["quire"], thinking=("<|tools|>", "<|tool|>"))
"""The bundled model's, with two of its tokens around a thinking that it has not."""


@pytest.fixture(scope="module")
def shared() -> Iterator[GuidanceGrammars]:
    found = grammars(V)
    yield found
    found.close()


def test_the_log_says_nothing_of_tools_that_are_held_to(
    shared: GuidanceGrammars, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a warning about markers that are tokens, which nobody has to know of."""
    spec = answer_grammar(DIALECT.bound(tokenizer()), TOOLS, "required", parallel=True)
    request = EngineRequest(
        "a", 0, np.array([1], np.int32), SamplingParams(), 0, frozenset({EOS}), grammar=spec
    )
    assert shared.open(request).result() is not None
    assert not caplog.records


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [False, True])
def test_required_calls(depth: int, drafts: bool, shared: GuidanceGrammars) -> None:
    dialect = DIALECT.bound(tokenizer())
    results: list[list[list[int]]] = []
    for num_blocks in (300, 40):
        engine = FakeEngine(
            depth=depth, num_blocks=num_blocks, vocab_size=V, max_model_len=150, max_num_seqs=6,
            grammars=shared,
        )  # fmt: skip
        if drafts:
            engine.scheduler._drafts._proposer = Guesses()
        handles: list[int] = []
        for state in (Thinking.OPEN, Thinking.NONE):
            spec = answer_grammar(
                dialect, TOOLS, "required", parallel=False, thinking=state, thinking_budget=6
            )
            for seed in range(6):
                handles += engine.add(
                    [7 + seed] * 20, max_tokens=110, seed=seed, stop=frozenset([EOS]), grammar=spec
                )
        engine.run()
        counts: Counter[FinishReason] = Counter()
        for i, handle in enumerate(handles):
            finish = engine.finished[handle]
            counts[finish.reason] += 1
            assert finish.reason is not FinishReason.ERROR, finish.message
            tokens = [token for token in engine.tokens[handle] if token != EOS]
            thinking = Thinking.OPEN if i < 6 else Thinking.NONE
            parts, parser = parsed(dialect, tokenizer(), tokens, tools=TOOLS, thinking=thinking)
            assert parser.num_reasoning_tokens <= 6
            if finish.reason is FinishReason.STOP:
                ((name, arguments),) = read(parts).calls
                schema = next(tool.schema for tool in TOOLS if tool.name == name)
                jsonschema.validate(arguments, dict(schema))
        assert counts[FinishReason.STOP] >= 8, counts
        results.append([engine.tokens[handle] for handle in handles])
    assert results[0] == results[1]


def test_a_refusal_names_the_tool(shared: GuidanceGrammars) -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"not": {}}}}, is_strict=True)
    spec = answer_grammar(DIALECT.bound(tokenizer()), [TOOLS[0], tool])
    engine = FakeEngine(vocab_size=V, grammars=shared)
    (handle,) = engine.add([5], max_tokens=4, stop=frozenset([EOS]), grammar=spec)
    engine.run()
    finish = engine.finished[handle]
    assert finish.is_request_fault
    assert "tools[1].function.parameters" in finish.message
    assert "$.properties.a.not" in finish.message


def test_users_cannot_write_answers() -> None:
    with pytest.raises(RequestError, match="grammar"):
        StructuredOutputsParams()
    with pytest.raises((RequestError, TypeError)):
        StructuredOutputsParams(answer="{}")  # type: ignore[call-arg]
    assert GrammarKind.ANSWER not in {
        StructuredOutputsParams(grammar='start: "a"').spec.kind,
        StructuredOutputsParams(regex="a").spec.kind,
    }
