"""Translates a request's grammar into the text that the grammar library compiles."""

from __future__ import annotations

import bisect
import copy
import json
import re
from collections.abc import Iterator
from typing import Any, cast

from llguidance import LLMatcher

from quire.base.errors import RequestError
from quire.plan.grammar.gbnf import compiled_gbnf, is_gbnf
from quire.plan.grammar.rewriting import rewrite
from quire.plan.grammar.schema import find_endless, is_too_deep
from quire.protocol.codec import is_unicode
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.json_schema import (
    allow_others,
    find_malformed,
    find_unknown_type,
    find_unsupported,
    modernize,
    subschemas,
    without_unsupported,
)

__all__ = ["grammar_text", "lenient_schemas", "refusal", "refuse_null", "without_refused"]

WHITESPACE = "[ \\n\\t]{0,8}"
"""Without a bound a model may write whitespace for ever."""

_REGEX_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$]")
_BAD_REGEX = re.compile(
    r"regex parse error:\n    (?P<regex>.*)\n    (?P<marks> *\^+)\nerror: (?P<fault>[^\n]*)"
)
"""The library's words, of a regular expression in one line."""
_SUSPECTS = (
    "pattern", "format", "multipleOf", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties", "additionalProperties", "patternProperties", "const", "enum", "oneOf",
    "anyOf", "allOf", "$ref", "required", "prefixItems", "items", "properties", "$anchor", "$id",
    "type",
)  # fmt: skip
_LARK = re.compile(r"^\s*(?:%llguidance\b|start\b[^:]*:)", re.MULTILINE)
_REFUSED_IN_LARK = re.compile(r"\[[^\]\"/]*\b(stop|temperature)\s*=")


def _check(spec: GrammarSpec, *, drops_types: bool) -> None:
    """RequestError for what can be told without compiling."""
    refuse_null(spec)
    if spec.kind is GrammarKind.JSON:
        _checked_schema(spec.source, "json", is_strict=spec.is_strict, drops_types=drops_types)
    elif spec.kind is GrammarKind.STRUCTURAL_TAG:
        _tags(spec)


def grammar_text(
    spec: GrammarSpec, *, drops_refused: bool = False, drops_types: bool = False
) -> str:
    """Return the text for the library. RequestError if the source is plainly no grammar.
    drops_refused: leave out what `without_refused` does, which takes time. drops_types: leave out
    types that JSON has not, if the schema is not strict."""
    _check(spec, drops_types=drops_types)
    if spec.kind is GrammarKind.JSON_OBJECT:
        return _of_schema('{"type": "object"}', spec)
    if spec.kind is GrammarKind.JSON:
        held = _held_schema(spec.source, is_strict=spec.is_strict, drops_refused=drops_refused)
        return _of_schema(json.dumps(held, ensure_ascii=False), spec)
    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.source)
    if spec.kind is GrammarKind.CHOICE:
        choices = cast("list[str]", json.loads(spec.source))
        return LLMatcher.grammar_from_regex("|".join(f"({_literal(each)})" for each in choices))
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        return _of_tags(spec, drops_refused=drops_refused)
    if spec.kind is GrammarKind.ANSWER:
        return _of_answer(spec, drops_refused=drops_refused)
    return compiled_gbnf(spec.source) if is_gbnf(spec.source) else _of_lark(spec.source)


def _of_lark(source: str) -> str:
    if not _LARK.search(source):
        raise RequestError(
            "structured_outputs.grammar is no grammar: it has neither the rule of GBNF, "
            "root ::= …, nor that of Lark, start: …. Write one of them."
        )
    if _REFUSED_IN_LARK.search(source):
        raise RequestError(
            "structured_outputs.grammar sets stop or temperature of a rule, which has no meaning "
            "here. Leave them out."
        )
    return LLMatcher.grammar_from_lark(source)


