"""Thinking: its begin and end, its budget, and the text that may follow it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.text.dialect import (
    AnswerParser,
    Dialect,
    Thinking,
    ToolChoice,
    answer_grammar,
    thinking_at_end,
)
from quire.text.dialect.families import DIALECTS
from quire.text.rendering import Tokenizer
from tests.dialect.answers import TOOLS, Answer, parsed, read
from tests.dialect.models import EOS, TURN, Follower, tokenizer, walk
from tests.dialect.test_formats import ALL, model
from tests.dialect.written import WRITERS, encoded, plain
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS

THOUGHT = "Is it <b> or {x}?\n\nYes: <tool_call> is no call."
ANSWERS = [
    Answer("Yes.", THOUGHT),
    Answer("", THOUGHT, (("now", {}),)),
    Answer("", THOUGHT, (("files.write", {"path": "p", "text": "</think>"}),)),
]
SCHEMA = GrammarSpec(GrammarKind.JSON, '{"type": "object", "properties": {"a": {"const": 1}}}')


def thinkers(kind: str) -> tuple[Dialect, Tokenizer]:
    return model("hermes", kind)


@ALL
def test_thinking_comes_first(name: str, kind: str) -> None:
    """And what looks like a call within it is none."""
    dialect, tokens = model(name, kind)
    if dialect.thinking is None:
        return
    specs = [answer_grammar(dialect, TOOLS, choice) for choice in ("auto", "required")]
    for answer in ANSWERS:
        if name == "generic" and kind == "text":
            continue
        text = WRITERS[name](answer)
        if name == "generic":
            text = f"<think>\n{answer.reasoning}\n</think>\n\n{text}"
        ids = encoded(tokens, text.replace(THOUGHT, f"\ue000{THOUGHT}\ue001"))
        parts, parser = parsed(dialect, tokens, ids)
        assert read(parts).without_ids == answer, plain(text)
        assert parser.num_reasoning_tokens >= len(THOUGHT) * 0.7
        one_by_one = parsed(dialect, tokens, ids, range(len(ids)))
        assert read(one_by_one[0]).without_ids == answer
        assert one_by_one[1].num_reasoning_tokens == parser.num_reasoning_tokens
        for spec, is_required in zip(specs, (False, True), strict=True):
            assert spec is not None
            may_be = bool(answer.calls) or not is_required
            assert Follower(spec, tokens).accepts(ids) == may_be, (plain(text), is_required)


@pytest.mark.parametrize("name", ["hermes", "glm45", "deepseek_v31"])
@pytest.mark.parametrize("kind", ["special", "added", "text"])
def test_a_line_break_may_come_before_it(name: str, kind: str) -> None:
    """Turns red when a grammar bans the thinking of GLM, whose template writes a line break first
    and leaves it to the model."""
    dialect, tokens = model(name, kind)
    call = WRITERS[name](Answer(calls=(("now", {}),)))
    thought = "\n<think>so</think>\n"
    cases: list[tuple[ToolChoice, GrammarSpec | None, str, Answer]] = [
        ("auto", None, "Yes.", Answer("Yes.", "so")),
        ("auto", None, call, Answer("", "so", (("now", {}),))),
        ("required", None, call, Answer("", "so", (("now", {}),))),
        ("none", None, "Yes.", Answer("Yes.", "so")),
        ("none", SCHEMA, "{}", Answer("{}", "so")),
    ]
    for choice, response, text, answer in cases:
        spec = answer_grammar(dialect, TOOLS, choice, response=response)
        assert spec is not None
        ids = encoded(tokens, thought + text)
        assert Follower(spec, tokens).accepts(ids), (choice, text)
        assert read(parsed(dialect, tokens, ids, range(len(ids)))[0]).without_ids == answer
    free = answer_grammar(dialect, TOOLS)
    assert free is not None
    assert Follower(free, tokens).accepts(encoded(tokens, "\n\nYes."))
    bound = answer_grammar(dialect, TOOLS, thinking_budget=0)
    assert bound is not None
    assert Follower(bound, tokens).accepts(encoded(tokens, "\n<think></think>\nYes."))
    assert not Follower(bound, tokens).accepts(encoded(tokens, thought + "Yes."))


@pytest.mark.parametrize("kind", ["special", "added", "text"])
def test_a_prompt_that_opened_or_closed_it(kind: str) -> None:
    dialect, tokens = thinkers(kind)
    opened = encoded(tokens, "so</think>\n\nfine")
    parts, parser = parsed(dialect, tokens, opened, thinking=Thinking.OPEN)
    assert read(parts) == Answer("fine", "so")
    assert parser.num_reasoning_tokens >= 1
    parts, parser = parsed(dialect, tokens, encoded(tokens, "fine"), thinking=Thinking.CLOSED)
    assert read(parts) == Answer("fine")
    assert parser.num_reasoning_tokens == 0
    parts, _ = parsed(dialect, tokens, encoded(tokens, "cut off "), thinking=Thinking.OPEN)
    assert read(parts) == Answer("", "cut off")
    for again, state in (("<think>\n", Thinking.OPEN), ("<think>\n<think>", Thinking.NONE)):
        ids = encoded(tokens, again + "so <think></think>\n\nfine")
        for cuts in ((), range(len(ids))):
            parts, _ = parsed(dialect, tokens, ids, cuts, thinking=state)
            said = "so" if kind == "special" else "so <think>"
            assert read(parts) == Answer("fine", said), (again, kind)
    spec = answer_grammar(dialect, TOOLS, "required", thinking=Thinking.OPEN)
    assert spec is not None
    call = WRITERS["hermes"](Answer(calls=(("now", {}),)))
    assert Follower(spec, tokens).accepts(encoded(tokens, f"so</think>\n\n{call}"))
    assert not Follower(spec, tokens).accepts(encoded(tokens, call))


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ("assistant\n", Thinking.NONE),
        ("assistant\n<think>\n", Thinking.OPEN),
        ("assistant\n<think>", Thinking.OPEN),
        ("assistant\n<think>\n\n</think>\n\n", Thinking.CLOSED),
    ],
)
def test_where_a_prompt_ends(kind: str, tail: str, state: Thinking) -> None:
    """Earlier turns and what a user wrote do not count."""
    dialect, tokens = thinkers(kind)
    for before in ("", "<think>old</think>", "say <think>", "say </think>"):
        prompt = f"{TURN}user\n{before}{EOS}\n{TURN}{tail}"
        assert thinking_at_end(dialect, encoded(tokens, prompt), tokens) is state
    assert thinking_at_end(DIALECTS["llama3_json"], [1, 2], tokens) is Thinking.NONE


@pytest.mark.parametrize("kind", ["special", "added"])
@pytest.mark.parametrize("output", ["ok", "the tag <think> begins it", "... </think> ..."])
def test_tokens_of_the_template_end_the_tail(kind: str, output: str) -> None:
    """Turns red when a tool's output flips the state: DeepSeek's turns have added tokens, and no
    prompt behind a result."""
    family = DIALECTS["deepseek_v31"]
    turns = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
    markers = (*turns, *(family.thinking or ()), *family.markers)
    tokens = tokenizer(markers) if kind == "special" else tokenizer((), (*markers, "\n\n"))
    dialect = family.bound(tokens)
    asked = encoded(tokens, "<｜User｜>read it<｜Assistant｜></think>")
    assert thinking_at_end(dialect, asked, tokens) is Thinking.CLOSED
    result = f"<｜tool▁output▁begin｜>{output}<｜tool▁output▁end｜>"
    assert thinking_at_end(dialect, asked + encoded(tokens, result), tokens) is Thinking.NONE
    continued = "<｜User｜>read it<｜Assistant｜><think>First.\n\nThen"
    assert thinking_at_end(dialect, encoded(tokens, continued), tokens) is Thinking.OPEN


def test_a_continued_answer() -> None:
    dialect, tokens = thinkers("special")
    prompt = encoded(tokens, f"{TURN}assistant\n<think>\nI was about to")
    assert thinking_at_end(dialect, prompt, tokens) is Thinking.OPEN
    prompt = encoded(tokens, f"{TURN}assistant\n<think>\nI was</think>\n\nThe answer")
    assert thinking_at_end(dialect, prompt, tokens) is Thinking.CLOSED


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("state", [Thinking.OPEN, Thinking.NONE])
def test_a_budget_ends_it(kind: str, budget: int, state: Thinking) -> None:
    """With one end marker, and a call behind it. An end marker of several tokens may begin within
    the budget."""
    dialect, tokens = thinkers(kind)
    longest_end = len("</think>") - 1 if kind == "text" else 0
    for choice in ("auto", "required"):
        spec = answer_grammar(dialect, TOOLS, choice, thinking=state, thinking_budget=budget)
        assert spec is not None
        for seed in range(6):
            ids = walk(spec, tokens, seed, phrases=["<think>", "</th"])
            if ids is None:
                continue
            parts, parser = parsed(dialect, tokens, ids, thinking=state)
            assert parser.num_reasoning_tokens <= budget + longest_end
            assert ids.count(tokens.token_id("</think>") or 0) <= 1
            assert read(parts).calls or choice == "auto"
    alone = answer_grammar(dialect, (), thinking=state, thinking_budget=budget)
    assert alone is not None


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("end", ["</think>", "Here is my answer:", "<channel|>"])
def test_a_budget_holds_thoughts_of_one_byte(kind: str, end: str) -> None:
    """Catches one token too many behind a start marker, and a marker of several tokens that ends
    nothing."""
    family = replace(DIALECTS["hermes"], thinking=("<think>", end))
    texts = (*family.markers, "<think>", *(() if " " in end else (end,)))
    tokens = {
        "special": lambda: tokenizer(texts),
        "added": lambda: tokenizer((), texts),
        "text": lambda: tokenizer(),
    }[kind]()
    dialect = family.bound(tokens)
    spec = answer_grammar(dialect, TOOLS, thinking_budget=40)
    assert spec is not None
    cases = {"": True, "abc": True, f"a{end[:5]}\n": True, "x" * 40: True, "x" * 41: False}
    for thought, is_legal in cases.items():
        ids = encoded(tokens, f"<think>{thought}{end}Yes.")
        assert Follower(spec, tokens).accepts(ids) == is_legal, thought
        if is_legal:
            assert read(parsed(dialect, tokens, ids)[0]) == Answer("Yes.", thought.rstrip())
    assert not Follower(spec, tokens).accepts(encoded(tokens, "<think>abc"))


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("state", list(Thinking))
def test_a_response_format_follows_it(kind: str, state: Thinking) -> None:
    """JSON, or calls if there are tools."""
    dialect, tokens = thinkers(kind)
    thought = {"open": "so</think>\n\n", "closed": "", "none": "<think>\nso\n</think>\n\n"}[state]
    call = WRITERS["hermes"](Answer(calls=(("now", {}),)))
    for tools in ((), TOOLS):
        spec = answer_grammar(dialect, tools, thinking=state, response=SCHEMA)
        assert spec is not None
        for text, is_legal in (('{"a": 1}', True), ("words", False), (call, bool(tools))):
            ids = encoded(tokens, thought + text)
            assert Follower(spec, tokens).accepts(ids) == is_legal, (text, tools)
        parts, _ = parsed(
            dialect, tokens, encoded(tokens, thought + '{"a": 1}'), tools=tools, thinking=state
        )
        assert json.loads(read(parts).text) == {"a": 1}


def test_nothing_to_hold() -> None:
    dialect, tokens = thinkers("special")
    assert answer_grammar(dialect, ()) is None
    assert answer_grammar(dialect, (), response=SCHEMA, thinking=Thinking.CLOSED) is SCHEMA
    assert answer_grammar(DIALECTS["llama3_json"], (), thinking_budget=5) is None
    assert answer_grammar(DIALECTS["generic"], TOOLS, "none") is None
    spec = answer_grammar(dialect, TOOLS, "none")
    assert spec is not None
    call = WRITERS["hermes"](Answer(calls=(("now", {}),)))
    assert not Follower(spec, tokens).accepts(encoded(tokens, call))
    assert Follower(spec, tokens).accepts(encoded(tokens, "just text"))
    parser = AnswerParser(dialect, tokens)
    assert read(parser.take(encoded(tokens, "just")) + parser.finish()) == Answer("just")


def test_markers_of_a_token_and_a_text() -> None:
    """One marker may be a token with a text behind it."""
    tokens = tokenizer(("<|channel>", "<channel|>"))
    pair = ("<|channel>thought\n", "<channel|>")
    dialect = replace(DIALECTS["llama3_json"], thinking=pair).bound(tokens)
    ids = encoded(tokens, "<|channel>thought\nso<channel|>yes")
    parts, parser = parsed(dialect, tokens, ids, range(len(ids)))
    assert read(parts) == Answer("yes", "so")
    assert parser.num_reasoning_tokens == 2
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    assert Follower(spec, tokens).accepts(ids)
    prompt = encoded(tokens, f"{TURN}assistant\n<|channel>thought\n")
    assert thinking_at_end(dialect, prompt, tokens) is Thinking.OPEN
