"""Schemas in the library's form: they allow the values that JSON Schema allows."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from quire.base.errors import RequestError
from quire.plan.grammar.source import grammar_text
from quire.plan.grammar.vocabulary import Vocabulary, spelled_by_bytes
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.json_schema.name_cells import name_cells
from quire.protocol.json_schema.patterns import PatternError, whole_regex
from tests.profiles import seeds

TEXTS = [
    "", "a", "a]", "b]", "&]", "]", "[", "&", "abc", "a,b", "a[b]", "<a", "aaa", "a{,3}",
    "\x00", "\U0001f600", "\U0001f603", "~", "-", ",", "+", "/-_", "a\nc", "a\rc", "a\u2028c",
    "axc", "1", "\u0967", "\xe9", "_", "\xa0", "\ufeff", "\u180e", " ", "x", "1x", "ab", "ba",
    "b", "\n", "a\n", "\x08", "AB", "z", "a{", "\t\x0b\x0c", "\u03a9", "abab",
]  # fmt: skip
MATCHES: list[tuple[str, list[str]]] = [
    (r"^[[a]]$", ["a]"]),
    (r"[a-z&&[^b]]", ["a]", "b]", "&]", "a[b]"]),
    (r"^[\w[]$", ["a", "[", "1", "_", "x", "b", "z"]),
    (r"\<a", ["<a"]),
    (r"^a{,3}$", ["a{,3}"]),
    (r"^\0$", ["\x00"]),
    (r"^\ud83d\ude00$", ["\U0001f600"]),
    (r"^[\ud83d\ude00-\ud83d\ude4f]$", ["\U0001f600", "\U0001f603"]),
    (r"^[a~~b]$", ["a", "~", "b"]),
    (r"^[+--]$", ["-", ",", "+"]),
    (r"^\/\-\_$", ["/-_"]),
    (r"^a.c$", ["abc", "axc"]),
    (r"^\d$", ["1"]),
    (r"^\w$", ["a", "1", "_", "x", "b", "z"]),
    (r"^\s$", ["\xa0", "\ufeff", " ", "\n"]),
    (r"(^|[^0-9])x", ["axc", "x"]),
    (r"^$", [""]),
    (r"a$", ["a", "<a", "aaa", "ba"]),
    (r"^(?<n>a)+?$", ["a", "aaa"]),
    (r"^\cJ$", ["\n"]),
    (r"^[\b]$", ["\x08"]),
    (r"^\x41\u0042$", ["AB"]),
    (r"^\u{1F600}$", ["\U0001f600"]),
    (r"^[\d-z]$", ["-", "1", "z"]),
    (r"^]$", ["]"]),
    (r"^a{$", ["a{"]),
    (r"^\p{L}$", ["a", "\xe9", "x", "b", "z", "\u03a9"]),
    (r"^\t\v\f$", ["\t\x0b\x0c"]),
    (r"^(?:|ab){2}$", ["", "ab", "abab"]),
    (r"^a|b$", [
        "a", "a]", "abc", "a,b", "a[b]", "aaa", "a{,3}", "a\nc", "a\rc", "a\u2028c", "axc",
        "ab", "b", "a\n", "a{", "abab",
    ]),
]  # fmt: skip
MATCHES_NOT: list[tuple[str, list[str]]] = [
    (r"^[^[\]]+$", ["", "a]", "b]", "&]", "]", "[", "a[b]"]),
    (r"^[^]$", [
        "", "a]", "b]", "&]", "abc", "a,b", "a[b]", "<a", "aaa", "a{,3}", "/-_", "a\nc",
        "a\rc", "a\u2028c", "axc", "1x", "ab", "ba", "a\n", "AB", "a{", "\t\x0b\x0c",
        "abab",
    ]),
    (r"^\S+$", ["", "a\nc", "a\rc", "a\u2028c", "\xa0", "\ufeff", " ", "\n", "a\n", "\t\x0b\x0c"]),
    (r"^\P{L}$", [
        "", "a", "a]", "b]", "&]", "abc", "a,b", "a[b]", "<a", "aaa", "a{,3}", "/-_",
        "a\nc", "a\rc", "a\u2028c", "axc", "\xe9", "x", "1x", "ab", "ba", "b", "a\n", "AB",
        "z", "a{", "\t\x0b\x0c", "\u03a9", "abab",
    ]),
]  # fmt: skip
"""Texts of `TEXTS` in which Node 20 finds these patterns, with the flag u where it takes it."""


@pytest.fixture(scope="module")
def byte_tokens() -> LLTokenizer:
    vocabulary = Vocabulary([*(bytes([i]) for i in range(256)), b""], [256], 256)
    return vocabulary.tokenizer(spelled_by_bytes(vocabulary))


def matcher(tokens: LLTokenizer, schema: Any, *, is_strict: bool = True) -> LLMatcher:
    text = grammar_text(GrammarSpec(GrammarKind.JSON, json.dumps(schema), is_strict))
    found = LLMatcher(tokens, text, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepts(found: LLMatcher, text: str) -> bool:
    ids, its = list(text.encode()), found.deep_copy()
    return its.try_consume_tokens(ids) == len(ids) and its.is_accepting()


def accepted(tokens: LLTokenizer, schema: Any, values: list[Any]) -> list[Any]:
    found = matcher(tokens, schema)
    return [value for value in values if accepts(found, json.dumps(value, ensure_ascii=False))]


@pytest.mark.parametrize(("pattern", "right"), MATCHES, ids=lambda value: str(value)[:30])
def test_patterns_mean_what_they_mean_in_javascript(
    pattern: str, right: list[str], byte_tokens: LLTokenizer
) -> None:
    """Also as names, and when a translation is translated once more."""
    texts = [json.loads(json.dumps(text)) for text in TEXTS]
    assert accepted(byte_tokens, {"type": "string", "pattern": pattern}, texts) == right
    again = f"^(?:{whole_regex(pattern)})$"
    assert whole_regex(again) in (whole_regex(pattern), f"(?:{whole_regex(pattern)})")
    try:
        name_cells((pattern, "^x"))
    except PatternError:
        return
    schema = {"patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    names = [text for text in texts if text.isprintable()]
    found = accepted(byte_tokens, {"type": "object", **schema}, [{name: None} for name in names])
    assert found == [{name: None} for name in right if name.isprintable()]


@pytest.mark.parametrize(("pattern", "wrong"), MATCHES_NOT, ids=lambda value: str(value)[:30])
def test_negated_patterns_mean_what_they_mean_in_javascript(
    pattern: str, wrong: list[str], byte_tokens: LLTokenizer
) -> None:
    found = accepted(byte_tokens, {"type": "string", "pattern": pattern}, TEXTS)
    assert [text for text in TEXTS if text not in found] == wrong


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "looks around"), ("(?<!a)b", "looks around"), (r"\bfoo", "looks around"),
        (r"(a)\1", "looks around or back"), (r"(?<n>a)\k<n>", "looks around or back"),
        ("[a--b]", "range of characters"), ("a^b", "found in no text"), ("[]", "found in no text"),
        (r"x\Z", "no escape of ECMA-262"), ("(^a|b){2}", "repeats ^ or $"), ("a**", "repeats"),
        (r"\ud83d", "half of a surrogate pair"), ("(?m)^a", "flags"), ("(" * 99 + ")" * 99, "deep"),
        ("a{10001}", "10,000"), ("(", "without an end"), (")", "did not begin"), ("[a", "an end"),
    ],
)  # fmt: skip
def test_patterns_that_no_grammar_holds_say_why(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why.replace("^", r"\^").replace("$", r"\$")):
        whole_regex(pattern)


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
PARTS: dict[str, Any] = {
    "anyOf": [{"type": "object"}],
    "oneOf": [{"properties": {"k": {"const": name}}, "required": ["k"]} for name in "xy"],
    "allOf": [{"type": "object"}],
}
SPELLED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OPEN, ['{"a":1}', '{"b":"s"}', '{"a":1,"aa":"s"}'], [r'{"\u0061":"s"}', '{"a":"s"}']),
    (
        {"properties": {"role": {"enum": ["user"]}}, "additionalProperties": {"type": "string"}},
        ['{"role":"user","rol":"x"}', '{"rolex":"x"}', "{}"],
        [r'{"role":"user","\u0072ole":"admin"}', r'{"r\u006Fle":"admin"}', '{"role":"admin"}'],
    ),
    (
        {"patternProperties": {"^x-": {"type": "integer"}}},
        ['{"x-a":1}', '{"y":"s"}', '{"y":1,"x-":2}'],
        ['{"x-a":"s"}', r'{"\u0078-a":"s"}', r'{"x\u002da":"s"}'],
    ),
    (
        {"properties": {"a": {"type": "null"}}, "patternProperties": {"b": {"type": "integer"}},
         "additionalProperties": {"type": "string"}},
        ['{"a":null,"b":1,"c":"s"}', '{"ab":1}'],
        [r'{"\u0061":"s"}', r'{"\u0062":"s"}', '{"ab":"s"}', '{"b":"s"}', '{"c":1}'],
    ),
    (
        {"patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 5}},
         "additionalProperties": False},
        ['{"a":9}', '{"b":5}', '{"ab":5}', '{"b":"s"}'],
        ['{"ab":9}', '{"b":9}', '{"ab":"s"}', '{"c":1}'],
    ),
    (
        {"properties": {"xa": {}, "y": {}}, "patternProperties": {"a": False, "b": {"maximum": 1}}},
        ['{"y":1}', '{"b":1}', '{"y":1,"c":2}'],
        ['{"xa":1}', '{"b":2}', '{"ab":1}', r'{"\u0062":2}', r'{"x\u0061":1}'],
    ),
    (
        {"allOf": [OPEN, {"properties": {"b": {"type": "null"}}, "additionalProperties": False}]},
        ["{}", '{"b":null}'],
        ['{"a":1}', r'{"\u0061":1}', '{"c":1}'],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/o"}], "properties": {"b": {"type": "null"}},
         "$defs": {"o": {**OPEN, "required": ["a"]}}},
        ['{"a":1}', '{"a":1,"b":null}', '{"a":1,"c":"s"}'],
        ['{"b":null}', r'{"a":1,"\u0062":1}', r'{"\u0061":1}', r'{"a":1,"\u0061":"s"}'],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1,
         "maxProperties": 2, "additionalProperties": False},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ["{}", '{"c":1}'],
    ),
    (
        {"oneOf": [
            {"properties": {"kind": {"const": "a"}, "n": {"minimum": 1}}, "required": ["kind"]},
            {"$ref": "#/$defs/b"},
        ], "type": "object", "$defs": {"b": {
            "properties": {"kind": {"const": "b"}, "n": {"type": "null"}}, "required": ["kind"],
        }}},
        ['{"kind":"a","n":1}', '{"kind":"b","n":null}'],
        ['{"kind":"b","n":1}', '{"kind":"a","n":0}', r'{"kind":"a","k\u0069nd":"b"}'],
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#/definitions/n",
         "maxLength": 1}, "definitions": {"n": {"type": "string", "maxLength": 3}}},
        ['["abc"]'],
        ['["abcd"]', "[1]"],
    ),
    *(
        ({name: PARTS[name] for name in names}, ['{"k":"x"}', '{"k":"y"}'], ['{"k":"z"}', "{}"])
        for names in itertools.permutations(("anyOf", "oneOf", "allOf"))
    ),
    *(
        (
            {
                "x-quire-kept": kept,
                "properties": {
                    "a": {"oneOf": [{"type": "string"}]},
                    "b": {"$ref": "#/properties/a/oneOf/0"},
                    "c": {"$ref": own},
                },
                "$defs": {"n": {"type": "null"}},
            },
            ['{"a":"s","b":"s"}', '{"c":null}'],
            ['{"a":1}', '{"b":1}', '{"c":1}'],
        )
        for kept, own in (
            (1, "#/$defs/n"), ({"1": {"type": "null"}}, "#/x-quire-kept/1"), ([], "#/$defs/n"),
        )
    ),
    ({"exclusiveMinimum": True, "minimum": 3, "type": "integer"}, ["4"], ["3"]),
    ({"$schema": "https://example.com/mine", "type": "null"}, ["null"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), SPELLED, ids=lambda value: str(value)[:50])
def test_no_spelling_evades_a_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str], byte_tokens: LLTokenizer
) -> None:
    """Turns red when the key `\\u0061` is another one than `a`."""
    for is_strict in (True, False):
        found = matcher(byte_tokens, schema, is_strict=is_strict)
        assert [text for text in (*right, *wrong) if accepts(found, text)] == right


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        ({"minimum": -(2**63)}, [0, -(10**18), 2**70], [-(2**63) - 1]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, 2**63 - 1, -(10**18)], [2**63, -(2**64)]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1, 2**64]),
        ({"minimum": -(2**31), "maximum": 2**32 - 1}, [-(2**31), 2**32 - 1], [2**32, -(2**31) - 1]),
        ({"exclusiveMaximum": 2**53 + 2}, [2**53], [2**53 + 2, 2**53 + 3]),
        ({"maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
        ({"minimum": 10**18}, [10**18, 2**63 - 1], [10**18 - 1, 5]),
        ({"exclusiveMinimum": 1.5, "exclusiveMaximum": 4.0}, [2, 3], [1, 4]),
        ({"maximum": 1e400}, [5], []),
    ],
    ids=str,
)
def test_integers_are_held_to_64_bits(
    bounds: dict[str, Any], right: list[int], wrong: list[int], byte_tokens: LLTokenizer
) -> None:
    """Turns red when the limits that Rust, Go and protobuf write refuse a schema."""
    schema = {"type": "integer", **bounds}
    assert accepted(byte_tokens, schema, [*right, *wrong]) == right


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date", ["2020-02-29", "2000-02-29", "2021-12-31", "0000-01-30"],
         ["2021-02-29", "1900-02-29", "2020-02-30", "2021-04-31", "2021-13-01", "2021-00-10"]),
        ("time", ["23:59:60Z", "00:00:00.5+23:59", "23:59:60.9+00:00"],
         ["22:59:60Z", "23:58:60Z", "24:00:00Z", "12:00:60+01:00", "12:00:00", "12:00:00+24:00"]),
        ("date-time", ["2020-02-29T23:59:60Z", "1998-12-31t10:00:00-08:00"],
         ["2021-02-29T00:00:00Z", "1998-12-31T22:59:60Z", "1998-12-31 10:00:00Z"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [{}, {"pattern": "^[^x]*$"}], ids=str)
def test_formats_of_dates_and_times(
    form: str, right: list[str], wrong: list[str], beside: Any, byte_tokens: LLTokenizer
) -> None:
    schema = {"type": "string", "format": form, **beside}
    assert accepted(byte_tokens, schema, [*right, *wrong]) == right


NAMES = ["a", "b", "ab", "ba", "x-a", "c", "", "é"]
PATTERNS = ["^a", "b$", "^x-", "a", "^[a-z]$", ".*", "^(a|b)+$", "[^a]"]


class Objects:
    """Makes schemas of objects and objects, by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int = 2) -> dict[str, Any]:
        draw = self._random
        found: dict[str, Any] = {}
        choices: list[tuple[float, str, Any]] = [
            (0.3, "type", lambda: "object"),
            (0.6, "properties", lambda: {k: self._value(depth) for k in draw.sample(NAMES, 2)}),
            (
                0.3,
                "patternProperties",
                lambda: {k: self._value(0) for k in draw.sample(PATTERNS, 2)},
            ),
            (0.4, "additionalProperties", lambda: draw.choice([False, True, {"type": "string"}])),
            (0.2, "required", lambda: draw.sample(NAMES, 1)),
            (0.1, "minProperties", lambda: draw.randint(0, 2)),
            (0.06, "$ref", lambda: "#/$defs/d"),
        ]
        if depth:
            inner = self.schema
            choices += [
                (0.25, "allOf", lambda: [inner(depth - 1) for _ in range(draw.randint(1, 2))]),
                (0.12, "anyOf", lambda: [inner(depth - 1) for _ in range(draw.randint(1, 2))]),
                (0.08, "oneOf", lambda: [inner(depth - 1) for _ in range(draw.randint(1, 2))]),
                (0.05, "enum", lambda: [{"a": 1}, {"b": "x"}, 1]),
            ]
        draw.shuffle(choices)
        for chance, keyword, make in choices:
            if draw.random() < chance:
                found[keyword] = make()
        return found

    def _value(self, depth: int) -> Any:
        simple: list[Any] = [
            {"type": "integer", "minimum": 2}, {"type": "string"}, {}, False, {"enum": ["x", 1]},
        ]  # fmt: skip
        return self._random.choice([*simple, self.schema(depth - 1) if depth else {"type": "null"}])

    def object(self) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(0, 3))
        values: list[Any] = [1, 2, "x", None, {"a": 1}, {"b": "x"}, {}]
        return {name: self._random.choice(values) for name in names}


