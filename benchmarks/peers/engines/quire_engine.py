"""quire through its client door, with the time that it spends in its C++ kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.config import env

env.limit_spinning()  # as the engine does, before torch starts its threads

import numpy as np  # noqa: E402
from benchmarks.peers.engines.engine import AS_STORED, EngineOptions, UnavailableError  # noqa: E402

import quire  # noqa: E402
from quire.base.errors import ConfigError  # noqa: E402
from quire.base.platform import detect_platform  # noqa: E402
from quire.entrypoints.bench.throughput import exact_params  # noqa: E402
from quire.entrypoints.llm import LLM  # noqa: E402
from quire.ops.compile import ISAS  # noqa: E402
from quire.ops.native.binding import NativeLibrary, native_unavailable  # noqa: E402
from quire.ops.native.replay import ReplayList  # noqa: E402
from quire.protocol.request import EngineRequest  # noqa: E402

__all__ = ["open_engine"]

KV_BLOCK = 16
SPARE_BLOCKS = 2
"""Per sequence: the block of a step in flight, and the rounding of its length."""


class KernelClock:
    """Adds up the time of every call and replay of the compiled kernels, from any thread. Two
    readings of the clock each, about 0.1 µs, beside kernels of 5 µs and more."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._call = NativeLibrary.call
        self._run = ReplayList.run

    def install(self) -> None:
        """Must come before the engine binds its operations."""
        call, run = self._call, self._run

        def timed(library: NativeLibrary, name: str, *arguments: object) -> None:
            started = time.perf_counter()
            call(library, name, *arguments)
            self.seconds += time.perf_counter() - started

        def timed_run(calls: ReplayList, count: int | None = None) -> None:
            started = time.perf_counter()
            run(calls, count)
            self.seconds += time.perf_counter() - started

        NativeLibrary.call, ReplayList.run = timed, timed_run

    def remove(self) -> None:
        NativeLibrary.call, ReplayList.run = self._call, self._run


class QuireEngine:
    """Greedy requests of exact length; what they give is counted by handle."""

    def __init__(self, options: EngineOptions) -> None:
        blocks = -(-options.max_model_len // KV_BLOCK) + SPARE_BLOCKS
        chosen: dict[str, Any] = {
            "model": str(options.model),
            "load_format": "auto" if options.is_gguf else "dummy",
            "skip_tokenizer_init": True,
            "quiet": True,
            "num_threads": options.num_threads,
            "max_num_seqs": options.max_num_seqs,
            "max_model_len": options.max_model_len,
            "block_size": KV_BLOCK,
            "num_kv_blocks": blocks * options.max_num_seqs,
            "enable_prefix_caching": False,
            "seed": options.seed,
        }
        weights, _, more = options.weights.partition("_")
        if options.is_gguf:
            more = ""
            del chosen["num_kv_blocks"]  # layers with windows have blocks of their own
            if weights != AS_STORED:
                chosen["quantization"] = weights
        elif weights in ("bfloat16", "float16", "float32"):
            chosen["dtype"] = weights
        else:
            chosen |= {"dtype": "bfloat16", "quantization": weights}
        if more == "kv8":
            chosen["kv_cache_dtype"] = "int8"
        if more == "a16":
            chosen["activation_bits"] = 16
        self._clock = KernelClock()
        self._clock.install()
        try:
            self._llm = LLM(**chosen)
        except BaseException:
            self._clock.remove()
            raise
        self._client = self._llm.engine.client
        resolved = self._llm.engine.resolved.settings
        about = {
            "version": quire.__version__,
            "kernels": widest_kernels(),
            "linear_isa": resolved.linear_isa or widest_kernels(),
            "attention_isa": resolved.attention_isa or widest_kernels(),
        }
        self.settings = {**about, **chosen, "model": options.model.name}
        self._next_handle = 0
        self._counts = np.zeros(0, np.int64)

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        while self._client.has_unfinished:  # steps that were in flight when the last request ended
            self._client.step()
        self._next_handle += len(self._counts)
        self._counts = np.zeros(len(prompts), np.int64)
        for index, (prompt, length) in enumerate(zip(prompts, output_lengths, strict=True)):
            handle = self._next_handle + index
            self._client.add(
                EngineRequest(
                    request_id=str(handle),
                    first_handle=handle,
                    prompt_token_ids=np.array(prompt, np.int32),
                    params=exact_params(length),
                    seed=handle,
                    stop_token_ids=frozenset(),
                    arrival_time=time.monotonic(),
                )
            )

    def step(self) -> list[int]:
        handles = self._client.step().handles
        np.add.at(self._counts, handles - self._next_handle, 1)
        return self._counts.tolist()

    def kernel_seconds(self) -> float:
        return self._clock.seconds

    def close(self) -> None:
        self._llm.shutdown()
        self._clock.remove()


def widest_kernels() -> str:
    """The instruction set whose kernels serve: the one asked for, or the best of this processor."""
    platform = detect_platform()
    return env.cpu_isa() or next(i.name for i in ISAS if not native_unavailable(i.name, platform))


def open_engine(options: EngineOptions) -> QuireEngine:
    platform = detect_platform()
    reasons = [native_unavailable(isa.name, platform) for isa in ISAS]
    if None not in reasons:  # it would run on its references, whose speed means nothing
        raise UnavailableError(f"no compiled kernels: {reasons[-1]}")
    try:
        return QuireEngine(options)
    except ConfigError as error:
        raise UnavailableError(str(error)) from error
