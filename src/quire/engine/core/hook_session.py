"""Verdicts of the hooks of one sequence on its unsent tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np

from quire.base.errors import EngineError
from quire.hooks import (
    Answer,
    End,
    OutputHook,
    Pass,
    Replace,
    SequenceHook,
    Unsent,
    WatchedSequence,
)
from quire.plan.scheduler.constraints.unsent import Question, Verdict
from quire.protocol.request import EngineRequest
from quire.text.rendering.detokenize import IncrementalDetokenizer
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["HookSession", "HookText", "TokenTexts"]

T = TypeVar("T")

MAX_REPLACEMENTS = 256
"""Limit per sequence: a hook that refuses its own tokens would go on for ever."""


class HookText(Protocol):
    """Text of tokens, for hooks."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def stream(self, request: EngineRequest) -> IncrementalDetokenizer | None:
        """The text of an output that begins, as its client reads it. None: there is no text."""
        ...


class TokenTexts:
    """The texts of a tokenizer; none without one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return []
        return self._tokenizer.encode(text, add_special_tokens=False)

    def stream(self, request: EngineRequest) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            skip_special_tokens=request.params.skip_special_tokens,
            spaces_between_special_tokens=request.params.spaces_between_special_tokens,
            prompt_token_ids=request.prompt_token_ids.tolist(),
        )


class HookSession:
    """The hooks that watch one sequence. One thread at a time runs it.

    handle: handle of the sequence. asked: name of the hook that is being asked and the time of the
    call, on the monotonic clock; None between calls. num_calls: number of calls of hooks.
    """

    def __init__(self, hooks: Mapping[str, OutputHook], first: Question, text: HookText) -> None:
        self.handle = first.handle
        self._hooks = hooks
        self._text = text
        self._request = first.request
        self._sample_index = first.sample_index
        self._sent: list[int] = first.request.output_token_ids.tolist()
        self._watching: dict[str, SequenceHook] = {}
        self._stream: IncrementalDetokenizer | None = None
        self._texts: list[str] = []  # of the unsent tokens that are known
        self._is_stale = True  # the texts, since tokens were replaced
        self._num_replaced = 0
        self.asked: tuple[str, float] | None = None
        self.num_calls = 0

    def answer(self, question: Question) -> Verdict:
        """Ask all hooks about each new token. Never raises: any exception of a hook ends its
        request."""
        try:
            if not self._watching:
                self._begin()
            return self._answer(question)
        except BaseException as error:  # noqa: BLE001  in a thread that Ctrl-C does not reach
            name = self.asked[0] if self.asked is not None else "?"
            self.asked = None
            message = f"the output hook {name!r} failed ({error!r}): mend it, or ask without it"
            return Verdict(question.handle, failure=message)

    def _begin(self) -> None:
        prompt = self._request.prompt_token_ids.tolist()
        for name, hook in self._hooks.items():
            sequence = WatchedSequence(
                self._request.request_id,
                self._sample_index,
                tuple(prompt),
                tuple(self._sent),
                self._text.decode,
                self._text.encode,
            )
            self._watching[name] = self._timed(name, partial(hook.watch, sequence))

    def _answer(self, question: Question) -> Verdict:
        tokens: list[int] = question.token_ids.tolist()
        if self._is_stale:
            self._read_again(tokens[: question.num_known])
        num_passed = 0
        has_new = len(tokens) > question.num_known
        for end in range(question.num_known + has_new, len(tokens) + 1):
            is_last = question.is_last and end == len(tokens)
            if end > len(self._texts):
                self._texts.append(self._next_text(tokens[end - 1]))
            if is_last and self._texts and self._stream is not None:
                self._texts[-1] += self._stream.finish()
            unsent = Unsent(tuple(tokens[num_passed:end]), tuple(self._texts[num_passed:]), is_last)
            name, answer = self._ask_all(unsent)
            if not isinstance(answer, Pass):
                return self._change(question, tokens, num_passed, name, answer)
            num_passed += len(unsent.token_ids) if answer.num_tokens is None else answer.num_tokens
        self._pass(tokens, num_passed)
        return Verdict(question.handle, num_passed)

    def _ask_all(self, unsent: Unsent) -> tuple[str, Answer]:
        """Return what all hooks let pass, or the first other answer and whose it is."""
        count = most = len(unsent.token_ids)
        for name, watching in self._watching.items():
            self.num_calls += 1
            # Hooks are written by others: their answers are checked.
            answer = cast("object", self._timed(name, partial(watching.judge, unsent)))
            if isinstance(answer, Replace | End):
                if not 0 <= answer.num_kept <= count:
                    raise self._bad(name, f"{answer} of {count} unsent tokens")
                return name, answer
            if not isinstance(answer, Pass):
                raise self._bad(name, f"the answer {answer!r:.80}")
            passed = count if answer.num_tokens is None else answer.num_tokens
            if not 0 <= passed <= count:
                raise self._bad(name, f"{answer} of {count} unsent tokens")
            if unsent.is_last and passed < count:
                raise self._bad(name, f"{answer} of {count} tokens at the end of the output")
            most = min(most, passed)
        return "", Pass(most)

    def _bad(self, name: str, what: str) -> EngineError:
        self.asked = (name, time.monotonic())
        return EngineError(f"it gave {what}, which is not an answer")

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        self.asked = (name, time.monotonic())
        found = call()
        self.asked = None
        return found

    def _change(
        self,
        question: Question,
        tokens: list[int],
        num_passed: int,
        name: str,
        answer: Replace | End,
    ) -> Verdict:
        num_kept = num_passed + answer.num_kept
        if isinstance(answer, End):
            return Verdict(question.handle, num_kept, end=answer.reason)
        instead = list(answer.token_ids) or self._text.encode(answer.text)
        if not instead or any(token < 0 for token in instead):
            raise self._bad(name, f"{answer}, which puts no tokens there")
        self._num_replaced += 1
        if self._num_replaced > MAX_REPLACEMENTS:
            raise self._bad(name, f"more than {MAX_REPLACEMENTS} replacements in one output")
        self._pass(tokens, num_passed)
        self._is_stale = True
        return Verdict(question.handle, num_passed, num_kept, np.array(instead, np.int32))

    def _pass(self, tokens: list[int], count: int) -> None:
        self._sent += tokens[:count]
        del self._texts[:count]

    def _next_text(self, token: int) -> str:
        return "" if self._stream is None else self._stream.append((token,))

    def _read_again(self, known: list[int]) -> None:
        """Begin the text anew, after tokens have gone that it had."""
        self._stream = self._text.stream(self._request)
        if self._stream is not None:
            self._stream.append(self._sent)
        self._texts = [self._next_text(token) for token in known]
        self._is_stale = False
