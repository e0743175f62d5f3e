"""llama-cpp-python's own decoding loop, which verifies the drafts of its prompt look-up. It serves
one request at a time. LOOKUP_TOKENS: drafts per step, 0 for none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.peers.engines.engine import EngineOptions, UnavailableError

__all__ = ["open_engine"]

MAX_NGRAM = 5


class LlamaLookupEngine:
    """Decodes greedily, a token per `step`: tokens of one verified run come at once."""

    def __init__(self, options: EngineOptions, num_drafts: int) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = LlamaPromptLookupDecoding(max_ngram_size=MAX_NGRAM, num_pred_tokens=num_drafts)
        self._llm = llama_cpp.Llama(
            str(options.model),
            n_ctx=options.max_model_len,
            n_threads=options.num_threads,
            n_threads_batch=options.num_threads,
            draft_model=lookup if num_drafts else None,
            verbose=False,
        )
        self._tokens: Iterator[int] = iter(())
        self._count = 0
        self.settings: dict[str, Any] = {
            "version": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "max_ngram_size": MAX_NGRAM,
            "num_pred_tokens": num_drafts,
            "n_threads": options.num_threads,
        }

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        del output_lengths  # whoever asks stops
        (prompt,) = prompts
        self._llm.reset()
        self._tokens = self._llm.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        self._count = 0

    def step(self) -> list[int]:
        next(self._tokens)
        self._count += 1
        return [self._count]

    def kernel_seconds(self) -> None:
        return None

    def close(self) -> None:
        self._llm.close()


def open_engine(options: EngineOptions) -> LlamaLookupEngine:
    if find_spec("llama_cpp") is None:
        raise UnavailableError("llama-cpp-python is not installed")
    return LlamaLookupEngine(options, int(os.environ.get("LOOKUP_TOKENS", "0")))
