"""Instructions (messages of `system` and `developer`) where a template has no place for them."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.text.rendering.messages import Message, joined_contents

__all__ = ["ROLES", "InstructionPlaces", "find_places"]

ROLES = ("system", "developer")

_SIGN = "quirerule"
_CONTENTS = (_SIGN, [{"type": "text", "text": _SIGN}])
_ASK: Message = {"role": "user", "content": "question"}
_DIALOGUE: Sequence[Message] = (_ASK, {"role": "assistant", "content": "answer"})
_RULES: Sequence[Message] = ({"role": "system", "content": "rules"},)

Renders = Callable[[list[Message]], str | None]
"""Gives the prompt of messages, None if the template refuses them."""


@dataclass(frozen=True, slots=True)
class InstructionPlaces:
    """Places in which a template shows instructions; by default wherever they stand.

    developer_is_system: the template knows no developer. joins_first: it shows one system message
    at the beginning. has_later: it shows system messages between turns. passed_over: roles that it
    never shows.
    """

    developer_is_system: bool = False
    joins_first: bool = False
    has_later: bool = True
    passed_over: frozenset[str] = frozenset()

    def placed(self, messages: list[Message]) -> list[Message]:
        """Return messages whose instructions the template shows. They become the system's, join the
        message before, or go into a message of the user."""
        found = messages
        if self.developer_is_system:
            roles = {"developer": "system"}
            found = [{**each, "role": roles.get(each["role"], each["role"])} for each in found]
        first = list(itertools.takewhile(lambda each: each["role"] == "system", found))
        others = found[len(first) :]
        if self.joins_first and first:
            first = [functools.reduce(_joined, first)]
        if not self.has_later:
            others = _with_the_user(others, frozenset(("system",)))
        found = [*first, *others]
        return _with_the_user(found, self.passed_over) if self.passed_over else found


def find_places(renders: Renders) -> InstructionPlaces:
    """Find out by small renders. What a template refuses stays where it is, so that its own words
    tell the reason, unless another place is left."""
    if not _is_shown(renders, "user"):
        return InstructionPlaces()
    if not _is_instruction(renders, "system"):
        lost = (role for role in ROLES if not _is_instruction(renders, role))
        return InstructionPlaces(
            passed_over=frozenset(role for role in lost if _is_taken(renders, role))
        )
    places: list[Sequence[Message]] = [(), _RULES]
    if _is_shown(renders, "user", _DIALOGUE):
        places.append(_DIALOGUE)
    knows_developer = all(_is_instruction(renders, "developer", before) for before in places)
    has_later = all(_is_instruction(renders, "system", before) for before in places[2:])
    has_second = _is_instruction(renders, "system", _RULES)
    return InstructionPlaces(not knows_developer, not has_second, has_later)


def _chat(role: str, before: Sequence[Message], content: object) -> list[Message]:
    after = () if role == "user" else (_ASK,)
    return [*before, {"role": role, "content": content}, *after]


def _is_taken(renders: Renders, role: str) -> bool:
    return any(renders(_chat(role, (), content)) is not None for content in _CONTENTS)


def _is_shown(renders: Renders, role: str, before: Sequence[Message] = ()) -> bool:
    return any(_SIGN in (renders(_chat(role, before, content)) or "") for content in _CONTENTS)


def _is_instruction(renders: Renders, role: str, before: Sequence[Message] = ()) -> bool:
    """Return whether a message is shown, and not as one of the assistant, which some templates make
    of any role but the user's."""
    for content in _CONTENTS:
        text = renders(_chat(role, before, content))
        if text is None or _SIGN not in text:
            continue
        if text != renders(_chat("assistant", before, content)):
            return True
        # A template that tells no role from another one shows all of them alike.
        return text == renders([*before, {"role": "user", "content": content}, _ASK])
    return False


def _joined(first: Message, second: Message) -> Message:
    """Return the first message with both contents."""
    content = joined_contents(first.get("content"), second.get("content"))
    return {**first, "content": content}


def _with_the_user(messages: list[Message], passed_over: frozenset[str]) -> list[Message]:
    """Return messages in which those of roles are part of the user's before or after them, or one
    of the user where there is none."""
    found: list[Message] = []
    joins = False  # whether the last one found is joined by one of the user
    for message in messages:
        is_rule = message["role"] in passed_over
        is_user = is_rule or message["role"] == "user"
        last = found[-1] if found else {}
        if is_user and last.get("role") == "user" and (is_rule or joins):
            fields = last if is_rule else message
            found[-1] = {**fields, "content": _joined(last, message)["content"]}
        else:
            found.append({**message, "role": "user"} if is_rule else message)
        joins = is_rule
    return found
