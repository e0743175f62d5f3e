"""A growing output in the way that its reader asked for."""

from __future__ import annotations

from dataclasses import replace

from quire.protocol.outputs import CompletionOutput, RequestOutput
from quire.protocol.sampling_params import RequestOutputKind

__all__ = ["OutputReader"]


class OutputReader:
    """Gives copies, which do not grow any more."""

    def __init__(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        self._output = output
        self._kind = kind
        self._read = [0] * len(output.outputs)
        self._num_chars = [0] * len(output.outputs)
        self._ended = [False] * len(output.outputs)
        self._is_first = True

    def read(self) -> RequestOutput | None:
        """Return the output to give now; None if there is nothing to give."""
        output = self._output
        if self._kind is RequestOutputKind.FINAL_ONLY and not output.finished:
            return None
        changed = [each for each in output.outputs if self._has_news(each)]
        if not changed and not output.finished:
            return None
        whole = self._kind is not RequestOutputKind.DELTA
        shown = [self._copy(each) for each in (output.outputs if whole else changed)]
        prompt_logprobs = output.prompt_logprobs if whole or self._is_first else None
        self._is_first = False
        metrics = None if output.metrics is None else replace(output.metrics)
        return replace(output, outputs=shown, prompt_logprobs=prompt_logprobs, metrics=metrics)

    def _has_news(self, completion: CompletionOutput) -> bool:
        index = completion.index
        if len(completion.token_ids) > self._read[index]:
            return True
        return completion.finished and not self._ended[index]

    def _copy(self, completion: CompletionOutput) -> CompletionOutput:
        index = completion.index
        start, first = self._read[index], self._num_chars[index]
        self._read[index], self._num_chars[index] = len(completion.token_ids), len(completion.text)
        self._ended[index] = completion.finished
        if self._kind is not RequestOutputKind.DELTA:
            start = first = 0
        logprobs = None if completion.logprobs is None else completion.logprobs[start:]
        masses = None if completion.log_masses is None else completion.log_masses[start:]
        return replace(
            completion,
            text=completion.text[first:],
            token_ids=completion.token_ids[start:],
            logprobs=logprobs,
            log_masses=masses,
        )
