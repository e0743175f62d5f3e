"""Finds what a chat template does that keeps later prompts from starting like earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from quire.base.errors import RequestError
from quire.text.rendering.renderer import RendersChats

__all__ = ["CacheRisk", "MakeTemplate", "cache_risks"]

_NOON = datetime(2031, 5, 14, 11, 20, 30, 40_000, UTC)
_SHIFTS = {
    "moment": timedelta(microseconds=7),
    "second": timedelta(seconds=1),
    "minute": timedelta(minutes=1),
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "month": timedelta(days=31),
    "year": timedelta(days=366),
}
"""Shifts of the clock, by the shortest time after which the text differs."""

_SYSTEM = {"role": "system", "content": "quire instructions"}
_ASKED = {"role": "user", "content": "quire question one"}
_ANSWERED = {"role": "assistant", "content": "quire answer"}
_THINKING = "quire thinking"
_THOUGHTS = (
    {**_ANSWERED, "reasoning_content": _THINKING},
    {**_ANSWERED, "content": f"<think>\n{_THINKING}\n</think>\n\n{_ANSWERED['content']}"},
)
_ASKED_AGAIN = {"role": "user", "content": "quire question two"}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("quire_one", "quire_two")
]


MakeTemplate = Callable[[Callable[[], datetime]], RendersChats]
"""Makes the template with a clock."""


@dataclass(frozen=True, slots=True)
class CacheRisk:
    """name: "date", "system", "history", "thinking", "tools", "tool_order" or "generation_prompt".
    words: a sentence on what the template does, and what is computed again for it."""

    name: str
    words: str


def cache_risks(make: MakeTemplate) -> list[CacheRisk]:
    """Render conversations that differ in one thing, and return what the prefix cache loses by it.
    A conversation that the template refuses tells nothing."""
    clock = [_NOON]
    lint = _Lint(make(lambda: clock[0]))
    found = [_date(lint, clock), _thinking(lint), *_turns(lint), _tool_order(lint)]
    return [each for each in found if each is not None]


def _date(lint: _Lint, clock: list[datetime]) -> CacheRisk | None:
    before = lint.text([_SYSTEM, _ASKED]) or lint.text([_ASKED])
    for unit, shift in _SHIFTS.items():
        clock[0] = _NOON + shift
        after = lint.text([_SYSTEM, _ASKED]) or lint.text([_ASKED])
        clock[0] = _NOON
        if before is not None and after is not None and before != after:
            often = "at every moment" if unit == "moment" else f"with every {unit}"
            return CacheRisk(
                "date",
                f"it writes the time, which changes {often}: nothing behind that is found again "
                "after a change",
            )
    return None


def _thinking(lint: _Lint) -> CacheRisk | None:
    """Return the risk of thinking that a later prompt does not show. A template that never writes
    it, and writes all content as it is, has nothing to do with thinking."""
    in_field, in_content = _THOUGHTS
    last = lint.text([_ASKED, in_field], asks=False)
    later = lint.text([_ASKED, in_field, _ASKED_AGAIN])
    cut = lint.text([_ASKED, in_content, _ASKED_AGAIN])
    is_dropped = last is not None and _THINKING in last and later and _THINKING not in later
    is_cut = cut is not None and _THINKING not in cut and _ANSWERED["content"] in cut
    if not (is_dropped or is_cut):
        return None
    return CacheRisk(
        "thinking",
        "it leaves out the thinking of earlier answers: each such answer is computed again when "
        "the user goes on",
    )


def _turns(lint: _Lint) -> list[CacheRisk]:
    """Return the risks of what changes in the prompt of a conversation when messages follow."""
    first, second = [_ASKED], [_ASKED, _ANSWERED, _ASKED_AGAIN]
    third = [*second, _ANSWERED, _ASKED]
    instructed = [_SYSTEM, _ASKED], [_SYSTEM, _ASKED, _ANSWERED, _SYSTEM, _ASKED_AGAIN]
    begins = _goes_on(lint.text(first), lint.text(second))
    habits = (
        (
            not begins,
            "generation_prompt",
            "it writes the beginning of an answer differently when the answer is there: each "
            "answer is computed again in the next turn",
        ),
        (
            not _goes_on(lint.text(second, asks=False), lint.text(third)),
            "history",
            "it writes earlier messages differently when others follow: they are computed again in "
            "each turn",
        ),
        (
            begins and not _goes_on(lint.text(first, _TOOLS), lint.text(second, _TOOLS)),
            "tools",
            "it moves the tools to the last message of the user: the messages before it are "
            "computed again in each turn",
        ),
        (
            begins and not _goes_on(*map(lint.text, instructed)),
            "system",
            "it moves a system message within the conversation to the front: all is computed again "
            "after one",
        ),
    )
    return [CacheRisk(name, words) for is_found, name, words in habits if is_found]


def _tool_order(lint: _Lint) -> CacheRisk | None:
    """Return the risk of tools that stand before the messages in the order of the request."""
    one, other = lint.text([_ASKED], _TOOLS), lint.text([_ASKED], _TOOLS[::-1])
    if one is None or other is None or one == other:
        return None
    before, asked, _ = one.partition(_ASKED["content"])
    if not asked or other.startswith(before):
        return None
    return CacheRisk(
        "tool_order",
        "it writes the tools before the messages, in the order of the request: with another order "
        "all is computed again",
    )


class _Lint:
    """Renders with one template."""

    def __init__(self, template: RendersChats) -> None:
        self._template = template

    def text(
        self,
        messages: Sequence[Mapping[str, str]],
        tools: Sequence[Any] | None = None,
        *,
        asks: bool = True,
    ) -> str | None:
        """Return the prompt; None if the template refuses it. asks: an answer is to follow."""
        try:
            return self._template.render(messages, tools, None, asks)
        except RequestError:
            return None


def _goes_on(before: str | None, after: str | None) -> bool:
    """Return whether a prompt begins like an earlier one, as far as that can be told."""
    return before is None or after is None or after.startswith(before.rstrip())
