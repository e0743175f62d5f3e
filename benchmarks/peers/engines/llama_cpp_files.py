"""llama.cpp as a maker and a reader of GGUF files, in a process of its own.

    python -m benchmarks.peers.engines.llama_cpp_files < request.json

{"make": [source, target, type]} writes `source` in another type. Others name "windows", lists of
token ids, and "threads". {"score": file} answers with the sum of -log p, in nats, of each window's
tokens after its first; {"first": file} with the most probable token after each window; {"logits":
file, "output": folder} writes float32 logits [tokens, vocabulary] of each window to OUTPUT/0.npy
and so on. Run by an interpreter that has llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TYPES"]

TYPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12,
    "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip
"""Types of whole files, with the numbers that llama.cpp gives them."""
CHUNK = 512


def make(lib: Any, source: str, target: str, kind: str) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = TYPES[kind], True
    code = lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama_model_quantize returned {code} for {kind}")


def logits(lib: Any, file: str, request: dict[str, Any]) -> Iterator[np.ndarray]:
    """Yield float32 logits [tokens, vocabulary] of each window."""
    windows, threads = request["windows"], request["threads"]
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    params = lib.llama_context_default_params()
    params.n_ctx = -(-max(map(len, windows)) // 256) * 256
    params.n_batch = params.n_ubatch = CHUNK
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(CHUNK, 0, 1)
    for window in windows:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        found = np.empty((len(window), vocab_size), np.float32)
        for first in range(0, len(window), CHUNK):
            part = window[first : first + CHUNK]
            for row, token in enumerate(part):
                batch.token[row], batch.pos[row] = token, first + row
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, True
            batch.n_tokens = len(part)
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for row in range(len(part)):
                address = lib.llama_get_logits_ith(context, row)
                found[first + row] = np.ctypeslib.as_array(address, (vocab_size,))
        yield found


def score(lib: Any, request: dict[str, Any]) -> list[float]:
    found: list[float] = []
    windows = request["windows"]
    inputs = {**request, "windows": [window[:-1] for window in windows]}
    for window, rows in zip(windows, logits(lib, request["score"], inputs), strict=True):
        total = 0.0
        for row, token in zip(rows.astype(np.float64), window[1:], strict=True):
            top = row.max()
            total += top + np.log(np.exp(row - top).sum()) - row[token]
        found.append(float(total))
    return found


def _ignore(*message: object) -> None:
    """llama.cpp tells its whole start-up on stderr."""


def main() -> None:
    import llama_cpp
    from llama_cpp import llama_cpp as lib

    request = json.load(sys.stdin)
    silence = lib.llama_log_callback(_ignore)
    lib.llama_log_set(silence, ctypes.c_void_p(0))
    lib.llama_backend_init()
    answer: dict[str, Any] = {
        "version": llama_cpp.__version__,
        "system": lib.llama_print_system_info().decode(),
    }
    if "make" in request:
        make(lib, *request["make"])
    elif "first" in request:
        rows = logits(lib, request["first"], request)
        answer["tokens"] = [int(each[-1].argmax()) for each in rows]
    elif "logits" in request:
        for number, rows in enumerate(logits(lib, request["logits"], request)):
            np.save(Path(request["output"]) / f"{number}.npy", rows)
    else:
        answer["nats"] = score(lib, request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
