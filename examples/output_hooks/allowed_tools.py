"""Lets a model call a tool only when the state of the conversation allows it.

    quire serve --output-hook tools=allowed_tools:shop

and a request with "hooks": ["tools"]. The state is read from the prompt: `pay` is allowed after a
result of `show_cart` alone. A call of another tool is replaced by one of the tool that is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.hooks import HOLD, PASS, Answer, End, Replace, SequenceHook, Unsent, WatchedSequence

_CALL = re.compile(r'\{\s*"name"\s*:\s*"(\w*)("?)')


@dataclass(frozen=True)
class AllowedTools:
    """needs: text by tool that must be in the prompt before the tool may be called. instead: tool
    that is called in place of a forbidden one."""

    needs: Mapping[str, str]
    instead: str

    def watch(self, sequence: WatchedSequence) -> SequenceHook:
        prompt = sequence.decode(sequence.prompt_token_ids)
        allowed = {tool for tool, needed in self.needs.items() if needed in prompt}
        return _Calls(allowed, self.instead)


class _Calls:
    def __init__(self, allowed: set[str], instead: str) -> None:
        self._allowed = allowed
        self._instead = instead

    def judge(self, unsent: Unsent) -> Answer:
        text = unsent.text
        begin = text.find("{")
        if begin < 0:
            return PASS
        call = _CALL.match(text, begin)
        if call is None:
            # Not a call, or not enough of one to tell.
            return HOLD if len(text) - begin < 12 and not unsent.is_last else PASS
        if not call[2]:
            return End("a tool call without an end") if unsent.is_last else HOLD
        if call[1] in self._allowed:
            return PASS
        num_kept = next(i for i, _ in enumerate(unsent.texts) if _has_brace(unsent, i))
        before = "".join(unsent.texts[:num_kept])
        head = text[len(before) : begin]
        return Replace(num_kept, text=f'{head}{{"name": "{self._instead}"')


def _has_brace(unsent: Unsent, index: int) -> bool:
    return "{" in unsent.texts[index]


shop = AllowedTools(needs={"show_cart": "", "pay": '"cart":'}, instead="show_cart")
