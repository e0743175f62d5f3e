"""Lines that coding agents put into system prompts and change with every request.

A prompt that differs near its start finds no cached prefix. The lines below mean nothing to a
model. They are removed from prompts as whole lines, and listed in the request's timeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["without_volatile"]

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""An accounting line with a nonce: the whole text of a block, or its first line."""

_COUNTDOWN = re.compile(r"\n?<total_tokens>\d+ tokens left(?:</total_tokens>)?\s*\Z")
"""A count that falls from turn to turn, as the very last line."""


def without_volatile(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts of a system prompt without such lines, and the lines. The accounting line is
    looked for at the start of each text, the count at the end of the last. Empty texts are dropped.
    """
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
