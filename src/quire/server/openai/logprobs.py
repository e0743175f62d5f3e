"""Log-probabilities as the two APIs write them. All are natural logarithms."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.protocol.step import TokenLogprobs
from quire.rendering import Tokenizer
from quire.server.requests.errors import RefusedError

__all__ = ["CompletionLogprobs", "LogprobsBudget", "LogprobsWriter"]

FLOOR = -9999.0
"""What is written for an impossible token: JSON has no minus infinity."""

_BYTES_PER_ENTRY = 64
"""About what one token and its log-probability take in JSON."""


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_TopLogprob]


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice of /v1/completions; None at the first token of a prompt, which
    nothing predicts. text_offset: where each token begins in the text of the choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class LogprobsBudget:
    """What all log-probabilities of one response may take together, whichever of its prompts and
    samples they belong to."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def spend(self, num_logprobs: int) -> None:
        """RefusedError if that is too much."""
        self._num_bytes += num_logprobs * _BYTES_PER_ENTRY
        if self._num_bytes > self._max_bytes:
            raise RefusedError(
                f"The log-probabilities of this response take more than {self._max_bytes} bytes "
                "(max_logprobs_bytes). Ask for fewer, or lower max_tokens.",
                param="logprobs",
            )


class LogprobsWriter:
    """Writes those of one choice, within the budget of its response.

    num_top: the most likely tokens to name, beside the one that is there. as_ids: write tokens as
    `token_id:<id>`, which tells equal texts apart.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_top: int,
        budget: LogprobsBudget,
        *,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._budget = budget
        self._as_ids = as_ids
        self._offset = 0

    def chat(self, entries: Sequence[TokenLogprobs]) -> list[_ChatLogprob]:
        """Items of `logprobs.content`. RefusedError if there would be too many."""
        self._charge(len(entries))
        return [
            _ChatLogprob(
                self._text(entry.token_id),
                max(entry.logprob, FLOOR),
                self._bytes(entry.token_id),
                [
                    _TopLogprob(self._text(token), max(logprob, FLOOR), self._bytes(token))
                    for token, logprob in self._top(entry)
                ],
            )
            for entry in entries
        ]

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """`logprobs` of the next tokens of one choice. Errors as in `chat`."""
        self._charge(len(entries))
        tokens = [self._text(token) for token in token_ids]
        offsets: list[int] = []
        for token in token_ids:
            offsets.append(self._offset)
            self._offset += self._num_chars(token)
        return CompletionLogprobs(
            tokens,
            [None if entry is None else max(entry.logprob, FLOOR) for entry in entries],
            [None if entry is None else self._by_text(entry) for entry in entries],
            offsets,
        )

    def prompt(
        self, entries: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, object]] | None]:
        """The field `prompt_logprobs`: by token id, as vLLM writes them."""
        self._charge(len(entries))
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        found = {self._text(token): max(logprob, FLOOR) for token, logprob in self._top(entry)}
        found.setdefault(self._text(entry.token_id), max(entry.logprob, FLOOR))
        return found

    def _by_id(self, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
        ranked = [(token, lp, rank) for rank, (token, lp) in enumerate(self._top(entry), start=1)]
        if all(token != entry.token_id for token, _, _ in ranked):
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        return {
            str(token): {
                "logprob": max(logprob, FLOOR),
                "rank": rank,
                "decoded_token": self._plain_text(token),
            }
            for token, logprob, rank in ranked
        }

    def _top(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        ids = entry.top_ids[: self._num_top].tolist()
        return list(zip(ids, entry.top_logprobs[: self._num_top].tolist(), strict=True))

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._plain_text(token_id)

    def _plain_text(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _num_chars(self, token_id: int) -> int:
        """In the text of the choice, which leaves special tokens out."""
        if self._tokenizer is None or self._tokenizer.is_special(token_id):
            return 0
        return len(self._plain_text(token_id))

    def _bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def _charge(self, num_entries: int) -> None:
        self._budget.spend(num_entries * (self._num_top + 1))