def spellings(value: dict[str, Any]) -> Iterator[str]:
    """Texts of an object: all orders, with and without escapes in names."""
    for pairs in itertools.permutations(value.items()):
        for escapes in (False, True):
            names = [
                f'"\\u{ord(name[0]):04x}{name[1:]}"' if escapes and name else f'"{name}"'
                for name, _ in pairs
            ]
            values = [json.dumps(each) for _, each in pairs]
            yield f"{{{','.join(f'{n}:{v}' for n, v in zip(names, values, strict=True))}}}"


@pytest.mark.parametrize("seed", seeds(3))
def test_objects_are_those_that_a_validator_takes(seed: int, byte_tokens: LLTokenizer) -> None:
    """Schemas are combined in every way: no wrong value passes in any spelling, and each right one
    passes in one."""
    objects, num_compiled = Objects(seed), 0
    for _ in range(12):
        schema = {**objects.schema(), "$defs": {"d": objects.schema(0)}}
        try:
            found = matcher(byte_tokens, schema)
        except (RequestError, AssertionError):
            continue  # refused, with a reason
        num_compiled += 1
        validator = Draft202012Validator(schema)
        for value in [objects.object() for _ in range(12)]:
            is_right = any(accepts(found, text) for text in spellings(value))
            assert is_right == validator.is_valid(value), (value, schema)
    assert num_compiled
