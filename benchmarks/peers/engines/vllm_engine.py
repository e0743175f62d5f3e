"""vLLM on CPUs through its offline class, stepped by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.peers.engines.engine import EngineOptions, UnavailableError
from benchmarks.peers.engines.random_checkpoint import read_config

__all__ = ["open_engine"]

BLOCK_SIZE = 128


class VllmEngine:
    """Eager, without prefix caching; weights random, made by vLLM itself."""

    def __init__(self, options: EngineOptions) -> None:
        config = read_config(options.model)
        per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
        per_sequence = (options.max_model_len + BLOCK_SIZE) * per_token * config["head_dim"]
        cache_gib = -(-options.max_num_seqs * per_sequence // 2**30)
        # The engine must run in this process, or there is no step to time.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.num_threads - 1}"
        import vllm

        self._params = vllm.SamplingParams
        chosen: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": options.weights,
            "max_num_seqs": options.max_num_seqs,
            "max_model_len": options.max_model_len,
            "block_size": BLOCK_SIZE,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "seed": options.seed,
        }
        self._engine = vllm.LLM(model=str(options.model), **chosen).llm_engine
        self.settings: dict[str, Any] = {
            "version": vllm.__version__,
            "VLLM_CPU_KVCACHE_SPACE": cache_gib,
            **chosen,
        }
        self._next_id = 0
        self._places: dict[str, int] = {}
        self._counts: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        self._counts = [0] * len(prompts)
        self._places = {}
        for index, (prompt, length) in enumerate(zip(prompts, output_lengths, strict=True)):
            params = self._params(
                temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
            )
            name = str(self._next_id)
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
            self._places[name] = index
            self._next_id += 1

    def step(self) -> list[int]:
        for output in self._engine.step():
            self._counts[self._places[output.request_id]] = len(output.outputs[0].token_ids)
        return list(self._counts)

    def kernel_seconds(self) -> None:
        return None

    def close(self) -> None:
        del self._engine


def open_engine(options: EngineOptions) -> VllmEngine:
    if find_spec("vllm") is None:
        raise UnavailableError("vllm is not installed")
    return VllmEngine(options)
