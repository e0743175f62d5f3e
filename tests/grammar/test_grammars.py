"""Grammars of every kind, what is refused of them, and what hostile ones cost."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import QuireError, RequestError
from quire.plan.grammar import Grammar, trial
from quire.plan.grammar.guidance import MAX_CACHED, GuidanceGrammars
from quire.plan.grammar.schema import find_endless
from quire.protocol import EngineRequest, SamplingParams
from quire.protocol.grammar import MAX_SOURCE_BYTES, GrammarSpec, StructuredOutputsParams
from tests.grammar.bundled_tokens import EOS, grammars, tokenizer
from tests.grammar.hostile import HOSTILE
from tests.waiting import WAIT_S, wait_for

V = 4096


@pytest.fixture(scope="module")
def shared() -> Iterator[GuidanceGrammars]:
    found = grammars(V)
    yield found
    found.close()


def request(spec: GrammarSpec, **params: Any) -> EngineRequest:
    return EngineRequest(
        "", 0, np.zeros(1, np.int32), SamplingParams(**params), 0, frozenset([EOS]), grammar=spec
    )


def opened(found: GuidanceGrammars, asked: EngineRequest) -> Grammar:
    found.bounded(asked)
    return found.open(asked).result(WAIT_S)


def allowed(found: Grammar, text: str) -> set[int]:
    """Tokens that may follow a text."""
    output = np.array(tokenizer().encode(text, add_special_tokens=False), np.int32)
    (mask,) = found.matcher().masks(output, np.zeros(0, np.int32))
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(found: Grammar, text: str) -> bool:
    """Return whether the output may end after this text."""
    try:
        return EOS in allowed(found, text)
    except RequestError as error:
        assert "not what the grammar allows" in str(error)
        return False


KINDS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"json": {"type": "integer", "minimum": 5}}, ["7", "12"], ["4", "x"]),
    ({"json": '{"enum": ["a", null]}'}, ['"a"', "null"], ['"b"']),
    ({"json": True}, ["1", '{"a": []}'], ["x"]),
    ({"json_object": True}, ["{}", '{"a" : [1]}'], ["[1]", "1"]),
    ({"regex": "[a-c]+\\d"}, ["abc1"], ["1", "abcd1"]),
    ({"choice": ["yes", "no (a|b)", "+.*"]}, ["yes", "no (a|b)", "+.*"], ["no a", "++"]),
    ({"grammar": 'start: "a" b+\nb: /[xy]/'}, ["ax", "axyy"], ["a1"]),
    ({"grammar": 'root ::= "a" b+\nb ::= [xy]'}, ["ax", "axyy"], ["a1"]),
    (
        {"grammar": r'root ::= "\u0041BC" "\xe9\u00e9\u0022" "\U0001F600" "\[\]\\\n\t\r"'},
        ['ABCéé"😀[]\\\n\t\r'],
        ["䆼", "ABC"],
    ),
    (
        {"grammar": r"root ::= [\u0041-\u0043\]\[-] [^a-c\n] ."},
        ["Bxb", "]d\n", "-ée"],
        ["Da-", "Aab"],
    ),
    (
        {"grammar": 'root ::= "a"{2} "b"{1,} ("c" "d"){ ,2} "e"{1,2} "f"* "g"? "hi"+'},
        ["aabehi", "aabbcdcdeefghihi"],
        ["abehi", "aabehih", "aabcdcdcdehi", "aabeehhi"],
    ),
    (
        {
            "grammar": '# of two\r\nroot ::= ( # one\n  a |\n  b-c\n)+\r\n\na ::= "x" # "\n'
            'b-c ::= "y"\n  | b_c |\n  start\nb_c ::= "z"\nstart ::= "" [s]'
        },
        ["xyz", "s"],
        ["", "x#"],
    ),
    ({"grammar": 'root ::= a "x" b\na ::= [a-z]*\nb ::= "(" b ")" | ""'}, ["abx", "xx()"], ["ab"]),
    ({"grammar": 'root ::= ("ab" | "abc") r\nr ::= "cd" | "(" r ")"'}, ["abcd", "abc(cd)"], ["ab"]),
    ({"grammar": 'root ::= e\ne ::= e "+" e | [0-9]+ | "(" e ")"'}, ["1+(22+3)"], ["1+", "()"]),
    ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
    ({"json": {"type": "array"}, "whitespace_pattern": "_{0,3}"}, ["[1,__2]"], ["[1, 2]"]),
]


@pytest.mark.parametrize(("asked", "right", "wrong"), KINDS, ids=lambda value: str(value)[:50])
def test_every_kind_allows_its_texts_and_no_others(
    asked: dict[str, Any], right: list[str], wrong: list[str], shared: GuidanceGrammars
) -> None:
    found = opened(shared, request(StructuredOutputsParams(**asked).spec))
    assert [text for text in (*right, *wrong) if accepts(found, text)] == right


def test_structural_tags_hold_parts_of_free_text(shared: GuidanceGrammars) -> None:
    tags = {
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
            {"begin": "[[", "schema": {"type": "boolean"}, "end": "]]"},
        ],
        "triggers": ["<f=", "[["],
    }
    found = opened(shared, request(StructuredOutputsParams(structural_tag=tags).spec))
    for text in ("", "free text\n/", 'so <f=a>12</f> and <f=b>"x"</f>.', "[[true]]<f=a>1</f>"):
        assert EOS in allowed(found, text), text
    assert EOS not in allowed(found, "so <f=a>12")
    for text in ("so <f=c>", "so <f=a>x", "[[1]]"):
        with pytest.raises(RequestError, match="not what the grammar allows"):
            allowed(found, text)


def test_whitespace_is_bounded(shared: GuidanceGrammars) -> None:
    """Catches a model that writes line breaks for ever."""
    found = opened(shared, request(StructuredOutputsParams(json_object=True).spec))
    with pytest.raises(RequestError):
        allowed(found, "{" + "\n" * 9)
    with pytest.raises(RequestError):
        allowed(found, '{"a":' + " " * 9)


def test_a_schema_cannot_change_the_options(shared: GuidanceGrammars) -> None:
    schema = {"x-guidance": {"whitespace_pattern": "_*"}, "type": "array"}
    found = opened(shared, request(StructuredOutputsParams(json=schema).spec))
    with pytest.raises(RequestError):
        allowed(found, "[___")


def test_keys_keep_the_order_of_the_schema(shared: GuidanceGrammars) -> None:
    """Two schemas that differ in the order of keys are two grammars."""
    for names in ("ab", "ba"):
        schema = {
            "type": "object", "properties": {name: {"type": "integer"} for name in names},
            "required": ["a", "b"], "additionalProperties": False,
        }  # fmt: skip
        found = opened(shared, request(StructuredOutputsParams(json=schema).spec))
        assert EOS in allowed(found, f'{{"{names[0]}": 1, "{names[1]}": 2}}')
        with pytest.raises(RequestError):
            allowed(found, f'{{"{names[1]}"')


def test_the_end_beats_min_tokens_and_ignore_eos(shared: GuidanceGrammars) -> None:
    spec = StructuredOutputsParams(regex="a{1,3}").spec
    plain, long, endless = (
        opened(shared, request(spec, **more))
        for more in ({}, {"min_tokens": 16, "max_tokens": 99}, {"ignore_eos": True})
    )
    assert EOS in allowed(plain, "a")
    assert EOS not in allowed(long, "a")
    assert EOS not in allowed(endless, "a")
    assert allowed(plain, "aaa") == allowed(long, "aaa") == allowed(endless, "aaa") == {EOS}
    bounded = shared.bounded(
        replace(request(spec, ignore_eos=True, min_tokens=3), stop_token_ids=frozenset())
    )
    assert bounded.stop_token_ids == {EOS}
    assert bounded.params.min_tokens == 0


def test_stop_ids_end_only_where_the_grammar_may(shared: GuidanceGrammars) -> None:
    """Catches an end in the middle of a string, by another token that ends or by a plain one."""
    (letter,) = tokenizer().encode("b", add_special_tokens=False)
    spec = StructuredOutputsParams(json={"type": "string"}).spec
    asked = replace(request(spec), stop_token_ids=frozenset([letter, 5]))
    found = opened(shared, asked)
    assert not allowed(found, '"a') & {EOS, letter, 5}
    assert allowed(found, '"a"') == {letter, 5}


def test_masks_of_drafts(shared: GuidanceGrammars) -> None:
    found = opened(shared, request(StructuredOutputsParams(regex="[ab]{1,3}").spec))
    a, b, c = (tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "abc")
    matcher = found.matcher()
    output = np.array([a], np.int32)
    alone = [
        found.matcher().masks(np.array(tokens, np.int32), np.zeros(0, np.int32))[0]
        for tokens in ([a], [a, b], [a, b, b])
    ]
    for _ in range(2):  # drafts leave no trace
        masks = matcher.masks(output, np.array([b, b, EOS, a], np.int32))
        assert all(np.array_equal(m, n) for m, n in zip(masks, alone, strict=False))  # type: ignore[arg-type]
        assert masks[3:] == [None, None]
    assert matcher.masks(output, np.array([c, b], np.int32))[1:] == [None, None]
    assert matcher.masks(output, np.array([-1, V + 9], np.int32))[1:] == [None, None]
    (back,) = matcher.masks(np.zeros(0, np.int32), np.zeros(0, np.int32))
    (new,) = found.matcher().masks(np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert np.array_equal(back, new)  # type: ignore[arg-type]


NO_TRIGGER = {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"properties": {"a": {"pattern": "(?=x)"}}}}, "$.properties.a.pattern"),
    ({"json": {"items": {"anyOf": [{}, {"not": {}}]}}}, "$.items.anyOf[1].not"),
    ({"json": {"$defs": {"d": {"uniqueItems": True}}}}, "$.$defs.d.uniqueItems"),
    ({"json": {"properties": {"p": {"format": "path"}}}}, "$.properties.p.format ('path')"),
    ({"json": {"$ref": "https://example.com/a"}}, "$.$ref"),
    ({"json": {"type": "strin"}}, "$.type"),
    ({"json": "{"}, "no JSON Schema"),
    ({"json": "[1]"}, "no JSON Schema"),
    ({"regex": "("}, "regex is '(', which is no regular expression: unclosed group (at '(')"),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": "a{2,1}"}, "the start must be <= the end (at '{2,1}')"),
    ({"regex": "a{99999999}"}, "the grammar cannot be used: "),
    ({"json": {"type": "string", "pattern": "x("}}, "$.pattern ('x(' has a group without an end)"),
    ({"json": {"anyOf": [{"pattern": "\\p{Nope}"}]}}, "for $.anyOf[0].pattern ('\\\\p{Nope}': "),
    ({"json": {"items": {"oneOf": [{"type": "number"}, {"minimum": 1}]}}},
     "$.items.oneOf (options 0 and 1 may hold at once; anyOf takes such options)"),
    ({"json": {"allOf": [{"properties": {"a": {}}}, {"minProperties": 1}]}},
     "for $.allOf[1].minProperties (min/maxProperties only supported"),
    ({"json": False}, "no value satisfies"),
    ({"json": {"patternProperties": {"(?!a)b": {}}}}, "$.patternProperties ('(?!a)b' looks"),
    ({"grammar": "start: /(/"}, "the grammar has '(', which is no regular expression"),
    ({"grammar": "start: other"}, 'unknown name: "other"'),
    ({"grammar": "nonsense"}, "neither the rule of GBNF, root ::= …, nor that of Lark"),
    ({"grammar": 'root ::= a\na ::= "\\q"'}, "no grammar: line 2: '\\\\q' is no escape"),
    ({"grammar": 'root ::= "\\u12"'}, "line 1: '\\\\u' is no escape"),
    ({"grammar": 'root ::= "\\uD83D\\uDE00"'}, "'\\\\uD83D' is no character"),
    ({"grammar": 'root ::= "a'}, "line 1: the grammar ends within a text"),
    ({"grammar": '\nroot ::= (\n"a"'}, "line 3: a group has no end"),
    ({"grammar": 'root ::= * "a"'}, "'*' repeats nothing"),
    ({"grammar": 'root ::= "a"{3,2}'}, "{3,2} ends below its start"),
    ({"grammar": "root ::= [z-a]"}, "range of characters ends below its start"),
    ({"grammar": "root ::= b"}, "line 1: there is no rule 'b'"),
    ({"grammar": 'a ::= "b"'}, "no rule root"),
    ({"grammar": 'start: "a"\n x[stop="b"]: /a/'}, "sets stop or temperature"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "no structures"),
    ({"structural_tag": "{}"}, "takes"),
    ({"structural_tag": NO_TRIGGER}, "none of the triggers"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_names_what_is_wrong(asked: dict[str, Any], words: str, shared: GuidanceGrammars) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        opened(shared, request(StructuredOutputsParams(**asked).spec))


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"json": {}, "regex": "a"}, {"regex": 1}, {"choice": []}, {"choice": ["a", 1]},
        {"choice": "ab"}, {"json": {"a": float("nan")}}, {"json": {"a": {1}}},
        {"json": {}, "whitespace_pattern": "a", "disable_any_whitespace": True},
        {"regex": "a" * (MAX_SOURCE_BYTES + 1)}, {"json_object": False},
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_parameters_say_what_they_take(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputsParams(**asked)


def test_what_is_not_strict_is_dropped_and_said_once(
    shared: GuidanceGrammars, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    spec = StructuredOutputsParams(json=schema, strict=False).spec
    for _ in range(2):
        found = opened(shared, request(spec))
    assert EOS in allowed(found, "[1, 1]")
    assert [record.message for record in caplog.records if "uniqueItems" in record.message] == [
        "a schema has what is not held to: $.uniqueItems"
    ]


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "string", "pattern": "^(?!a).*$"}, ['"a"']),
        ({"type": "string", "pattern": r"(a)\1"}, ['"b"']),
        ({"type": "string", "format": "path"}, ['"b"']),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, ['{"a": 1}']),
        ({"type": "object", "patternProperties": {"(?=x)y": {"type": "null"}}}, ['{"xy": 1}']),
        ({"type": "array", "items": {"if": {}, "then": {"type": "null"}}}, ["[1]"]),
    ],
    ids=str,
)
def test_a_lenient_schema_goes_without_what_no_grammar_holds(
    schema: dict[str, Any], texts: list[str], shared: GuidanceGrammars
) -> None:
    """The library itself refuses some of it in any case."""
    found = opened(shared, request(StructuredOutputsParams(json=schema, strict=False).spec))
    for text in texts:
        assert EOS in allowed(found, text)
    with pytest.raises(RequestError):
        opened(shared, request(StructuredOutputsParams(json=schema).spec))


@pytest.mark.parametrize("asked", HOSTILE, ids=lambda value: str(value)[:50])
def test_a_hostile_grammar_is_served_or_refused(
    asked: dict[str, Any], shared: GuidanceGrammars
) -> None:
    """And the next one is served. What is refused says why; masks of what is not come at once."""
    try:
        found = opened(shared, request(StructuredOutputsParams(**asked).spec))
        matcher, output = found.matcher(), []
        for _ in range(4):
            (mask,) = matcher.masks(np.array(output, np.int32), np.zeros(0, np.int32))
            assert mask is not None
            output.append(
                int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
            )
            if output[-1] == EOS:
                break
    except RequestError as error:
        assert len(str(error)) < 1200
    fine = opened(shared, request(StructuredOutputsParams(regex="ok").spec))
    assert EOS in allowed(fine, "ok")


def test_a_trial_takes_no_longer_than_its_limit_and_costs_others_nothing(
    shared: GuidanceGrammars,
) -> None:
    """The thread that serves goes on meanwhile."""
    schema = {"type": "integer", "multipleOf": 999979}
    future = shared.open(request(StructuredOutputsParams(json=schema).spec))
    gaps: list[float] = []
    last = time.perf_counter()
    while not future.done():
        time.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    assert isinstance(future.exception(), RequestError)
    assert "to compile" in str(future.exception())
    assert len(gaps) > 100


def test_the_engine_reads_no_grammar_itself(
    shared: GuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a large schema is read where steps wait for Python's lock."""
    monkeypatch.setattr(trial, "grammar_text", None)
    monkeypatch.setattr(trial, "without_unsupported", None)
    monkeypatch.setattr(trial, "without_refused", None)
    found = opened(shared, request(StructuredOutputsParams(json={}, strict=False).spec))
    assert EOS in allowed(found, "17")