def lenient_schemas(spec: GrammarSpec) -> Iterator[str]:
    """The JSON Schemas of a grammar from which keywords may be dropped."""
    if spec.kind is GrammarKind.ANSWER:
        for part in json.loads(spec.source)["grammars"].values():
            if part["kind"] == GrammarKind.JSON and not part["is_strict"]:
                yield part["source"]
    elif spec.kind is GrammarKind.JSON and not spec.is_strict:
        yield spec.source
    elif spec.kind is GrammarKind.STRUCTURAL_TAG and not spec.is_strict:
        for tag in json.loads(spec.source)["structures"]:
            yield json.dumps(tag["schema"], ensure_ascii=False)


def without_refused(schema: object, *, is_strict: bool = False) -> list[str]:
    """Remove the keywords that the library refuses from a schema of one's own, one after another,
    as few as possible. Returns the paths with the library's words."""
    found: list[str] = []
    while words := _library_fault(schema, is_strict=is_strict):
        if "schema is false" in words and not is_strict:
            break  # as the client has it: no value satisfies the whole
        places = _suspects(schema)
        fine = bisect.bisect_left(
            range(1, len(places) + 1),
            True,
            key=lambda count: not _library_fault(schema, is_strict=is_strict, without=count),
        )
        if fine == len(places):
            break
        path, holder, key, owner = places[fine]
        value = holder.pop(key)
        is_name = holder is not owner
        what = f"{key[:80]!r}: " if is_name else f"{value[:80]!r}: " if key == "pattern" else ""
        name = "patternProperties" if is_name else key
        found.append(f"{path}.{name} ({what}{_short(words)})")
        if is_name:
            found += allow_others(path, owner)
    return found


def _library_fault(schema: object, *, is_strict: bool, without: int = 0) -> str:
    """Return why the library refuses a schema, "" if it does not. without: suspects to leave out,
    the first ones."""
    held = copy.deepcopy(schema)
    for _, holder, key, owner in _suspects(held)[:without]:
        holder.pop(key, None)
        if holder is not owner:
            allow_others("", owner)
    if isinstance(held, dict):
        rewrite(cast("dict[str, Any]", held))
    text = json.dumps(held, ensure_ascii=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"lenient": not is_strict})
        return LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        return str(error)


_Suspect = tuple[str, dict[str, Any], str, dict[str, Any]]
"""The path of a subschema, what holds a keyword or a pattern of names, its name, the subschema."""


def _suspects(schema: object) -> list[_Suspect]:
    """Return the keywords that the library may refuse, inner ones first, and those first that more
    seldom have others depend on them."""
    found: list[_Suspect] = []
    for path, node in reversed(list(subschemas("$", schema))):
        names = node.get("patternProperties")
        if isinstance(names, dict):
            named = cast("dict[str, Any]", names)
            found += [(path, named, name, node) for name in named]
        found += [(path, node, keyword, node) for keyword in _SUSPECTS if keyword in node]
    order = {keyword: place for place, keyword in enumerate(_SUSPECTS)}
    return sorted(found, key=lambda each: order.get(each[2], -1) if each[1] is each[3] else -1)


def _short(words: str) -> str:
    """Return the library's words in one line."""
    broken = _BAD_REGEX.search(words)
    text = broken["fault"] if broken else words.partition("<backtrace>")[0]
    text = text.replace("<non-verbose/>", "")
    return " ".join(text.split())[:120]


def refusal(spec: GrammarSpec, words: str) -> str:
    """Say to a client why the library refuses a grammar with these words."""
    if spec.kind is GrammarKind.JSON:
        return _schema_refusal(spec.source, words)
    found = _BAD_REGEX.search(words)
    if found is None:
        return f"the grammar cannot be used: {_short(words)}"
    regex, place = found["regex"], found["marks"]
    at = regex[place.find("^") : len(place)]
    is_regex = spec.kind is GrammarKind.REGEX
    what = "structured_outputs.regex is" if is_regex else "the grammar has"
    return (
        f"{what} {regex[:80]!r}, which is no regular expression: {found['fault']}"
        f"{f' (at {at[:20]!r})' if at else ''}. Correct it."
    )


