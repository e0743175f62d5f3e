"""Finds the dialect of a model from its chat template and its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.text.dialect.families import DIALECTS, GENERIC, VARIANTS
from quire.text.dialect.parser import AnswerParser
from quire.text.dialect.parts import CallArguments, CallStart, Text
from quire.text.dialect.spec import ArgumentStyle, Dialect, IdStyle, Thinking
from quire.text.dialect.tools import Tool
from quire.text.rendering.chat_template.template import ChatTemplate
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["find_dialect"]

_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<channel|>"),
)
_CALLS = (
    ("quire_one", {"first": "one text", "second": 12}),
    ("quire_two", {"flag": True}),
)
_TOOLS = tuple(
    Tool(
        name,
        {
            "type": "object",
            "properties": {
                key: {"type": {str: "string", int: "integer", bool: "boolean"}[type(value)]}
                for key, value in arguments.items()
            },
        },
        description="A tool.",
    )
    for name, arguments in _CALLS
)


def find_dialect(
    template: ChatTemplate | None, tokenizer: Tokenizer, parser_name: str | None = None
) -> Dialect:
    """Find the dialect of a model. It is the one that reads the calls of a conversation rendered by
    the model's template, with the template's white space; else one derived from the texts that the
    template writes around names and JSON arguments; else the generic one. parser_name: a dialect to
    use in any case. Raises ConfigError for an unknown name."""
    if parser_name is not None and parser_name not in DIALECTS:
        raise ConfigError(
            f"There is no tool call parser {parser_name!r}. Give one of "
            f"{', '.join(sorted(DIALECTS))}, or none: the format is found from the model."
        )
    probe = _Probe(template, tokenizer)
    names = list(DIALECTS) if parser_name is None else [parser_name]
    candidates = [each for name in names for each in VARIANTS.get(name, (DIALECTS[name],))]
    for candidate in sorted(candidates, key=lambda each: each.is_bare):
        found = probe.fitted(candidate)
        if found is not None:
            return probe.with_thinking(found)
    if parser_name is None:
        return probe.with_thinking(probe.derived() or GENERIC)
    found = probe.with_thinking(probe.likeliest(candidates))
    if found.style is ArgumentStyle.CHANNELS and not found.has_all_tokens:
        raise ConfigError(
            f"The tool call parser {parser_name!r} needs the tokens {', '.join(found.markers)}, "
            "which the tokenizer of this model lacks. Give another, or none."
        )
    return found


@dataclass(frozen=True, slots=True)
class _Rendered:
    """turn: text of the assistant's turn. answer: the same behind the generation prompt; None if
    the turn does not begin with that."""

    num_calls: int
    turn: str
    answer: str | None


class _Probe:
    """Renders small conversations by the template of a model."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        usable = template is not None and "default" not in template.why_broken
        self._template = template if usable else None
        self._tokenizer = tokenizer
        names = self._template.names if self._template is not None else ()
        self._source = "\n".join(map(self._template.source, names)) if self._template else ""

    def fitted(self, dialect: Dialect) -> Dialect | None:
        """Return the dialect with the template's white space; None if it does not read the
        template's output."""
        if dialect.describes_tools:
            return None
        for num_calls in (2, 1):
            rendered = self._rendered(num_calls, dialect.ids)
            if rendered is None:
                continue
            bound = dialect.bound(self._tokenizer)
            has_channels = dialect.style is ArgumentStyle.CHANNELS
            if not has_channels and not all(m in rendered.turn for m in dialect.markers):
                return None
            if has_channels and not bound.has_all_tokens:
                return None
            if not self._reads(bound, rendered):
                continue
            bound = replace(bound, is_single=num_calls == 1)
            adapted = _with_spaces_of(bound, rendered)
            return adapted if self._reads(adapted, rendered) else bound
        return None

    def derived(self) -> Dialect | None:
        """Return a dialect whose texts are those that the template writes around the names and
        arguments of two calls; None unless it reads these."""
        rendered = self._rendered(2, IdStyle.RANDOM)
        if rendered is None or rendered.answer is None:
            return None
        match = re.fullmatch(
            f"(.*?){_CALLS[0][0]}(.*?){_ARGUMENTS}(.*?){_CALLS[1][0]}(.*?){_ARGUMENTS}(.*)",
            rendered.answer.removesuffix(self._turn_end()),
            re.DOTALL,
        )
        if match is None:
            return None
        first, middle, between, middle_again, end = match.groups()
        if middle != middle_again or not first.strip() or "abcdefgh" in first + middle + between:
            return None
        close = commonprefix([between, end])  # noqa: RUF071  characters are meant
        begin = between[len(close) :]
        its_open = commonprefix([first[::-1], begin[::-1]])[::-1]  # noqa: RUF071  as above
        section = (first[: len(first) - len(its_open)], end[len(close) :])
        markers = self._added_in(rendered.answer)
        dialect = Dialect(
            name="derived",
            open=its_open,
            middle=middle,
            close=close,
            separator=begin[: len(begin) - len(its_open)],
            section=section,
            is_bare=_STARTS_CALL.match(first) is None and not first.startswith(markers),
            markers=markers,
        ).bound(self._tokenizer)
        return dialect if self._reads(dialect, rendered) else None

    def _turn_end(self) -> str:
        """Return the text that the template writes behind an answer without calls."""
        said = "plain answer"
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": said}]
        text = self._text(messages, [], add_generation_prompt=False)
        return (text or "").rpartition(said)[2]

    def _added_in(self, text: str) -> tuple[str, ...]:
        """Return the added tokens in a text, each once."""
        tokenizer = self._tokenizer
        added = filter(tokenizer.is_added, tokenizer.encode(text, add_special_tokens=False))
        return tuple(tokenizer.decode([i], skip_special_tokens=False) for i in dict.fromkeys(added))

    def with_thinking(self, dialect: Dialect) -> Dialect:
        """Add the markers of thinking that the template knows or, without a template, those that
        are tokens."""
        if dialect.style is ArgumentStyle.CHANNELS:
            return dialect.bound(self._tokenizer)
        for pair in _THINKING:
            known = pair[1] in self._source
            if self._template is None:
                known = all(self._tokenizer.token_id(marker) is not None for marker in pair)
            if known:
                return replace(dialect, thinking=pair).bound(self._tokenizer)
        return replace(dialect, thinking=None).bound(self._tokenizer)

    def likeliest(self, candidates: Sequence[Dialect]) -> Dialect:
        """Return the variant with the most markers in the template, or else in the tokenizer; the
        first one if equal."""

        def count(dialect: Dialect) -> tuple[int, int]:
            present = sum(marker in self._source for marker in dialect.markers)
            ids = map(self._tokenizer.token_id, dialect.markers)
            return present, sum(token_id is not None for token_id in ids)

        return max(candidates, key=count)

    def _rendered(self, num_calls: int, ids: IdStyle) -> _Rendered | None:
        """Render a turn with calls; None if the template refuses it."""
        ask = {"role": "user", "content": "question"}
        calls = _history(num_calls, ids)
        tools = [_as_sent(tool) for tool in _TOOLS]
        for content in ("", None):
            turn = {"role": "assistant", "content": content, "tool_calls": calls}
            text = self._text([ask, turn], tools, add_generation_prompt=False)
            if text is None:
                continue
            before = self._text([ask], tools, add_generation_prompt=False) or ""
            prompt = self._text([ask], tools, add_generation_prompt=True) or ""
            answer = text.removeprefix(prompt) if text.startswith(prompt) else None
            return _Rendered(num_calls, text[len(commonprefix([text, before])) :], answer)  # noqa: RUF071  characters are meant
        return None

    def _text(
        self, messages: list[Any], tools: list[Any], *, add_generation_prompt: bool
    ) -> str | None:
        if self._template is None:
            return None
        try:
            return self._template.render(
                messages, tools, add_generation_prompt=add_generation_prompt
            )
        except RequestError:
            return None

    def _reads(self, dialect: Dialect, rendered: _Rendered) -> bool:
        """Return True if the calls are read as they were sent, and a bare call has nothing beside
        it."""
        text = rendered.answer if dialect.is_bare else rendered.turn
        if text is None:
            return False
        has_channels = dialect.style is ArgumentStyle.CHANNELS
        state = Thinking.NONE if has_channels else Thinking.CLOSED
        parser = AnswerParser(dialect, self._tokenizer, _TOOLS, state)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        names: list[str] = []
        arguments: list[str] = []
        said = ""
        for part in [*parser.take(ids), *parser.finish()]:
            match part:
                case CallStart():
                    names.append(part.name)
                    arguments.append("")
                case CallArguments():
                    arguments[part.index] += part.text
                case Text():
                    said += part.text
                case _:
                    return False
        try:
            found = list(zip(names, map(json.loads, arguments), strict=True))
        except ValueError:
            return False
        is_all = not said.strip() or not dialect.is_bare
        return found == list(_CALLS[: rendered.num_calls]) and is_all


