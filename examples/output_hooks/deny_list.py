"""Ends an output before a forbidden phrase of it is sent.

    quire serve --output-hook deny_list:secrets

Text that may be the begin of a phrase is held until it is certain, so that no client ever reads a
part of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.hooks import Answer, End, Pass, SequenceHook, Unsent, WatchedSequence


class DenyList:
    """phrases: matched whatever their case, also across tokens."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = tuple(phrase.lower() for phrase in phrases)

    def watch(self, sequence: WatchedSequence) -> SequenceHook:
        del sequence  # all outputs have the same rule
        return self

    def judge(self, unsent: Unsent) -> Answer:
        text = unsent.text.lower()
        found = [place for phrase in self._phrases if (place := text.find(phrase)) >= 0]
        if found:
            return End("the deny list", _num_tokens_before(unsent, min(found)))
        if unsent.is_last:
            return Pass()
        begins = [place for place in range(len(text)) if self._may_begin(text[place:])]
        return Pass(_num_tokens_before(unsent, begins[0])) if begins else Pass()

    def _may_begin(self, text: str) -> bool:
        return any(phrase.startswith(text) for phrase in self._phrases)


def _num_tokens_before(unsent: Unsent, place: int) -> int:
    """Tokens whose texts end at or before a character."""
    num_tokens = num_chars = 0
    for text in unsent.texts:
        num_chars += len(text)
        if num_chars > place:
            break
        num_tokens += 1
    return num_tokens


secrets = DenyList(["confidential", "internal use only"])
