"""Gathers what one step gives to the clients, in flat arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.protocol.request import EMPTY_HANDLES, EngineOutput, SequenceFinish
from quire.protocol.step import EMPTY_INTS, FloatArray, PromptLogprobs, TokenLogprobs

__all__ = ["OutputCollector"]


class OutputCollector:
    """Filled while results are applied, emptied once per step."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._handles: list[npt.NDArray[np.int64]] = []
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._cached: dict[int, int] = {}
        self._vectors: dict[int, FloatArray] = {}
        self._finished: list[SequenceFinish] = []

    def tokens(self, handles: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]) -> None:
        if len(handles):
            self._handles.append(handles)
            self._tokens.append(token_ids)

    def logprobs(self, handle: int, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the sequence's next token of this step."""
        self._logprobs.setdefault(handle, []).append(entry)

    def prompt_logprobs(self, handle: int, piece: PromptLogprobs) -> None:
        self._prompt_logprobs[handle] = piece

    def vector(self, handle: int, vector: FloatArray) -> None:
        self._vectors[handle] = vector

    def cached(self, handle: int, num_tokens: int) -> None:
        self._cached[handle] = num_tokens

    def finish(self, finish: SequenceFinish) -> None:
        self._finished.append(finish)

    @property
    def has_any(self) -> bool:
        return bool(self._handles or self._finished or self._prompt_logprobs or self._cached)

    def drain(self) -> EngineOutput:
        output = EngineOutput(
            handles=np.concatenate(self._handles) if self._handles else EMPTY_HANDLES,
            token_ids=np.concatenate(self._tokens) if self._tokens else EMPTY_INTS,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached,
            vectors=self._vectors,
            finished=tuple(self._finished),
        )
        self._clear()
        return output
