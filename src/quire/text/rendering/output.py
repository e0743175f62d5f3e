"""The text of one output sequence: detokenizing, stop strings, and which tokens are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.base.errors import RequestError
from quire.protocol.request import FinishReason, SequenceFinish
from quire.text.rendering.detokenize import IncrementalDetokenizer
from quire.text.rendering.stop import StopMatcher


class TextDelta(NamedTuple):
    """Addition by `OutputRenderer.append`.

    `stopped` is the stop string that ended the sequence. `num_tokens_kept` counts the tokens of
    this call that belong to the output: all, or up to and including the one that completed the
    stop string.
    """

    text: str
    stopped: str | None
    num_tokens_kept: int


class Ending(NamedTuple):
    """End of an output, as clients read it. stop_reason: the stop string or the stop token id, None
    for an end token of the model; a word for a loop."""

    reason: FinishReason
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, finish: SequenceFinish, end_token_ids: Collection[int]) -> Ending:
        """Return the end that the engine gave. end_token_ids: end tokens of the model."""
        if finish.reason is FinishReason.REPETITION:
            return cls(finish.reason, "repetition_detected")  # as in vLLM
        is_end = finish.stop_token_id in end_token_ids
        return cls(finish.reason, None if is_end else finish.stop_token_id)


class OutputUpdate(NamedTuple):
    """Growth of one output. num_tokens_kept: see `TextDelta`. ending: only set in the last one."""

    text: str
    num_tokens_kept: int
    ending: Ending | None


class OutputRenderer:
    """Text of one sequence, token by token.

    `detokenizer` None (an engine without tokenizer) renders every output as empty text. As in
    vLLM, `min_tokens` exempts the first so many tokens from stop strings: the token that completes
    a stop string is at the earliest number `min_tokens + 1`.
    stop_tokens: stop strings that are tokens as well, by their ids. eos_token_ids: end tokens of
    the model, which are no `stop_reason`.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None,
        stop: Iterable[str] = (),
        *,
        stop_tokens: Mapping[int, str] | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        stops = tuple(stop)
        if detokenizer is None and stops:
            raise RequestError(
                f"`stop` has {len(stops)} strings, but the engine runs without a tokenizer and "
                "cannot see text. Use `stop_token_ids`, or start without skip_tokenizer_init."
            )
        self._detokenizer = detokenizer
        self._has_stops = bool(stops)
        self._stop_tokens = stop_tokens or {}
        self._matcher = StopMatcher(stops, include_stop_str_in_output)
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._eos_token_ids = eos_token_ids
        self._num_tokens = 0
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def num_tokens(self) -> int:
        """Tokens kept so far."""
        return self._num_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the sequence."""
        return self._matcher.matched

    def take(self, token_ids: Sequence[int], finish: SequenceFinish | None) -> OutputUpdate:
        """Take what the engine gave: new tokens, and how the sequence ended if it did.

        A stop string ends the output although the engine goes on: then `finish` is None and
        `ending` is not, and the sequence is to be aborted.
        """
        is_stop = finish is not None and finish.reason is FinishReason.STOP
        text, stopped, num_kept = self.append(token_ids, is_stop)
        if finish is not None and stopped is None:
            text += self.finish()
        return OutputUpdate(text, num_kept, self._ending(finish))

    def _ending(self, finish: SequenceFinish | None) -> Ending | None:
        if self.stopped is not None:
            return Ending(FinishReason.STOP, self.stopped)
        if finish is None:
            return None
        return Ending.of(finish, self._eos_token_ids)

    def append(self, token_ids: Sequence[int], ends_with_stop_token: bool = False) -> TextDelta:
        """Take new tokens and return the text that is certain now.

        With `ends_with_stop_token` the last token is one of the request's stop tokens: it is kept
        as a token, and its text is left out unless the stop is to be included in the output.
        """
        if self._has_stops and self.stopped is not None:
            return TextDelta("", self.stopped, 0)
        if self._detokenizer is None:
            self._num_tokens += len(token_ids)
            return TextDelta("", None, len(token_ids))
        visible = token_ids
        if ends_with_stop_token and not self._includes_stop:
            visible = token_ids[:-1]
        if not self._has_stops:
            self._num_tokens += len(token_ids)
            return TextDelta(self._keep(self._detokenizer.append(visible)), None, len(token_ids))
        text, num_kept = self._append_checked(self._detokenizer, visible)
        if self.stopped is None:
            num_kept = len(token_ids)
            if ends_with_stop_token and token_ids[-1] in self._stop_tokens:
                text += self._end_by_token(self._detokenizer, self._stop_tokens[token_ids[-1]])
        self._num_tokens += num_kept
        return TextDelta(self._keep(text), self.stopped, num_kept)

    def finish(self) -> str:
        """The text still held, once no token follows. A stop string may match in it (`stopped`)."""
        if self._detokenizer is None or self.stopped is not None:
            return ""
        rest = self._matcher.append(
            self._detokenizer.finish(), check=self._num_tokens > self._min_tokens
        )
        return self._keep(rest.text + self._matcher.finish())

    def _end_by_token(self, detokenizer: IncrementalDetokenizer, stop: str) -> str:
        """The text still held, once the token of `stop` has come; another stop string may match in
        it."""
        rest = self._matcher.append(detokenizer.finish()).text
        return rest + self._matcher.end_with(stop)

    def _append_checked(
        self, detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]
    ) -> tuple[str, int]:
        """Text released, and the number of tokens up to the one that completed a stop string."""
        parts: list[str] = []
        num_before = self._num_tokens
        for num_taken, token_id in enumerate(token_ids, start=1):
            delta = detokenizer.append((token_id,))
            if not delta:
                continue
            text, stop = self._matcher.append(
                delta, check=num_before + num_taken > self._min_tokens
            )
            parts.append(text)
            if stop is not None:
                return "".join(parts), num_taken
        return "".join(parts), len(token_ids)

    def _keep(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