def test_the_child_gives_way_to_its_parent(shared: GuidanceGrammars) -> None:
    """Priorities count within a session, where Linux groups processes by it (autogroup)."""
    opened(shared, request(StructuredOutputsParams(regex="yes").spec))
    assert shared._trial is not None
    assert shared._trial._child is not None
    child = shared._trial._child.pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child) == min(own + 10, 19)
    assert os.getsid(child) == os.getsid(0)
    assert os.getpgid(child) != os.getpgid(0)  # Ctrl-C in a terminal is not for it


def test_a_child_ends_with_its_trial() -> None:
    """Fault: an engine that nobody shut down left a process and its pipes."""
    found = grammars(V)
    opened(found, request(StructuredOutputsParams(regex="yes").spec))
    assert found._trial is not None
    child = found._trial._child
    assert child is not None
    assert child.poll() is None
    del found
    gc.collect()
    wait_for(lambda: child.returncode is not None, "end of the child")  # its thread may hold it


def test_the_cache_is_bounded_and_keeps_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    found = grammars(V)
    compiled: list[GrammarSpec] = []
    compile_one = found._compile

    def count(spec: GrammarSpec) -> Any:
        compiled.append(spec)
        return compile_one(spec)

    monkeypatch.setattr(found, "_compile", count)
    spec = StructuredOutputsParams(json={"type": "strin"}).spec
    for _ in range(3):
        with pytest.raises(RequestError, match=r"\$\.type"):
            opened(found, request(spec))
    assert compiled == [spec]
    for i in range(MAX_CACHED + 5):
        opened(found, request(StructuredOutputsParams(regex=f"a{i}").spec))
    assert len(found._cache) == MAX_CACHED
    opened(found, request(StructuredOutputsParams(regex="a9").spec))
    assert len(compiled) == MAX_CACHED + 6
    found.close()
    found.close()


