"""Hooks that see an output before its client does: filters, verifiers, rules on tools.

An `OutputHook` is asked about each token of the outputs that it watches, in order, before that
token is sent. It may let tokens pass, hold them back, put others in their place, or end the output.
docs/hooks.md says how servers and requests name hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = [
    "HOLD",
    "PASS",
    "Answer",
    "End",
    "OutputHook",
    "Pass",
    "Replace",
    "SequenceHook",
    "Unsent",
    "WatchedSequence",
]


@dataclass(frozen=True, slots=True)
class WatchedSequence:
    """An output that begins, or goes on after the core that computed it has died.

    sent_token_ids: output that the client has already; empty at the begin. decode, encode: text of
    token ids with special tokens, and token ids of a text; they give nothing without a tokenizer.
    """

    request_id: str
    sample_index: int
    prompt_token_ids: Sequence[int]
    sent_token_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Unsent:
    """The tokens that the client has not got, the newest one last.

    texts: text that each token adds to the client's, without special tokens if the request leaves
    them out. A character that takes several tokens comes with the last of them. is_last: the output
    ends here, by a stop token or its length, unless tokens are replaced. Then the hook may be asked
    without a new token.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    is_last: bool

    @property
    def text(self) -> str:
        """All that the client has not read."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Pass:
    """Send the first `num_tokens` of the unsent tokens, None for all, and hold the others. Nothing
    may be held when `is_last`."""

    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Replace:
    """Keep the first `num_kept` of the unsent tokens, and put others in place of the rest: token
    ids, or else a text. At least one; the sequence goes on after them. They are unsent as well."""

    num_kept: int
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """End the output after the first `num_kept` of the unsent tokens, with finish_reason
    "content_filter". reason: text for the log of the engine and `SequenceFinish.message`."""

    reason: str
    num_kept: int = 0


PASS = Pass()
HOLD = Pass(0)

Answer = Pass | Replace | End


class SequenceHook(Protocol):
    """State that a hook keeps of one sequence."""

    def judge(self, unsent: Unsent) -> Answer:
        """Say what becomes of the unsent tokens. Asked once per token, in order, in a thread beside
        the engine, with a time limit. What is raised fails the request."""
        ...


@runtime_checkable
class OutputHook(Protocol):
    """Watches outputs. Several sequences may ask at once, each in a thread of its own."""

    def watch(self, sequence: WatchedSequence) -> SequenceHook:
        """Begin to watch a sequence."""
        ...
