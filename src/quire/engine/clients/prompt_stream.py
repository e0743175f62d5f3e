"""A request whose prompt is computed while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NoReturn

import numpy as np

from quire.base.errors import RequestError
from quire.base.platform.interrupts import held
from quire.engine.clients.in_process import EngineClient
from quire.protocol.control import ExtendPrompt
from quire.protocol.outputs import RequestOutput
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import IntArray
from quire.text.rendering import OutputAssembler, PromptPieces, RenderedPrompt

__all__ = ["PromptStream"]


class PromptStream:
    """`append` pieces, then `finish`; the tokens are those of the whole prompt at once.

    A context manager: leaving it before `finish` ends the request.
    """

    def __init__(
        self,
        request: EngineRequest,
        params: SamplingParams,
        pieces: PromptPieces,
        client: EngineClient,
        assembler: OutputAssembler,
        step: Callable[[], object],
    ) -> None:
        """request: all of it but the prompt; its handle and the next one are this stream's. step:
        runs one step of the engine."""
        others = (params.prompt_logprobs, params.truncate_prompt_tokens)
        if params.n != 1 or others != (None, None):
            raise RequestError(
                "a prompt in pieces has n=1, no prompt_logprobs and no truncate_prompt_tokens: "
                "leave them out, or give the prompt whole"
            )
        self._request = request
        self._params = params
        self._pieces = pieces
        self._client = client
        self._assembler = assembler
        self._step = step
        self._output: RequestOutput | None = None
        self._is_finished = False

    def append(self, piece: str | Sequence[int]) -> None:
        """The next piece: text, or token ids. It is computed before this returns, but for the last
        few tokens; of a long text, but for its last 64th. RequestError if it cannot be part of the
        prompt, which ends the request, or if that has ended: it says why."""
        self._check_open()
        try:
            found = self._pieces.add(piece)
            if found and self._output is None:
                self._add(found, is_open=True)
            elif found:
                self._extend(found, is_last=False)
        except RequestError:
            self.close()
            raise
        while found and not self._client.waits_for_input and not self._has_ended:
            self._step()
        self._check_open()

    def finish(self, piece: str | Sequence[int] = "") -> RequestOutput:
        """The last piece, if any, and the answer. Raises RequestError if the request failed."""
        if not (isinstance(piece, str) and piece == ""):
            self.append(piece)
        self._check_open()
        try:
            output = self._complete()
            while not output.finished:
                self._step()
        finally:
            self.close()
        if output.error is not None:
            raise RequestError(output.error)
        return output

    def close(self) -> None:
        """End the request, whatever its state. May be called twice."""
        self._is_finished = True
        if self._output is not None and not self._output.finished:
            self._assembler.drop([self.handle])
            self._client.abort([self.handle])

    def __enter__(self) -> PromptStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def handle(self) -> int:
        """The engine's current name for the request."""
        return self._request.first_handle

    @property
    def _has_ended(self) -> bool:
        return self._output is not None and self._output.finished

    def _check_open(self) -> None:
        if self._is_finished:
            raise RequestError("this prompt has ended: open another one")
        if self._has_ended:
            self._refuse()

    def _refuse(self) -> NoReturn:
        assert self._output is not None, "otherwise the engine has not heard of it"
        reason = self._output.error or "it was aborted"
        self.close()
        raise RequestError(f"this request ended before its prompt did: {reason}")

    def _extend(self, token_ids: list[int], *, is_last: bool) -> None:
        """Send more of the prompt. RequestError, with the reason, if the request has ended."""
        op = ExtendPrompt(self.handle, _ids(token_ids), is_last)
        if self._client.control(op).was_there:
            return
        while self._client.has_unfinished and not self._has_ended:
            self._step()  # the news of its end is on the way
        self._refuse()

    def _complete(self) -> RequestOutput:
        """Give the engine what it lacks of the whole prompt."""
        whole, given = self._pieces.whole(), self._pieces.token_ids
        if self._output is not None and whole.token_ids[: len(given)] == given:
            self._assembler.set_prompt(self.handle, whole)
            self._extend(whole.token_ids[len(given) :], is_last=True)
            return self._output
        if self._output is not None:  # the text's first tokens are others than they seemed
            self._assembler.drop([self.handle])
            self._client.abort([self.handle])
            self._request = replace(self._request, first_handle=self.handle + 1)
        return self._add(whole.token_ids, is_open=False, text=whole.text)

    @held()
    def _add(
        self, token_ids: list[int], *, is_open: bool, text: str | None = None
    ) -> RequestOutput:
        """Queue the request; its output, by which `close` knows that there is something to end."""
        prompt = RenderedPrompt(token_ids, text)
        name = self._request.request_id
        output = self._assembler.add(name, self.handle, prompt, self._params)
        request = replace(self._request, prompt_token_ids=_ids(token_ids), is_open=is_open)
        try:
            self._client.add(request)
        except BaseException:
            self._assembler.drop([self.handle])
            self._client.abort([self.handle])
            raise
        self._output = output
        return output


def _ids(token_ids: list[int]) -> IntArray:
    return np.array(token_ids, np.int32)