def _history(num_calls: int, style: IdStyle) -> list[dict[str, Any]]:
    """Return calls in the form that a client sends them back."""
    calls: list[dict[str, Any]] = []
    for i, (name, arguments) in enumerate(_CALLS[:num_calls]):
        call_id = f"functions.{name}:{i}" if style is IdStyle.COUNTED else f"abcdefgh{i}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _as_sent(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def _with_spaces_of(dialect: Dialect, rendered: _Rendered) -> Dialect:
    """Return the dialect with the white space that the template writes around its JSON."""
    if dialect.style is not ArgumentStyle.JSON or rendered.num_calls < 2 or dialect.id_open:
        return dialect
    pieces = [
        _flexible(dialect.opening),
        f"{_CALLS[0][0]}{_flexible(dialect.middle)}{_ARGUMENTS}{_ID}{_flexible(dialect.close)}",
        _flexible(dialect.separator),
        _flexible(dialect.open),
        f"{_CALLS[1][0]}{_flexible(dialect.middle)}{_ARGUMENTS}{_ID}{_flexible(dialect.close)}",
        _flexible(dialect.section[1]),
    ]
    match = re.search("".join(pieces), rendered.turn, re.DOTALL)
    if match is None:
        return dialect
    opening, middle, close, separator, its_open, _, _, end = match.groups()
    begin = opening.removesuffix(its_open)
    if begin == opening and any(dialect.section):
        return dialect
    return replace(
        dialect,
        section=(begin if any(dialect.section) else "", end),
        open=its_open,
        middle=middle,
        close=close,
        separator=separator,
    )


_STARTS_CALL = re.compile(r"\s*(<+[^<>\s]+>|\[[A-Z_/]+\])")
"""A tag or a name in brackets, with which no ordinary answer begins."""
_ARGUMENTS = r"\{[^{}]*\}"
_ID = r'(?:, *"id": *"[^"]*")?'


def _flexible(literal: str) -> str:
    """Return a group that matches a literal with any white space within it, and before one that
    begins with white space."""
    words = [re.escape(character) for character in literal if not character.isspace()]
    before = r"\s*" if literal[:1].isspace() or not words else ""
    after = r"\s*" if words and literal[-1:].isspace() else ""
    inner = r"\s*".join(words)
    return f"({before}{inner}{after})"
