"""llama.cpp through its Python package's C interface, with a scheduler as its server has one:
every step takes one token of each running request, then as much of the prompts as the batch holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.engines.engine import EngineOptions, UnavailableError
from benchmarks.peers.engines.gguf_file import write_gguf
from benchmarks.peers.engines.random_checkpoint import read_config

__all__ = ["open_engine"]

BATCH_TOKENS = 2048
"""Tokens of one call; llama.cpp computes it in pieces of 512. Both are its defaults."""
CONTEXT_STEP = 256
"""llama.cpp rounds the context of a sequence up to a multiple of this."""


@dataclass(slots=True)
class _Request:
    """tokens: prompt and output so far. num_computed: number of them in the cache."""

    tokens: list[int]
    wanted: int
    num_computed: int = 0
    num_outputs: int = 0


class LlamaCppEngine:
    """Request i is sequence i of one context."""

    def __init__(self, options: EngineOptions, file: Path) -> None:
        import llama_cpp
        from llama_cpp import llama_cpp as lib

        self._lib = lib
        self._silence = lib.llama_log_callback(_ignore)
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(file).encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise UnavailableError(f"llama.cpp does not load {file.name}")
        per_sequence = -(-options.max_model_len // CONTEXT_STEP) * CONTEXT_STEP
        params = lib.llama_context_default_params()
        params.n_ctx = per_sequence * options.max_num_seqs
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = options.max_num_seqs
        params.n_threads = params.n_threads_batch = options.num_threads
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise UnavailableError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        if not options.is_gguf:  # a file without a vocabulary counts no tokens
            self._vocab_size = read_config(options.model)["vocab_size"]
        self._max_num_seqs = options.max_num_seqs
        self._requests: list[_Request] = []
        self.settings: dict[str, Any] = {
            "version": llama_cpp.__version__,
            "system": lib.llama_print_system_info().decode(),
            "weights": options.weights,
            "n_ctx": params.n_ctx,
            "n_batch": params.n_batch,
            "n_ubatch": params.n_ubatch,
            "n_seq_max": params.n_seq_max,
            "n_threads": params.n_threads,
            "flash_attn_type": params.flash_attn_type,
            "kv_unified": params.kv_unified,
        }

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        if len(prompts) > self._max_num_seqs:
            raise ValueError(f"{len(prompts)} requests, room for {self._max_num_seqs}")
        self._lib.llama_memory_clear(self._memory, False)
        self._requests = [
            _Request(list(prompt), length)
            for prompt, length in zip(prompts, output_lengths, strict=True)
        ]

    def step(self) -> list[int]:
        rows = self._fill_batch()
        code = self._lib.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        for sequence, row in rows:
            request = self._requests[sequence]
            request.tokens.append(self._best_token(row))
            request.num_outputs += 1
            if request.num_outputs == request.wanted:
                self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return [request.num_outputs for request in self._requests]

    def kernel_seconds(self) -> None:
        return None

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def _fill_batch(self) -> list[tuple[int, int]]:
        """Fill the batch, decoding requests first. Return (sequence, row) of the rows that end the
        known tokens of a request, since they give the next one."""
        batch, ends = self._batch, []
        batch.n_tokens = 0
        live = [i for i, r in enumerate(self._requests) if r.num_outputs < r.wanted]
        for sequence in sorted(live, key=lambda i: self._requests[i].num_outputs == 0):
            request = self._requests[sequence]
            room = BATCH_TOKENS - batch.n_tokens
            last = min(len(request.tokens), request.num_computed + room)
            for position in range(request.num_computed, last):
                row = batch.n_tokens
                batch.token[row] = request.tokens[position]
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = position == len(request.tokens) - 1
                if batch.logits[row]:
                    ends.append((sequence, row))
                batch.n_tokens += 1
            request.num_computed = last
        return ends

    def _best_token(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))


def _ignore(*message: object) -> None:
    """llama.cpp tells its whole start-up on stderr."""


def open_engine(options: EngineOptions) -> LlamaCppEngine:
    if find_spec("llama_cpp") is None:
        raise UnavailableError("llama-cpp-python is not installed")
    if options.is_gguf:
        return LlamaCppEngine(options, options.model)
    file = options.work_dir / f"{options.weights}.gguf"
    if not file.exists() and find_spec("gguf") is None:
        raise UnavailableError("gguf, which writes the model file, is not installed")
    return LlamaCppEngine(options, write_gguf(options.model, file, options.weights, options.seed))
