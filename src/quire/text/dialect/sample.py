"""One sample of an answer in parts, with its stop strings and its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams
from quire.text.dialect.parser import AnswerParser
from quire.text.dialect.parts import Part, Text
from quire.text.rendering import Ending, StopMatcher

__all__ = ["PartsReader", "PartsUpdate"]


class PartsUpdate(NamedTuple):
    """Growth of one answer. num_tokens_kept: tokens of this call that belong to it. ending: given
    once, with the last one."""

    parts: list[Part]
    num_tokens_kept: int
    ending: Ending | None


class PartsReader:
    """One sample of a parsed answer. Stop strings match in its text alone, and never across the
    parts between two texts."""

    def __init__(
        self,
        parser: AnswerParser,
        params: SamplingParams,
        *,
        stop_tokens: Mapping[int, str],
        end_token_ids: Collection[int],
    ) -> None:
        """stop_tokens: stop strings that are also tokens, by their ids. end_token_ids: tokens that
        end any answer of the model, and are no `stop_reason`."""
        self._parser = parser
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._has_stops = bool(params.stop_strings)
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stop_tokens = stop_tokens
        self._end_token_ids = end_token_ids
        self._num_tokens = 0

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def take(self, token_ids: Sequence[int], finish: SequenceFinish | None) -> PartsUpdate:
        """Take the engine's output, like `OutputRenderer.take`: a stop string ends the answer
        although the engine goes on."""
        visible, stop = token_ids, None
        if finish is not None and finish.reason is FinishReason.STOP and token_ids:
            stop = self._stop_tokens.get(token_ids[-1])
            if not (self._includes_stop and token_ids[-1] not in self._end_token_ids):
                visible = token_ids[:-1]
        parts, num_kept = self._read(visible)
        if self._matcher.matched is None:
            num_kept = len(token_ids)
            if finish is not None:
                parts += self._end(stop)
        self._num_tokens += num_kept
        return PartsUpdate(parts, num_kept, self._ending(finish))

    def _read(self, token_ids: Sequence[int]) -> tuple[list[Part], int]:
        """Return the parts, and the number of tokens up to the one that completed a stop string."""
        if not self._has_stops:
            return self._parser.take(token_ids), len(token_ids)
        parts: list[Part] = []
        for count, token_id in enumerate(token_ids, start=1):
            new = self._parser.take((token_id,))
            check = self._num_tokens + count > self._min_tokens
            parts += self._before_stop(new, check=check)
            if check and self._matcher.would_match(self._parser.held_space):
                parts += _text(self._matcher.append(self._parser.held_space).text)
            if self._matcher.matched is not None:
                return parts, count
        return parts, len(token_ids)

    def _before_stop(self, parts: Sequence[Part], *, check: bool) -> list[Part]:
        """Return the parts to show: all, or those before a stop string."""
        shown: list[Part] = []
        for part in parts:
            if not isinstance(part, Text):
                shown += (*_text(self._matcher.finish()), part)
                continue
            text, stop = self._matcher.append(part.text, check)
            shown += _text(text)
            if stop is not None:
                break
        return shown

    def _end(self, stop: str | None) -> list[Part]:
        """Return the text that was held back, since nothing follows. stop: a stop string that came
        as a token."""
        parts = self._before_stop(
            self._parser.finish(), check=self._num_tokens + 1 > self._min_tokens
        )
        if stop is not None:
            return parts + _text(self._matcher.end_with(stop))
        return parts + _text(self._matcher.finish())

    def _ending(self, finish: SequenceFinish | None) -> Ending | None:
        stopped = self._matcher.matched
        if stopped is not None:
            return Ending(FinishReason.STOP, stopped)
        if finish is None:
            return None
        return Ending.of(finish, self._end_token_ids)


def _text(text: str) -> list[Part]:
    return [Text(text)] if text else []
