"""Answers of gpt-oss: messages on channels, each with a header before it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence

from quire.protocol.grammar import GrammarSpec
from quire.text.dialect.loose import checked_arguments
from quire.text.dialect.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.text.dialect.reading import CutError, GrowingText, Waiting
from quire.text.dialect.rules import Rules, json_grammar
from quire.text.dialect.spec import Dialect, Thinking
from quire.text.dialect.tools import Tool

__all__ = ["ChannelReader", "channel_grammar"]

_RECIPIENT = re.compile(r"\bto=functions\.([a-zA-Z0-9_.-]+)")
_CHANNEL = re.compile(r"[a-z]*")
_NEXT = "<|end|><|start|>assistant"


class ChannelReader:
    """Reads the text of one answer, in which characters stand for markers (`Markers.coded`)."""

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool],
        thinking: Thinking,
        parts: list[Part],
        *,
        is_held: bool,
    ) -> None:
        """parts: list that receives the parts. thinking: OPEN if the prompt ends within an
        analysis, CLOSED if within another message. is_held: see `AnswerParser`."""
        self.text = GrowingText()
        self.num_calls = 0
        self.is_thinking = False
        self.is_in_calls = False
        self.held_space = ""
        self._tokens = dialect.tokens
        self._message, self._channel = map(dialect.tokens.coded, ("<|message|>", "<|channel|>"))
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        self._ends = frozenset(map(dialect.tokens.coded, ends))
        self._tools = {tool.name: tool for tool in tools}
        self._is_held = is_held
        self._said: set[type[Part]] = set()
        self._thinking = thinking
        self._parts = parts

    def answer(self) -> Waiting:
        """Read all messages. A header that is cut off is no part of any."""
        if self._thinking is Thinking.OPEN:
            yield from self._analysis()
        elif self._thinking is Thinking.CLOSED:
            yield from self._said_text()
        while True:
            header = ""
            while True:
                before, found = self.text.before(self._message)
                header += before
                if found:
                    break
                yield from self.text.more()
            yield from self._body(header)

    def _body(self, header: str) -> Waiting:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.match(header.rpartition(self._channel)[2])
        if recipient is not None and recipient[1] in self._tools:
            read = self._call if self._is_held else self._free_call
            yield from read(recipient[1])
        elif channel is not None and channel[0] == "analysis":
            yield from self._analysis()
        else:
            yield from self._said_text()

    def _said_text(self) -> Waiting:
        self._separate(Text)
        yield from self._pass_on(lambda said: self._parts.append(Text(said)))

    def _analysis(self) -> Waiting:
        self._separate(Reasoning)
        self.is_thinking = True
        yield from self._pass_on(lambda said: self._parts.append(Reasoning(said)))
        self.is_thinking = False

    def _separate(self, kind: type[Text | Reasoning]) -> None:
        """Put a line break between two messages of one kind."""
        if kind in self._said:
            self._parts.append(kind("\n"))
        self._said.add(kind)

    def _call(self, name: str) -> Waiting:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._parts.append(CallStart(index, f"call_{secrets.token_hex(12)}", name))
        is_empty = True

        def emit(said: str) -> None:
            nonlocal is_empty
            is_empty = False
            self._parts.append(CallArguments(index, said))

        self.is_in_calls = True
        yield from self._pass_on(emit)
        self.is_in_calls = False
        if is_empty:
            emit("{}")

    def _free_call(self, name: str) -> Waiting:
        """Read a call that no grammar holds: it is text if it is malformed or cut."""
        said: list[str] = []
        is_cut = False
        try:
            yield from self._pass_on(said.append)
        except CutError:
            is_cut = True
        written = "".join(said)
        arguments = None if is_cut else checked_arguments(written, self._tools[name])
        if arguments is None:
            self._separate(Text)
            self._parts.append(Text(written))
        else:
            index, self.num_calls = self.num_calls, self.num_calls + 1
            self._parts.append(CallStart(index, f"call_{secrets.token_hex(12)}", name))
            self._parts.append(CallArguments(index, arguments))
        if is_cut:
            raise CutError

    def _pass_on(self, emit: Callable[[str], None]) -> Waiting:
        """Pass on the content of a message, up to its end marker, which is read."""
        while True:
            waiting = self.text.waiting
            end = next((i for i, sign in enumerate(waiting) if sign in self._ends), None)
            said = self.text.take(len(waiting) if end is None else end)
            said = self._tokens.shown(said, with_special=False)
            if said:
                emit(said)
            if end is not None:
                self.text.take(1)
                return
            yield from self.text.more()


def channel_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    places: Mapping[str, int],
    *,
    is_free: bool,
    thinking: Thinking,
    budget: int | None,
    response: GrammarSpec | None,
) -> GrammarSpec:
    """Return the grammar of an answer: analysis, an optional preamble, then one call or the final
    text. A call ends the turn. If the prompt ends within a text, the text goes on; a call may
    follow. places: places of the tools in the request. budget: tokens of the analysis. response:
    grammar of all text.
    """
    rules = Rules(dialect.tokens)
    literal = rules.literal
    rules.add("TEXT: /(?s:.*)/")
    limit = "" if budget is None else f"[max_tokens={budget}]"
    rules.add(f"thought{limit}: TEXT")
    thought = f"{'' if budget == 0 else 'thought'} {literal(_NEXT)}"
    analysis = f"({literal('<|channel|>analysis<|message|>')} {thought})"
    if thinking is Thinking.OPEN:
        before = thought
    else:
        before = f"{analysis}{'*' if budget is None else '?'}"
    preamble = f"({literal('<|channel|>commentary<|message|>')} TEXT {literal(_NEXT)})?"
    said = "TEXT"
    if response is not None:
        preamble, said = "", rules.grammar("response", response)
    json_header = f"({literal(' <|constrain|>json')})?" if response is not None else ""
    final = f"{literal('<|channel|>final')} {json_header} {literal('<|message|>')} {said}"
    ends = [_call(rules, tool, places[tool.name]) for tool in tools]
    is_begun = thinking is Thinking.CLOSED
    if is_free and not (is_begun and response is not None):
        ends.append(final)
    messages = f"{before} {preamble} ({' | '.join(ends)})"
    if not is_begun:
        return rules.spec(messages)
    more = f"({literal(_NEXT)} {messages}){'?' if is_free else ''}" if ends else ""
    return rules.spec(f"{said} {more}")


def _call(rules: Rules, tool: Tool, place: int) -> str:
    """Return the rule of one call. place: place of the tool in the request."""
    grammar = json_grammar(tool.schema, is_strict=tool.is_strict)
    arguments = rules.grammar(f"args_{place}", grammar, f"tools[{place}].function.parameters")
    name = f"to=functions.{tool.name}"
    headers = (
        f"<|channel|>commentary {name} <|constrain|>json<|message|>",
        f" {name}<|channel|>commentary <|constrain|>json<|message|>",
    )
    return f"({' | '.join(map(rules.literal, headers))}) {arguments}"
