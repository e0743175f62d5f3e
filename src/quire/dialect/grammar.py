"""Which answers a model may give: text, thinking and calls, as one grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.dialect.argument_rules import arguments_rule
from quire.dialect.rules import Rules, regex
from quire.dialect.spec import ArgumentStyle, Dialect, IdStyle, Thinking
from quire.dialect.tools import NamedTool, Tool, ToolChoice, chosen_tools
from quire.errors import RequestError
from quire.protocol.grammar import GrammarKind, GrammarSpec

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
    """The grammar of one answer; None where nothing needs to be held.

    parallel: whether there may be several calls. thinking: where the prompt leaves the model.
    thinking_budget: how many tokens its thinking may have. response: what a text has to be,
    where the answer is no call. RequestError for tools or a budget that cannot be held.
    """
    chosen = chosen_tools(tools, tool_choice)
    if dialect.describes_tools and not chosen:
        tools = ()  # the model knows of none
    thinks = dialect.thinking is not None and thinking is not Thinking.CLOSED
    if not tools and not (thinks and (thinking_budget is not None or response is not None)):
        return response
    answer = _Answer(dialect, response, thinking if thinks else Thinking.CLOSED)
    parts = [answer.thinking(thinking_budget)] if thinks else []
    if not chosen:
        parts.append(answer.text())
    else:
        answer.add_call(chosen, {tool.name: index for index, tool in enumerate(tools)})
        is_parallel = parallel and not isinstance(tool_choice, NamedTool)
        is_free = tool_choice == "auto"
        parts.append(answer.with_calls(is_free=is_free, is_parallel=is_parallel))
    return answer.rules.spec(" ".join(parts))


class _Answer:
    """Writes the rules of one answer."""

    def __init__(self, dialect: Dialect, response: GrammarSpec | None, thinking: Thinking) -> None:
        self.rules = Rules(dialect.tokens)
        self._dialect = dialect
        self._response = response
        self._state = thinking
        self._has_calls = False

    def thinking(self, budget: int | None) -> str:
        """Up to its end marker; with its first one, or none of it, unless it is open."""
        assert self._dialect.thinking is not None
        opening, closing = self._dialect.thinking
        rules = self.rules
        if closing in rules.tokens.ids:
            limit = "" if budget is None else f"[max_tokens={budget}]"
            rules.add(f"THOUGHT: {rules.text_without(closing)}")
            rules.add(f"thought{limit}: THOUGHT")
            thought = f"{'thought' if budget != 0 else ''} {rules.literal(closing)} GAP"
        elif budget is None:
            rules.add(f"thought[lazy]: /(?s:.*)/ {rules.literal(closing)}")
            thought = "thought GAP"
        else:
            raise RequestError(
                f"thinking_token_budget is {budget}, but the end of this model's thinking, "
                f"{closing!r}, is no single token, so it cannot be held. Leave it out."
            )
        rules.add(f"GAP: {_GAP}")
        return thought if self._state is Thinking.OPEN else f"({rules.literal(opening)} {thought})?"

    def text(self) -> str:
        """An answer without calls, from behind the thinking on."""
        response, wrap = self._response, self._dialect.text_wrap
        if self._has_calls and wrap is not None:
            response = response or GrammarSpec(GrammarKind.JSON, '{"type": "string"}')
            said = self.rules.grammar("response", response)
            return f"{self.rules.literal(wrap[0])} {said} {self.rules.literal(wrap[1])}"
        if response is not None:
            return self.rules.grammar("response", response)
        no_call = self._no_bare_call() if self._dialect.is_bare else ""
        self.rules.add(f"TEXT: {self._content()}{no_call}")
        return "TEXT"

    def add_call(self, tools: Sequence[Tool], places: Mapping[str, int]) -> None:
        """The rule `call`, from behind its opening on. places: of the tools in the request."""
        dialect, rules = self._dialect, self.rules
        self._has_calls = True
        number = f"{rules.literal(dialect.id_open)} ID" if dialect.id_open else ""
        if number:
            rules.add(f"ID: {_IDS[dialect.ids]}")
        names: list[str] = []
        for tool in tools:
            where = f"tools[{places[tool.name]}].function.parameters"
            arguments = arguments_rule(rules, tool, f"args_{places[tool.name]}", where)
            names.append(
                f"{rules.literal(tool.name)} {number} {rules.literal(dialect.middle)} {arguments}"
            )
        written = rules.literal(dialect.id_close)
        after = f'({written} /[a-zA-Z0-9]{{9}}/ "\\"")?' if written else ""
        rules.add(f"call: ({' | '.join(names)}) {after} {rules.literal(dialect.close)}")

    def with_calls(self, *, is_free: bool, is_parallel: bool) -> str:
        """An answer that may have calls, or must if it is not free, from behind the thinking on."""
        dialect, rules = self._dialect, self.rules
        if not is_free:
            return self._calls(dialect.opening, is_parallel)
        if dialect.is_bare or self._response is not None:
            return f"({self._calls(dialect.opening, is_parallel)} | {self.text()})"
        trigger, times = dialect.trigger, "*" if is_parallel else "?"
        in_section = is_parallel and any(dialect.section)
        section = self._calls(dialect.opening.removeprefix(trigger), in_section)
        rules.add(f"TEXT: {self._content()}")
        if trigger in rules.tokens.ids:
            return f"(TEXT {rules.literal(trigger)} {section}){times} TEXT"
        rules.add(f"head[lazy]: /(?s:.*)/ {rules.literal(trigger)}")
        return f"(head {section}){times} TEXT"

    def _calls(self, opening: str, is_parallel: bool) -> str:
        dialect, literal = self._dialect, self.rules.literal
        more = f"({literal(dialect.separator + dialect.open)} call)*" if is_parallel else ""
        return f"{literal(opening)} call {more} {literal(dialect.section[1])}"

    def _content(self) -> str:
        """Text in which no call begins, and before which no thinking does."""
        rules, dialect = self.rules, self._dialect
        content = "/(?s:.*)/" if dialect.is_bare else rules.text_without(dialect.trigger)
        if self._state is Thinking.NONE and dialect.thinking is not None:
            opening = dialect.thinking[0]
            if opening not in rules.tokens.special:
                content += rf" & ~/\s*{regex(opening)}(?s:.*)/"
        return content

    def _no_bare_call(self) -> str:
        names = "[a-zA-Z0-9_.]+" if self._dialect.style is ArgumentStyle.PYTHON else ""
        after = self._dialect.middle if names else ""
        return rf" & ~/\s*{regex(self._dialect.opening)}{names}{regex(after)}(?s:.*)/"
