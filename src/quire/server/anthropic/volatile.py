"""Lines that coding agents put into system prompts and change with every request.

A prompt that differs near its start finds none of its prefix in the cache. The lines below say
nothing to a model; they are left out of prompts, whole, and named in the request's timeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["without_volatile"]

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""An accounting line with a nonce: all of a block's text, or the first line of it."""

_COUNTDOWN = re.compile(r"\n?<total_tokens>\d+ tokens left(?:</total_tokens>)?\s*\Z")
"""A count that falls from turn to turn, as the last line of all."""


def without_volatile(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts of a system prompt without such lines, and the lines. The first is looked
    for at the start of any text, the second at the end of the last one. Empty texts go."""
    kept: list[str] = []
    removed: list[str] = []
    for index, text in enumerate(texts):
        found = _BILLING.match(text)
        if found is not None:
            removed.append(found[0].strip())
            text = text[found.end() :]
        found = _COUNTDOWN.search(text) if index == len(texts) - 1 else None
        if found is not None:
            removed.append(found[0].strip())
            text = text[: found.start()]
        if text:
            kept.append(text)
    return kept, removed
