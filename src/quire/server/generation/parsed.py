"""Answers in parts: text, reasoning and calls, told apart as they come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.dialect import (
    AnswerParser,
    Dialect,
    NamedTool,
    Part,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    answer_grammar,
    thinking_at_end,
)
from quire.dialect.tools import tools_prompt
from quire.errors import RequestError
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams
from quire.rendering import Ending, RenderedPrompt, StopMatcher, Tokenizer
from quire.server.requests.errors import RefusedError

__all__ = ["AnswerForm", "PartsReader", "PartsUpdate"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of the answers to one request, in the dialect of its model: held, then read.

    tools: those that an answer may call. thinking_budget: most tokens of its thinking.
    num_prior_calls: in the conversation, from which some families count the ids of calls.
    thinking: where the prompt leaves the model.
    """

    dialect: Dialect
    tokenizer: Tokenizer
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    parallel: bool = True
    thinking_budget: int | None = None
    num_prior_calls: int = 0
    thinking: Thinking = Thinking.NONE

    def at_end_of(self, prompt: RenderedPrompt) -> AnswerForm:
        """Return the form of answers to this prompt, which may have begun their thinking."""
        state = thinking_at_end(self.dialect, prompt.known_token_ids, self.tokenizer)
        return replace(self, thinking=state)

    @property
    def is_named(self) -> bool:
        """Return whether the answer is one call of a tool that the request named."""
        return isinstance(self.choice, NamedTool)

    @property
    def tools_text(self) -> str:
        """The tools in words, if the template has no place for them; else empty."""
        return tools_prompt(self.tools, self.choice) if self.dialect.describes_tools else ""

    def held(self, request: EngineRequest) -> EngineRequest:
        """Add the grammar of the answers, and the tokens that end them. RefusedError if the grammar
        cannot be made."""
        try:
            grammar = answer_grammar(
                self.dialect,
                self.tools,
                self.choice,
                parallel=self.parallel,
                thinking=self.thinking,
                thinking_budget=self.thinking_budget,
                response=request.grammar,
            )
        except RequestError as error:
            is_budget = str(error).startswith("thinking_token_budget")
            param = "thinking_token_budget" if is_budget else "tools"
            raise RefusedError(str(error), param=param) from error
        except (RecursionError, TypeError, ValueError) as error:
            raise RefusedError(
                "A schema of the tools is nested too deeply, or has a keyword with a value of the "
                "wrong kind. Correct it.",
                param="tools",
            ) from error
        stops = request.stop_token_ids
        if not request.params.ignore_eos:
            stops |= self.dialect.stop_token_ids
        return replace(request, grammar=grammar, stop_token_ids=stops)

    def reader(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        stop_tokens: Mapping[int, str],
        eos_token_ids: frozenset[int],
    ) -> PartsReader:
        """Make the reader of one sample. stop_tokens, eos_token_ids: see `PartsReader`."""
        parser = AnswerParser(
            self.dialect,
            self.tokenizer,
            self.tools,
            self.thinking,
            prompt_token_ids=prompt.known_token_ids,
            num_prior_calls=self.num_prior_calls,
            skip_special_tokens=params.skip_special_tokens,
        )
        ends = eos_token_ids | self.dialect.stop_token_ids
        return PartsReader(parser, params, stop_tokens=stop_tokens, end_token_ids=ends)


class PartsUpdate(NamedTuple):
    """Growth of one answer. num_tokens_kept: tokens of this call that belong to it. ending: once,
    with the last one."""

    parts: list[Part]
    num_tokens_kept: int
    ending: Ending | None


class PartsReader:
    """One sample of an answer that is parsed. Stop strings match in its text alone, and never
    across what stands between two texts."""

    def __init__(
        self,
        parser: AnswerParser,
        params: SamplingParams,
        *,
        stop_tokens: Mapping[int, str],
        end_token_ids: Collection[int],
    ) -> None:
        """stop_tokens: stop strings that are tokens as well, by their ids. end_token_ids: what ends
        any answer of the model, which is no `stop_reason`."""
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
        """Take what the engine gave, like `OutputRenderer.take`: a stop string ends the answer
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
        """The parts, and the tokens up to the one that completed a stop string."""
        if not self._has_stops:
            return self._parser.take(token_ids), len(token_ids)
        parts: list[Part] = []
        for count, token_id in enumerate(token_ids, start=1):
            new = self._parser.take((token_id,))
            parts += self._before_stop(new, check=self._num_tokens + count > self._min_tokens)
            if self._matcher.matched is not None:
                return parts, count
        return parts, len(token_ids)

    def _before_stop(self, parts: Sequence[Part], *, check: bool) -> list[Part]:
        """Return what may be shown of them: all, or what stands before a stop string."""
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
        """Give what was held back, as nothing follows. stop: a stop string that came as a token."""
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
        is_end = finish.stop_token_id in self._end_token_ids
        return Ending(finish.reason, None if is_end else finish.stop_token_id)


def _text(text: str) -> list[Part]:
    return [Text(text)] if text else []
