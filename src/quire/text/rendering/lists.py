"""Tells one prompt or conversation from a list of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from quire.text.rendering.renderer import Prompt

__all__ = ["as_list", "holds_lists", "holds_messages"]


def as_list(prompts: object) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the argument was a single one. What is no prompt at all is taken
    for a single one, which rendering then refuses."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [cast("Prompt", prompts)], True
    items = list(cast("Iterable[Any]", prompts))
    if not items or isinstance(items[0], str | Mapping) or items[0] is None:
        return items, False
    is_number = getattr(items[0], "ndim", None) == 0  # of an array, where it may have a length
    if hasattr(items[0], "__len__") and not is_number:
        return items, False
    return [items], True


def holds_lists(messages: object) -> bool:
    """Return whether these are conversations and not the messages of one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return False
    first = cast("Sequence[object]", messages)[0]
    return isinstance(first, Sequence) and not isinstance(first, str)


def holds_messages(prompt: object) -> bool:
    """Return whether these are the messages of a conversation, of which each is a dict or an object
    of an SDK, and not a prompt."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        return False
    first = cast("Sequence[object]", prompt)[0]
    is_object = dataclasses.is_dataclass(first) or callable(getattr(first, "model_dump", None))
    return isinstance(first, Mapping) or is_object