def _kill_in_trial(found: GuidanceGrammars, patched: pytest.MonkeyPatch, number: int) -> None:
    """Let the child get a signal once it has been given the next grammar."""
    child, write = found._ready()[0]._running(), trial._write

    def kill_then_write(pipe: Any, data: bytes) -> None:
        child.send_signal(signal.SIGSTOP)
        write(pipe, data)
        child.send_signal(number)
        child.send_signal(signal.SIGCONT)

    patched.setattr(trial, "_write", kill_then_write)


def _be_late(found: GuidanceGrammars, patched: pytest.MonkeyPatch) -> None:
    found._ready()[0]._running().send_signal(signal.SIGSTOP)
    patched.setattr(trial, "WALL_SECONDS", 0.0)


def _not_start(found: GuidanceGrammars, patched: pytest.MonkeyPatch) -> None:
    found._ready()[0].close()
    patched.setattr(trial, "_CHILD", "exit(3)")


def _start_late(found: GuidanceGrammars, patched: pytest.MonkeyPatch) -> None:
    found._ready()[0].close()
    patched.setattr(trial, "START_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("befall", "words"),
    [
        (lambda found, patched: _kill_in_trial(found, patched, signal.SIGKILL), "status -9"),
        (lambda found, patched: _kill_in_trial(found, patched, signal.SIGTERM), "status -15"),
        (_be_late, "takes more than 0 s"),
        (_not_start, r"does not start \(EOFError"),
        (_start_late, r"does not start \(TimeoutError"),
    ],
    ids=["killed", "terminated", "late", "not started", "started late"],
)
def test_a_trial_that_fails_by_chance_says_nothing_of_the_grammar(
    befall: Callable[[GuidanceGrammars, pytest.MonkeyPatch], None],
    words: str,
    shared: GuidanceGrammars,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns red when a good grammar stays refused after the machine was busy once."""
    text = "by chance: " + "".join(filter(str.isalnum, words))
    asked = request(StructuredOutputsParams(regex=text).spec)
    with monkeypatch.context() as patched:
        befall(shared, patched)
        with pytest.raises(QuireError, match=f"{words}.*send the request again"):
            opened(shared, asked)
    assert accepts(opened(shared, asked), text)


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV])
def test_a_grammar_that_a_child_died_of_stays_refused(
    number: int, shared: GuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(StructuredOutputsParams(regex=f"dies of {number}").spec)
    with monkeypatch.context() as patched:
        _kill_in_trial(shared, patched, number)
        with pytest.raises(RequestError, match="to compile"):
            opened(shared, asked)
    with pytest.raises(RequestError, match="to compile"):
        opened(shared, asked)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$"),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, None),
        ({"anyOf": [{"$ref": "#"}]}, "$"),
        ({"allOf": [{"$ref": "#"}]}, "$"),
        ({"$defs": {"d": {"$anchor": "x", "type": "null"}}, "$ref": "#x"}, None),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "$"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, None),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, None),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, None),
    ],
    ids=str,
)  # fmt: skip
def test_schemas_that_no_finite_value_satisfies(schema: dict[str, Any], place: str | None) -> None:
    found = find_endless(json.loads(json.dumps(schema)))
    assert (found is None) == (place is None), found


@pytest.mark.parametrize("limit", ["", "[max_tokens=3]"])
def test_drafts_and_changed_outputs_leave_no_trace(limit: str, shared: GuidanceGrammars) -> None:
    """A rule that counts its tokens is tested too: the library cannot take these back."""
    lark = f'start: some "." TEXT\nsome{limit}: WORDS\nWORDS: /[a-z ]+/\nTEXT: /[a-z]*/'
    found = opened(shared, request(StructuredOutputsParams(grammar=lark).spec))
    matcher = found.matcher()
    words = [i for i in range(V) if re.fullmatch(b"[a-z]", tokenizer().token_bytes(i))][:6]
    dot = tokenizer().encode(".", add_special_tokens=False)[0]
    none = np.zeros(0, np.int32)

    def fresh(output: list[int], drafts: list[int]) -> list[bytes | None]:
        masks = found.matcher().masks(np.array(output, np.int32), np.array(drafts, np.int32))
        return [None if mask is None else mask.tobytes() for mask in masks]

    outputs: list[list[int]] = [[], words[:1], words[:2], [words[3]], words[:3], [*words[:3], dot]]
    for output in outputs:
        for drafts in ([], words[:2], [*words[:2], dot, words[0]], [dot, dot]):
            got = matcher.masks(np.array(output, np.int32), np.array(drafts, np.int32))
            seen = [None if mask is None else mask.tobytes() for mask in got]
            assert seen == fresh(output, drafts)
    (mask,) = matcher.masks(np.array(words[:3], np.int32), none)
    assert mask is not None
    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert (words[0] in bits) == (limit == "")
