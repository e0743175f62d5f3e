"""What a model of each family writes: its grammar takes it, and its parser reads it as it was
meant, however it is cut."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire.dialect import (
    CallArguments,
    CallStart,
    Dialect,
    NamedTool,
    Text,
    ToolChoice,
    answer_grammar,
)
from quire.dialect.families import DIALECTS
from quire.dialect.spec import ArgumentStyle
from quire.rendering import Tokenizer
from tests.dialect.answers import TOOLS, Answer, parsed, read
from tests.dialect.models import Follower, tokenizer, walk
from tests.dialect.written import WRITERS, encoded, plain
from tests.pairs import LAWS_BY_PAIRS
from tests.profiles import examples

pytestmark = LAWS_BY_PAIRS

NAMES = sorted(name for name, each in DIALECTS.items() if each.style is not ArgumentStyle.CHANNELS)
KINDS = [(name, kind) for name in NAMES for kind in ("special", "added", "text")]
"""Markers as special tokens, as tokens that are text, and as text alone."""
WEATHER = ("get_weather", {"city": "Oslo", "days": 3, "exact": True, "area": [1.5, 2]})
NASTY = (
    'a "quoted" \\ back\\nslash',
    "line\nbreak\u2028sep\u2029 é😀\ttab",
    '</tool_call> <tool_call>\n{"name": "now"',
    "</parameter> <parameter=x> ]}) [now()] '",
    "02134",
    "<think>no</think>",
    "",
)
ANSWERS = [
    Answer("Just text, {no} [call].\n\nTwo\tlines é😀"),
    Answer(calls=(WEATHER,)),
    Answer("Let me look: <tool", calls=(WEATHER,)),
    Answer(calls=(("now", {}), WEATHER, ("now", {}))),
    *(Answer(calls=(("files.write", {"path": "a", "text": text}),)) for text in NASTY),
    Answer(calls=(("get_weather", {"city": "x", "exact": False, "unit": None}),)),
]


def model(name: str, kind: str = "special") -> tuple[Dialect, Tokenizer]:
    family = DIALECTS[name]
    texts = (*family.markers, *(family.thinking or ()), *family.stops)
    tokens = {
        "special": lambda: tokenizer(texts),
        "added": lambda: tokenizer((), texts),
        "text": lambda: tokenizer(),
    }[kind]()
    return family.bound(tokens), tokens


ALL = pytest.mark.parametrize(("name", "kind"), KINDS)


def parsable(name: str, answer: Answer) -> bool:
    """Some families have no text beside calls."""
    return not (DIALECTS[name].is_bare and answer.text and answer.calls)


@ALL
def test_what_is_written_is_allowed_and_read(name: str, kind: str) -> None:
    dialect, tokens = model(name, kind)
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    for answer in ANSWERS:
        if not parsable(name, answer):
            continue
        text = WRITERS[name](answer)
        ids = encoded(tokens, text)
        parts, parser = parsed(dialect, tokens, ids)
        assert read(parts).without_ids == answer, plain(text)
        assert parser.has_calls == bool(answer.calls)
        assert Follower(spec, tokens).accepts(ids), plain(text)


@ALL
@examples(8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_chunking_is_the_whole(name: str, kind: str, data: st.DataObject) -> None:
    dialect, tokens = model(name, kind)
    answer = data.draw(st.sampled_from([a for a in ANSWERS if parsable(name, a)]))
    ids = encoded(tokens, WRITERS[name](answer))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    parts, _ = parsed(dialect, tokens, ids, cuts)
    assert read(parts).without_ids == answer
    parts, _ = parsed(dialect, tokens, ids, range(len(ids)))
    assert read(parts).without_ids == answer


@ALL
def test_a_cut_answer_keeps_what_came(name: str, kind: str) -> None:
    """Whatever token is the last: names are whole, arguments are prefixes, nothing is doubled."""
    dialect, tokens = model(name, kind)
    answer = Answer(calls=(WEATHER, ("files.write", {"path": "p", "text": NASTY[1]})))
    ids = encoded(tokens, WRITERS[name](answer))
    whole, _ = parsed(dialect, tokens, ids)
    arguments = ["", ""]
    for part in whole:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    for length in range(len(ids)):
        seen = ["", ""]
        for part in parsed(dialect, tokens, ids[:length])[0]:
            match part:
                case CallStart():
                    assert part.name == answer.calls[part.index][0]
                case CallArguments():
                    seen[part.index] += part.text
                case Text():  # what may have begun a call, and what stands between two
                    is_start = dialect.opening.startswith(part.text.strip().rstrip("\ufffd"))
                    assert is_start or dialect.is_bare, part
                case _:
                    raise AssertionError(part)
        known = [text.rstrip("\ufffd") for text in seen]  # part of a character
        assert all(map(str.startswith, arguments, known)), (seen, length)


@pytest.mark.parametrize("name", [name for name in NAMES if not DIALECTS[name].is_bare])
def test_text_after_calls_is_kept(name: str) -> None:
    """And white space beside calls is dropped."""
    dialect, tokens = model(name)
    text = WRITERS[name](Answer("Before.", calls=(("now", {}),)))
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    for after, expected in (("\n\nAfter, <x>.", "Before.\n\nAfter, <x>."), ("", "Before.")):
        ids = encoded(tokens, text.replace("Before.", "Before.\n") + after)
        for cuts in ((), range(len(ids))):
            found = read(parsed(dialect, tokens, ids, cuts)[0])
            assert found.without_ids == Answer(expected, calls=(("now", {}),))
        assert Follower(spec, tokens).accepts(ids)


@pytest.mark.parametrize(("name", "kind"), [each for each in KINDS if each[1] != "added"])
@pytest.mark.parametrize("choice", ["auto", "required", NamedTool("get_weather")], ids=str)
def test_random_models_write_calls_that_validate(name: str, kind: str, choice: ToolChoice) -> None:
    dialect, tokens = model(name, kind)
    schemas = {tool.name: dict(tool.schema) for tool in TOOLS}
    phrases = [dialect.opening, *([dialect.parameter.close] if dialect.parameter else [])]
    num_ended = 0
    for parallel in (True, False):
        spec = answer_grammar(dialect, TOOLS, choice, parallel=parallel)
        assert spec is not None
        for seed in range(2):
            ids = walk(spec, tokens, seed, phrases=phrases)
            if ids is None:
                continue
            num_ended += 1
            found = read(parsed(dialect, tokens, ids)[0])
            for tool, arguments in found.calls:
                jsonschema.validate(arguments, schemas[tool])
            assert found.calls or choice == "auto"
            assert len(found.calls) <= 1 or (parallel and not isinstance(choice, NamedTool))
            assert choice in ("auto", "required") or found.calls[0][0] == "get_weather"
    assert num_ended >= 1
