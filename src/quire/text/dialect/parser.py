"""Splits the token ids of an answer into its parts, as they arrive."""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator, Sequence

from quire.text.dialect.arguments import read_arguments, read_json_string, read_json_value
from quire.text.dialect.channels import ChannelReader
from quire.text.dialect.loose import (
    FUNCTION,
    Written,
    function_call,
    loosened,
    named_arguments,
    object_call,
    rest_of_close,
)
from quire.text.dialect.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.text.dialect.reading import CutError, GrowingText, Reading, Waiting
from quire.text.dialect.spec import ArgumentStyle, Dialect, IdStyle, Thinking
from quire.text.dialect.tools import NAME_CHARACTERS, Tool
from quire.text.rendering.detokenize import DetokenizerSource, IncrementalDetokenizer

__all__ = ["AnswerParser"]

_ID_CHARACTERS = string.ascii_letters + string.digits + "_-"
_SHORT_ID = string.ascii_letters + string.digits


class AnswerParser:
    """Reads one sample. The parts do not depend on how its tokens are grouped into calls."""

    def __init__(
        self,
        dialect: Dialect,
        tokenizer: DetokenizerSource,
        tools: Sequence[Tool] = (),
        thinking: Thinking = Thinking.NONE,
        *,
        prompt_token_ids: Sequence[int] = (),
        num_prior_calls: int = 0,
        skip_special_tokens: bool = True,
        is_held: bool = True,
    ) -> None:
        """tools: tools that the answer may call. thinking: state in which the prompt leaves the
        model (`thinking_at_end`). prompt_token_ids: the tokens that the text continues.
        num_prior_calls: calls of the conversation so far, from which `IdStyle.COUNTED` counts.
        skip_special_tokens: leave special tokens that are no markers out of the text. is_held: a
        grammar makes all calls whole, so they are passed on as they grow; otherwise each is read
        whole first, and is text if it is malformed."""
        self._tokens = dialect.tokens
        self._symbols = dialect.tokens.symbols
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._parts: list[Part] = []
        self._reader = (
            ChannelReader(dialect, tools, thinking, self._parts, is_held=is_held)
            if dialect.style is ArgumentStyle.CHANNELS
            else _AnswerReader(
                dialect, tools, thinking, num_prior_calls, self._parts, is_held=is_held
            )
        )
        self._routine: Waiting | None = self._reader.answer()
        self._num_reasoning_tokens = 0
        self._advance()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thinking so far, without its markers if these are tokens."""
        return self._num_reasoning_tokens

    @property
    def held_space(self) -> str:
        """White space behind the text so far, which is part of it unless a call follows."""
        return "" if self._reader.is_thinking else self._reader.held_space

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._reader.num_calls > 0

    def take(self, token_ids: Sequence[int]) -> list[Part]:
        """Return the parts that the next tokens make certain."""
        for token_id in token_ids:
            symbol = self._symbols.get(token_id)
            was_thinking = self._reader.is_thinking
            if symbol is None:
                self._grow(self._detokenizer.append((token_id,)))
            else:
                self._grow(self._detokenizer.finish() + symbol)
            self._num_reasoning_tokens += was_thinking and self._reader.is_thinking
        return self._given()

    def finish(self) -> list[Part]:
        """Return the text that was held back. Call it once, at the end."""
        rest = self._detokenizer.finish()
        if not self._reader.is_in_calls:  # otherwise an incomplete character is part of nothing
            self._grow(rest)
        self._reader.text.end()
        self._advance()
        return self._given()

    def _grow(self, text: str) -> None:
        if text:
            self._reader.text.grow(text)
            self._advance()

    def _advance(self) -> None:
        if self._routine is None:
            return
        try:
            next(self._routine)
        except (StopIteration, CutError):
            self._routine = None

    def _given(self) -> list[Part]:
        """Return the parts since the last call, with neighbours of one kind joined."""
        given: list[Part] = []
        for part in self._parts:
            joined = _joined(given[-1], part) if given else None
            if joined is None:
                given.append(part)
            else:
                given[-1] = joined
        self._parts.clear()
        return given


def _joined(first: Part, second: Part) -> Part | None:
    """Return two parts as one, None if they are of two kinds."""
    match first, second:
        case Text(), Text():
            return Text(first.text + second.text)
        case Reasoning(), Reasoning():
            return Reasoning(first.text + second.text)
        case CallArguments(), CallArguments() if first.index == second.index:
            return CallArguments(first.index, first.text + second.text)
        case _:
            return None


class _AnswerReader:
    """Reads the text of one answer, in which characters stand for markers (`Markers.coded`)."""

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool],
        thinking: Thinking,
        num_prior_calls: int,
        parts: list[Part],
        *,
        is_held: bool,
    ) -> None:
        """parts: list that receives the parts."""
        self.text = GrowingText()
        self.num_calls = 0
        self.is_thinking = False
        self.is_in_calls = False
        self._is_held = is_held
        self._dialect, self._has_objects = dialect.coded(), False
        if not is_held:
            self._dialect, self._has_objects = loosened(self._dialect)
        self._tokens = dialect.tokens
        self._tools = {tool.name: tool for tool in tools}
        self._thinking = thinking
        self._num_prior_calls = num_prior_calls
        self._parts = parts
        self.held_space = ""

    def answer(self) -> Waiting:
        """Read the whole answer."""
        yield from self._think()
        if not self._tools:
            yield from self._rest()
        elif self._dialect.is_bare:
            yield from self._calls_or_text()
        else:
            yield from self._text_and_calls()

    def _text_and_calls(self) -> Waiting:
        trigger = self._dialect.trigger
        starts = [trigger] if self._is_held else [trigger, FUNCTION]
        while found := (yield from self._flow(Text, *starts)):
            before, self.held_space = self.held_space, ""
            num_before = self.num_calls
            self.text.keep()
            try:
                if found == FUNCTION != trigger:
                    yield from self._function()
                else:
                    yield from self._section(self._dialect.opening.removeprefix(trigger))
            except CutError:
                if self._is_held:
                    raise
            self.text.rewind()  # what was kept is no call
            if self.num_calls == num_before:
                self.held_space = before
                self._emit(Text, found)

    def _think(self) -> Waiting:
        if self._dialect.thinking is None or self._thinking is Thinking.CLOSED:
            return
        opening, closing = self._dialect.thinking
        if self._thinking is Thinking.NONE and not (yield from self._begins(opening)):
            return
        self.is_thinking = True
        yield from self._spaces()
        while (yield from self._begins(opening)):  # some models repeat what the prompt has
            yield from self._spaces()
        is_closed = yield from self._flow(Reasoning, closing)
        self.is_thinking = not is_closed
        self.held_space = ""
        yield from self._spaces()

    def _begins(self, literal: str) -> Reading:
        """Return True if the rest begins with a literal behind white space."""
        self.text.keep()
        yield from self._spaces()
        try:
            found = yield from self.text.is_exactly_at(literal)
        except CutError:
            found = False
        if found:
            self.text.forget()
        else:
            self.text.rewind()
        return found

    def _spaces(self) -> Waiting:
        try:
            yield from self.text.skip_spaces()
        except CutError:
            return

    def _flow(self, kind: type[Text | Reasoning], *targets: str) -> Generator[None, None, str]:
        """Pass on text up to the first of some targets, which is read. Returns it, or an empty text
        if none came. White space waits for what follows it."""
        while True:
            text, found = self.text.before(*targets)
            self._emit(kind, text)
            if found:
                return found
            try:
                yield from self.text.more()
            except CutError:
                self._emit(kind, self.text.take(len(self.text.waiting)))
                if kind is Text:
                    self._emit_space()
                return ""

    def _rest(self) -> Waiting:
        """Pass on all that comes, as text."""
        while True:
            self._emit(Text, self.text.take(len(self.text.waiting)))
            self._emit_space()
            yield from self.text.more()

    def _emit(self, kind: type[Text | Reasoning], coded: str) -> None:
        text = self.held_space + self._tokens.shown(coded, with_special=False)
        seen = text.rstrip()
        self.held_space = text[len(seen) :]
        if seen:
            self._parts.append(kind(seen))

    def _emit_space(self) -> None:
        space, self.held_space = self.held_space, ""
        if space:
            self._parts.append(Text(space))

    def _calls_or_text(self) -> Waiting:
        """Read an answer that is calls if it begins like one."""
        self.text.keep()
        try:
            yield from self.text.skip_spaces()
            if not self._is_held and (yield from self.text.is_at(FUNCTION)):
                yield from self._function()
            elif (yield from self._is_at_opening()):
                yield from self._section("")
        except CutError:
            if self.num_calls and self._is_held:
                return
        self.text.rewind()  # what was kept is no call
        if self.num_calls:
            yield from self._rest()
            return
        if self._dialect.text_wrap is None or not (
            yield from self._begins(self._dialect.text_wrap[0])
        ):
            yield from self._rest()
        elif (yield from self.text.character()) == '"':
            self.text.take(1)
            yield from read_json_string(self.text, self._emit_text)
            self._emit_space()
        else:
            yield from read_json_value(self.text, self._emit_text)

    def _is_at_opening(self) -> Reading:
        opening = self._dialect.opening
        if self._is_held:
            return (yield from self.text.is_exactly_at(opening))
        return (yield from self.text.is_at(opening))

    def _emit_text(self, coded: str) -> None:
        self._emit(Text, coded)

    def _section(self, rest: str) -> Reading:
        """Read calls from behind the trigger on; `rest` is left of its opening. Returns True if
        there is one. The text behind the last one is left unread."""
        dialect, num_before = self._dialect, self.num_calls
        self.is_in_calls = self._is_held
        found = yield from self.text.is_at(rest)
        while found and (yield from self._call()):
            if not any(dialect.section) and not dialect.is_bare:
                break
            if dialect.section[1] and (yield from self.text.is_at(dialect.section[1])):
                break
            if not self._is_held:
                self.text.keep()
            found = yield from self.text.is_at(dialect.separator + dialect.open)
        self.is_in_calls = False
        return self.num_calls > num_before

    def _function(self) -> Waiting:
        """Read a call from behind `FUNCTION` on, if it is one."""
        end = self._tokens.coded("</tool_call>")
        call = yield from function_call(self._dialect, self.text, self._tools, end)
        if call is not None:
            self._add(call)

    def _add(self, call: Written) -> None:
        """Pass on a call that was read whole."""
        self.text.forget()
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._parts.append(CallStart(index, self._id(call.name, index, call.id), call.name))
        shown = self._tokens.shown(call.arguments, with_special=True)
        self._parts.append(CallArguments(index, shown))

    def _call(self) -> Reading:
        """Read one call from its name on, or its object. Returns True if it is one."""
        dialect, text = self._dialect, self.text
        if self._has_objects:
            call = yield from object_call(text, self._tools)
            if call is None:
                return False
            self._add(call)
            yield from text.is_at(dialect.close)
            return True
        yield from text.skip_spaces()
        tool = self._tools.get((yield from text.run(NAME_CHARACTERS)))
        if tool is None:
            return False
        given = ""
        if dialect.id_open:
            if not (yield from text.is_at(dialect.id_open)):
                return False
            given = yield from text.run(_ID_CHARACTERS)
        if not (yield from text.is_at(dialect.middle)):
            return False
        if not self._is_held:
            arguments = yield from named_arguments(dialect, tool, text)
            if arguments is None:
                return False
            self._add(Written(tool.name, arguments, given))
            yield from text.is_at(rest_of_close(dialect))
            return True
        text.forget()
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._parts.append(CallStart(index, self._id(tool.name, index, given), tool.name))

        def emit(coded: str) -> None:
            shown = self._tokens.shown(coded, with_special=True)
            if shown:
                self._parts.append(CallArguments(index, shown))

        yield from read_arguments(dialect, tool, text, emit)
        if dialect.id_close and (yield from text.is_at(dialect.id_close)):
            yield from text.run(_ID_CHARACTERS + '"')
        yield from text.is_at(dialect.close)
        return True

    def _id(self, name: str, index: int, given: str) -> str:
        """given: the id that the model wrote, if any."""
        match self._dialect.ids:
            case IdStyle.RANDOM:
                return given or f"call_{secrets.token_hex(12)}"
            case IdStyle.SHORT:
                is_short = len(given) == 9 and given.isalnum()
                return given if is_short else "".join(secrets.choice(_SHORT_ID) for _ in range(9))
            case IdStyle.COUNTED:
                return f"functions.{name}:{self._num_prior_calls + index}"