def _schema_refusal(source: str, words: str) -> str:
    schema = json.loads(source)
    modernize(schema)
    places = without_refused(schema, is_strict=True)
    if not places:
        return f"the JSON Schema cannot be used: {_short(words)}"
    return f"the JSON Schema cannot be used for {places[0]}. Change or leave out that keyword."


def refuse_null(spec: GrammarSpec) -> None:
    """RequestError for a text that is none, or that the library would cut off."""
    if "\0" in spec.source or not is_unicode(spec.source):
        raise RequestError(
            f"structured_outputs.{spec.kind} has a null character or half of a surrogate pair. "
            "Remove it."
        )


def _checked_schema(source: str, where: str, *, is_strict: bool, drops_types: bool = False) -> None:
    """RequestError if a text states no schema that can be held to."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.{where} is no JSON Schema: {str(error)[:200]}. Correct it."
        ) from error
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"structured_outputs.{where} is {source[:80]!r}, which is no JSON Schema. "
            "Give an object."
        )
    if schema is False:
        raise RequestError(
            f"structured_outputs.{where} is false, a schema that no value satisfies. Change it."
        )
    if is_too_deep(cast("object", schema)):
        raise RequestError(
            f"structured_outputs.{where} is nested too deeply. Move parts of it to $defs."
        )
    endless = find_endless(cast("object", schema))
    modernize(cast("object", schema))
    if not drops_types and (place := find_unknown_type(cast("object", schema))) is not None:
        raise RequestError(f"the JSON Schema has {place}. Correct it.")
    if is_strict and (place := find_malformed(cast("object", schema))) is not None:
        raise RequestError(
            f"the JSON Schema has {place}. Correct it, or set strict to false: then it is left out."
        )
    if is_strict and (place := find_unsupported(cast("object", schema))) is not None:
        raise RequestError(
            f"the JSON Schema has {place}, which cannot be held to while tokens are drawn. Leave "
            "it out, or set strict to false: then it is not checked."
        )
    if endless is not None:
        raise RequestError(
            f"no finite value satisfies {endless} of the JSON Schema, since it requires itself. "
            "Make a property on the way optional."
        )


def _held_schema(source: str, *, is_strict: bool, drops_refused: bool) -> object:
    """Without what cannot be held to, if that may be dropped, and without options of the library,
    which a schema may not change, and which the library refuses beside a boolean."""
    schema = json.loads(source)
    if not isinstance(schema, dict):
        return {} if schema is True else schema
    held = cast("dict[str, Any]", schema)
    if not is_strict:
        without_unsupported(held)
        if drops_refused:
            without_refused(held)
    held.pop("x-guidance", None)
    rewrite(held)
    return held


def _of_schema(source: str, spec: GrammarSpec) -> str:
    whitespace = WHITESPACE if spec.whitespace is None else spec.whitespace
    try:
        return LLMatcher.grammar_from_json_schema(
            source,
            overrides={
                "whitespace_pattern": whitespace or None,
                "whitespace_flexible": bool(whitespace),
                "lenient": not spec.is_strict,
            },
        )
    except ValueError as error:
        raise RequestError(f"the JSON Schema cannot be read: {error}. Correct it.") from error


def _literal(text: str) -> str:
    return _REGEX_SIGNS.sub(lambda sign: "\\" + sign[0], text)


def _tags(spec: GrammarSpec) -> list[tuple[str, str, str, str]]:
    """(trigger, begin, schema, end) of each tag, in the form that vLLM takes."""
    try:
        value = json.loads(spec.source)
        structures, triggers = value["structures"], value["triggers"]
        tags = [(each["begin"], each["schema"], each["end"]) for each in structures]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise RequestError(
            'structured_outputs.structural_tag takes {"structures": [{"begin": …, "schema": …, '
            f'"end": …}}, …], "triggers": […]}}, but this is missing or no JSON: {error!s:.80}.'
        ) from error
    found: list[tuple[str, str, str, str]] = []
    for begin, schema, end in tags:
        trigger = next((t for t in triggers if t and str(begin).startswith(str(t))), None)
        if trigger is None or not isinstance(end, str):
            raise RequestError(
                f"the structural tag {str(begin)[:80]!r} begins with none of the triggers, or its "
                "end is no text. Add a trigger."
            )
        text = json.dumps(schema, ensure_ascii=False)
        _checked_schema(text, "structural_tag", is_strict=spec.is_strict)
        found.append((str(trigger), str(begin), text, end))
    if not found:
        raise RequestError("structured_outputs.structural_tag has no structures. Give some.")
    return found


def _of_tags(spec: GrammarSpec, *, drops_refused: bool) -> str:
    """Free text, in which each trigger must go on as a tag. The last rule is the text after the
    last tag, in which no trigger may stand."""
    whitespace = WHITESPACE if spec.whitespace is None else spec.whitespace
    lines = ["%llguidance {}"]
    tags = _tags(spec)
    triggers = dict.fromkeys(trigger for trigger, _, _, _ in tags)
    no_trigger = " & ".join(f"~/(?s:.*){_slashed(_literal(t))}(?s:.*)/" for t in triggers)
    lines.append("start: (" + " | ".join(f"of_{i}" for i in range(len(triggers))) + ")* TEXT")
    lines.append(f"TEXT: /(?s:.*)/ & {no_trigger}")
    for i, trigger in enumerate(triggers):
        bodies: list[str] = []
        for j, (its, begin, schema, end) in enumerate(tags):
            if its != trigger:
                continue
            options = {
                "whitespace_pattern": whitespace or None,
                "whitespace_flexible": bool(whitespace),
                "lenient": not spec.is_strict,
            }
            held = _held_schema(schema, is_strict=spec.is_strict, drops_refused=drops_refused)
            if isinstance(held, dict):
                held = {**cast("dict[str, Any]", held), "x-guidance": options}
            parts = [
                _quoted(begin.removeprefix(trigger)),
                f"json_{j}",
                _quoted(end),
            ]
            lines.append(f"json_{j}: %json {json.dumps(held, ensure_ascii=False)}")
            bodies.append(" ".join(part for part in parts if part))
        lines.append(f"head_{i}[lazy]: /(?s:.*)/ {_quoted(trigger)}")
        lines.append(f"of_{i}: head_{i} (" + " | ".join(bodies) + ")")
    return LLMatcher.grammar_from_lark("\n".join(lines))


def _of_answer(spec: GrammarSpec, *, drops_refused: bool) -> str:
    """Rules as they are, the patterns and the grammars that they refer to, each by its own text."""
    source = json.loads(spec.source)
    lines: list[str] = [source["lark"]]
    for name, pattern in source["patterns"].items():
        regex = pattern["regex"]
        if drops_refused and _is_refused_regex(regex):
            if pattern["refusal"]:
                raise RequestError(pattern["refusal"])
            regex = "/(?s:.*)/"
        lines.append(f"{name}: {regex}")
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(lines)}]
    for name, part in source["grammars"].items():
        kind = GrammarKind(part["kind"])
        inner = GrammarSpec(kind, part["source"], part["is_strict"], part["whitespace"])
        is_lenient_tool = bool(part["where"]) and not inner.is_strict
        try:
            text = grammar_text(inner, drops_refused=drops_refused, drops_types=is_lenient_tool)
        except RequestError as error:
            where = f"{part['where']}: " if part["where"] else ""
            raise RequestError(f"{where}{error}") from error
        (compiled,) = json.loads(text)["grammars"]
        grammars.append({**compiled, "name": name})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _is_refused_regex(regex: str) -> bool:
    """Return True if the library takes no such terminal. regex: between slashes."""
    lark = f"start: TEXT\nTEXT: {regex}"
    return bool(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _slashed(regex: str) -> str:
    return regex.replace("/", "\\/").replace("\n", "\\n")
