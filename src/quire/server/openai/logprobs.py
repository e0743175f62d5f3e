"""Log-probabilities in the forms of the two APIs. All are natural logarithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.step import TokenLogprobs
from quire.server.openai.answer import encoded_by_turns
from quire.server.requests.errors import RefusedError
from quire.text.rendering import Tokenizer

__all__ = ["CompletionLogprobs", "LogprobsBudget", "LogprobsWriter"]

FLOOR = -9999.0
"""Log-probability written for an impossible token: JSON has no minus infinity."""

_BYTES_PER_ENTRY = 64
"""Approximate bytes of a token and its log-probability in JSON."""


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_TopLogprob]
    log_mass: float | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice of /v1/completions; None at the first token of a prompt, which nothing
    predicts. text_offset: start of each token in the text of the choice.

    `top_logprobs[i]` has as many entries as were asked for, and one more if token i is not among
    them. `tokens[i]` is that token's key, even if another one reads the same. log_masses: see
    `TokenLogprobs.log_mass`, with None at tokens of a prompt; left out under raw modes.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    log_masses: list[float | None] | UnsetType = UNSET


class LogprobsBudget:
    """Budget for all log-probabilities of one response, over its prompts and samples."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def spend(self, num_logprobs: int) -> None:
        """Spend some of it. Raises RefusedError if that is too much."""
        self._num_bytes += num_logprobs * _BYTES_PER_ENTRY
        if self._num_bytes > self._max_bytes:
            raise RefusedError(
                f"The log-probabilities of this response take more than {self._max_bytes} bytes "
                "(max_logprobs_bytes). Ask for fewer, or lower max_tokens.",
                param="logprobs",
            )


class LogprobsWriter:
    """Writes those of one choice, within the budget of its response.

    num_top: number of the most likely tokens to name, besides the actual one. as_ids: write tokens
    as `token_id:<id>`, which is also done without a tokenizer. A token that is part of a character
    is written as `bytes:\xf0\x9f`. starts_text: no text precedes the first token. shows_special:
    special tokens are part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_top: int,
        budget: LogprobsBudget,
        *,
        as_ids: bool = False,
        starts_text: bool = False,
        shows_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._budget = budget
        self._as_ids = as_ids or tokenizer is None
        self._starts_text = starts_text
        self._shows_special = shows_special

    def chat(self, entries: Sequence[TokenLogprobs]) -> list[_ChatLogprob]:
        """Return items of `logprobs.content`. Raises RefusedError if there would be too many."""
        self._charge(len(entries))
        return list(self._chat(entries))

    async def chat_by_turns(self, entries: Sequence[TokenLogprobs]) -> list[_ChatLogprob]:
        """Return the same as `chat`, as JSON for its place. See `encoded_by_turns`."""
        self._charge(len(entries))
        return await encoded_by_turns(self._chat(entries))

    def _chat(self, entries: Sequence[TokenLogprobs]) -> Iterator[_ChatLogprob]:
        for entry in entries:
            yield _ChatLogprob(
                self._name(entry.token_id),
                max(entry.logprob, FLOOR),
                list(self._bytes(entry.token_id)),
                [
                    _TopLogprob(self._name(token), max(logprob, FLOOR), list(self._bytes(token)))
                    for token, logprob in self._top(entry)
                ],
                UNSET if entry.log_mass is None else entry.log_mass,
            )
            self._pass(entry.token_id)

    def completion(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> CompletionLogprobs:
        """Return `logprobs` of the next tokens of one choice. Errors as in `chat`."""
        found = self._completion(entries, offsets)
        found.top_logprobs += self._fill(found, token_ids, entries)
        return found

    async def completion_by_turns(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> CompletionLogprobs:
        """Return the same as `completion`, for its place in JSON. See `encoded_by_turns`."""
        found = self._completion(entries, offsets)
        found.top_logprobs += await encoded_by_turns(self._fill(found, token_ids, entries))
        return found

    def _completion(
        self, entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        self._charge(len(entries))
        masses = [None if entry is None else entry.log_mass for entry in entries]
        has_masses = any(mass is not None for mass in masses)
        return CompletionLogprobs([], [], [], list(offsets), masses if has_masses else UNSET)

    def _fill(
        self,
        found: CompletionLogprobs,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
    ) -> Iterator[dict[str, float] | None]:
        """Add all tokens to `found`, and yield what belongs to its `top_logprobs`."""
        for token, entry in zip(token_ids, entries, strict=True):
            name = self._name(token)
            found.tokens.append(name)
            found.token_logprobs.append(None if entry is None else max(entry.logprob, FLOOR))
            yield None if entry is None else self._by_name(entry, name)
            self._pass(token)

    async def prompt_by_turns(
        self, entries: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, object]] | None]:
        """Return the field `prompt_logprobs`, indexed by token id in vLLM's form, as JSON for its
        place. See `encoded_by_turns`. Raises the errors of `chat`."""
        self._charge(len(entries))
        return await encoded_by_turns(
            None if entry is None else self._by_id(entry) for entry in entries
        )

    def _by_name(self, entry: TokenLogprobs, own_name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in self._top(entry):
            name = own_name
            if token != entry.token_id:
                name = self._name(token)
                if name == own_name or name in found:
                    name = _id_name(token)
            found[name] = max(logprob, FLOOR)
        found[own_name] = max(entry.logprob, FLOOR)
        return found

    def _by_id(self, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
        ranked = [(token, lp, rank) for rank, (token, lp) in enumerate(self._top(entry), start=1)]
        if all(token != entry.token_id for token, _, _ in ranked):
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        return {
            str(token): {
                "logprob": max(logprob, FLOOR),
                "rank": rank,
                "decoded_token": ""
                if self._tokenizer is None
                else self._tokenizer.token_text(token),
            }
            for token, logprob, rank in ranked
        }

    def _top(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        ids = entry.top_ids[: self._num_top].tolist()
        return list(zip(ids, entry.top_logprobs[: self._num_top].tolist(), strict=True))

    def _name(self, token_id: int) -> str:
        if self._as_ids:
            return _id_name(token_id)
        data = self._bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + data.replace(b"\\", rb"\\").decode("ascii", "backslashreplace")

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        return self._tokenizer.token_bytes(token_id, starts_text=self._starts_text)

    def _pass(self, token_id: int) -> None:
        """Advance past the token; if it is part of the text, what follows starts none."""
        if self._starts_text and self._tokenizer is not None:
            is_hidden = not self._shows_special and self._tokenizer.is_special(token_id)
            self._starts_text = is_hidden

    def _charge(self, num_entries: int) -> None:
        self._budget.spend(num_entries * (self._num_top + 1))


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
