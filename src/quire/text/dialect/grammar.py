"""The answers that a model may give: text, thinking and calls, as one grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.text.dialect.argument_rules import arguments_rule
from quire.text.dialect.channels import channel_grammar
from quire.text.dialect.rules import Rules, regex
from quire.text.dialect.spec import ArgumentStyle, Dialect, IdStyle, Thinking
from quire.text.dialect.tools import Tool, ToolChoice, chosen_tools

__all__ = ["answer_grammar"]

_IDS = {
    IdStyle.RANDOM: "/[a-zA-Z0-9_-]{1,40}/",
    IdStyle.SHORT: "/[a-zA-Z0-9]{9}/",
    IdStyle.COUNTED: "/[0-9]{1,4}/",
}
_GAP = r"/[ \n]{0,3}/"
"""Templates write up to two line breaks behind the thinking."""


def answer_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    tool_choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    thinking: Thinking = Thinking.NONE,
    thinking_budget: int | None = None,
    response: GrammarSpec | None = None,
) -> GrammarSpec | None:
    """Return the grammar of one answer; None if nothing needs to be enforced.

    parallel: allows several calls. thinking: state in which the prompt leaves the model.
    thinking_budget: most tokens of its thinking. response: grammar of the text, where the answer is
    no call. Raises RequestError for tools that cannot be enforced.
    """
    chosen = chosen_tools(tools, tool_choice)
    if dialect.describes_tools and not chosen:
        tools = ()  # the model has none
    places = {tool.name: index for index, tool in enumerate(tools)}
    if dialect.style is ArgumentStyle.CHANNELS:
        is_bounded = thinking_budget is not None and thinking is not Thinking.CLOSED
        if not tools and not is_bounded and response is None:
            return None
        return channel_grammar(
            dialect, chosen, places, is_free=tool_choice in ("auto", "none"), thinking=thinking,
            budget=thinking_budget, response=response,
        )  # fmt: skip
    thinks = dialect.thinking is not None and thinking is not Thinking.CLOSED
    if not tools and not (thinks and (thinking_budget is not None or response is not None)):
        return response
    answer = _Answer(dialect, response, thinking if thinks else Thinking.CLOSED)
    must_call = bool(chosen) and tool_choice != "auto"
    parts = [answer.thinking(thinking_budget, is_before_call=must_call)] if thinks else []
    if not chosen:
        parts.append(answer.text())
    else:
        is_parallel = parallel and not dialect.is_single and tool_choice in ("auto", "required")
        is_free = tool_choice == "auto"
        parts.append(answer.with_calls(chosen, places, is_free=is_free, is_parallel=is_parallel))
    return answer.rules.spec(" ".join(parts))


class _Answer:
    """Writes the rules of one answer."""

    def __init__(self, dialect: Dialect, response: GrammarSpec | None, thinking: Thinking) -> None:
        self.rules = Rules(dialect.tokens)
        self._dialect = dialect
        self._response = response
        self._state = thinking
        self._arguments: Mapping[str, str] = {}

    def thinking(self, budget: int | None, *, is_before_call: bool) -> str:
        """Write the thinking up to its end marker; with its start marker, or absent, unless it is
        already open. Some families write a line break before the start marker, which may stand
        without it before a call that must come."""
        assert self._dialect.thinking is not None
        opening, closing = self._dialect.thinking
        rules = self.rules
        first, *others = rules.tokens.split(opening)
        if budget is None and closing not in rules.tokens.ids:
            rules.add(f"thought[lazy]: /(?s:.*)/ {rules.literal(closing)}")
            thought = "thought GAP"
        else:
            # The library does not count a first token of one byte behind a token that is text.
            is_text = not others and isinstance(first, int) and opening not in rules.tokens.special
            starts_late = is_text and self._state is not Thinking.OPEN
            most = budget - 1 if budget is not None and budget > 1 and starts_late else budget
            thought = f"{self._thought(closing, most)} GAP"
        rules.add(f"GAP: {_GAP}")
        if self._state is Thinking.OPEN:
            return thought
        spaced = _behind_spaces(first) if isinstance(first, str) else f"GAP {rules.one(first)}"
        whole = f"{spaced} {' '.join(map(rules.one, others))} {thought}"
        return f"({whole} | GAP)" if is_before_call else f"({whole})?"

    def _thought(self, closing: str, most: int | None) -> str:
        """Write thinking of at most so many tokens, and its end marker. One that is no token may
        begin within them: then it is written once more, or is complete."""
        rules = self.rules
        end = rules.literal(closing)
        if most == 0:
            return end
        limit = "" if most is None else f"[max_tokens={most}]"
        rules.add(f"THOUGHT: {rules.text_without(closing)}")
        rules.add(f"thought{limit}: THOUGHT")
        if closing in rules.tokens.ids:
            return f"thought {end}"
        name, *rest = rules.up_to("THOUGHT_END", closing, ["(?s:.*)"]).split(" ")
        rules.add(f"whole{limit}: {name}")
        return f"(thought {end} | {' '.join(('whole', *rest))})"

    def text(self) -> str:
        """Write an answer without calls, from behind the thinking on."""
        response, wrap = self._response, self._dialect.text_wrap
        if self._arguments and wrap is not None:
            response = response or GrammarSpec(GrammarKind.JSON, '{"type": "string"}')
            said = self.rules.grammar("response", response)
            return f"{_behind_spaces(wrap[0])} {said} {self.rules.literal(wrap[1])}"
        if response is not None:
            return self.rules.grammar("response", response)
        no_call = self._no_bare_call() if self._dialect.is_bare else ""
        self.rules.add(f"TEXT: {self._content()}{no_call}")
        return "TEXT"

    def with_calls(self, tools: Sequence[Tool], places: Mapping[str, int], *, is_free: bool,
        is_parallel: bool) -> str:  # fmt: skip
        """Write the part behind the thinking of an answer that may have calls, or must have one if
        it is not free. places: places of the tools in the request."""
        dialect, rules = self._dialect, self.rules
        self._arguments = {
            tool.name: arguments_rule(
                rules, dialect, tool, f"args_{places[tool.name]}",
                f"tools[{places[tool.name]}].function.parameters",
            )
            for tool in tools
        }  # fmt: skip
        if dialect.id_open:
            rules.add(f"ID: {_IDS[dialect.ids]}")
        is_alone = not is_free or dialect.is_bare or self._response is not None
        trigger = "" if is_alone else dialect.trigger
        self._add_call("first", dialect.opening.removeprefix(trigger))
        calls = "first"
        if is_parallel and (is_alone or any(dialect.section)):
            self._add_call("next", dialect.separator + dialect.open)
            calls += " next*"
        calls = f"{calls} {rules.literal(dialect.section[1])}"
        if not is_free:
            return calls
        if is_alone:
            return f"({calls} | {self.text()})"
        rules.add(f"TEXT: {self._content()}")
        head = rules.up_to("HEAD", trigger, ["(?s:.*)"], self._not_thinking())
        return f"({head} {calls}){'*' if is_parallel else '?'} TEXT"

    def _add_call(self, rule: str, before: str) -> None:
        """Add the rule of one call, with the text before its name. If free text could stand in its
        place, all before the arguments is one terminal, and the text is refused at its end."""
        dialect, rules = self._dialect, self.rules
        calls: list[str] = []
        for name, arguments in self._arguments.items():
            if dialect.id_open:
                start = f"{rules.literal(before + name + dialect.id_open)} ID "
                start += rules.literal(dialect.middle)
            elif dialect.is_bare and rule == "first":
                start = _behind_spaces(before + name + dialect.middle)
            else:
                start = rules.literal(before + name + dialect.middle)
            calls.append(f"{start} {arguments}")
        written = rules.literal(dialect.id_close)
        after = f'({written} /[a-zA-Z0-9]{{9}}/ "\\"")?' if written else ""
        rules.add(f"{rule}: ({' | '.join(calls)}) {after} {rules.literal(dialect.close)}")

    def _content(self) -> str:
        """Write text in which no call begins, and which no thinking follows."""
        rules, dialect = self.rules, self._dialect
        content = "/(?s:.*)/" if dialect.is_bare else rules.text_without(dialect.trigger)
        return content + "".join(f" & ~/{other}/" for other in self._not_thinking())

    def _not_thinking(self) -> list[str]:
        opening = self._dialect.thinking[0] if self._dialect.thinking else ""
        if self._state is not Thinking.NONE or not opening or opening in self.rules.tokens.special:
            return []
        return [rf"\s*{regex(opening)}(?s:.*)"]

    def _no_bare_call(self) -> str:
        dialect = self._dialect
        starts = [dialect.opening]
        if dialect.style is ArgumentStyle.PYTHON:
            starts = [dialect.opening + name + dialect.middle for name in self._arguments]
        return "".join(rf" & ~/\s*{regex(start)}(?s:.*)/" for start in starts)


def _behind_spaces(text: str) -> str:
    """Write a text as one terminal, with the white space behind the thinking."""
    return rf"/[ \n]{{0,3}}{regex(text)}/"
