"""llama.cpp as a maker and a reader of GGUF files, in a process of its own.

    python -m benchmarks.peers.engines.llama_cpp_files < request.json

{"make": [source, target, type]} writes `source` in another type; {"score": file, "windows": lists
of token ids, "threads": n} answers with the sum of -log p, in nats, of each window's tokens after
its first. Run by an interpreter that has llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import json
import sys
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


def score(lib: Any, file: str, windows: list[list[int]], threads: int) -> list[float]:
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    params = lib.llama_context_default_params()
    params.n_ctx = -(-max(map(len, windows)) // 256) * 256
    params.n_batch = params.n_ubatch = CHUNK
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(CHUNK, 0, 1)
    found = []
    for window in windows:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        total = 0.0
        for first in range(0, len(window) - 1, CHUNK):
            part = window[first : min(first + CHUNK, len(window) - 1)]
            for row, token in enumerate(part):
                batch.token[row], batch.pos[row] = token, first + row
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, True
            batch.n_tokens = len(part)
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for row in range(len(part)):
                address = lib.llama_get_logits_ith(context, row)
                logits = np.ctypeslib.as_array(address, (vocab_size,)).astype(np.float64)
                top = logits.max()
                total += top + np.log(np.exp(logits - top).sum()) - logits[window[first + row + 1]]
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
    else:
        answer["nats"] = score(lib, request["score"], request["windows"], request["threads"])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
