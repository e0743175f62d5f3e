"""Answers in parts: text, reasoning and calls, separated as they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.base.errors import RequestError
from quire.protocol.json_schema import num_chars_to_read
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.server.requests.errors import RefusedError
from quire.text.dialect import (
    AnswerParser,
    Dialect,
    NamedTool,
    Thinking,
    Tool,
    ToolChoice,
    answer_grammar,
    thinking_at_end,
)
from quire.text.dialect.sample import PartsReader
from quire.text.dialect.tools import tools_prompt
from quire.text.rendering import RenderedPrompt, Tokenizer

__all__ = ["AnswerForm", "PartsReader"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of the answers to one request, in the dialect of its model. The engine is held to
    it, and answers are read by it.

    tools: tools that an answer may call. thinking_budget: most tokens of its thinking.
    num_prior_calls: calls in the conversation so far; some families count ids from there. thinking:
    state in which the prompt leaves the model.
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
        """Return the form of answers to this prompt, which may have opened their thinking."""
        state = thinking_at_end(self.dialect, prompt.known_token_ids, self.tokenizer)
        return replace(self, thinking=state)

    @property
    def is_named(self) -> bool:
        """Return True if the answer is one call of a tool that the request named."""
        return isinstance(self.choice, NamedTool)

    @property
    def tools_text(self) -> str:
        """Return the tools in words, if the template has no place for them; otherwise an empty
        text."""
        return tools_prompt(self.tools, self.choice) if self.dialect.describes_tools else ""

    @property
    def num_chars(self) -> int:
        """Return the number of characters that `held` has to read, as `num_chars_to_read` counts
        them."""
        return sum(num_chars_to_read(tool.parameters) for tool in self.tools)

    def held(self, request: EngineRequest) -> EngineRequest:
        """Add the grammar of the answers, and the tokens that end them. Raises RefusedError if
        there can be no such grammar."""
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
            raise RefusedError(str(error), param="tools") from error
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
