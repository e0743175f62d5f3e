"""Tokens per second of the whole engine on random weights: the table of the targets.

A first run warms up and captures graphs, and is reported apart. Token ids are fresh in every run,
so that none finds the prompts of another in the cache.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

from benchmarks.gpu.part import Part
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_LARGE, QWEN_SMALL, TINY, model_folder
from quire import LLM, SamplingParams

__all__ = ["llama_stream", "qwen_large", "qwen_small", "qwen_small_int8", "qwen_small_stream"]

_REPEATS = 3
_TEMPERATURE = 0.6

Lengths = list[tuple[int, int]]
"""Tokens of prompt and output, by request."""


def qwen_small(part: Part) -> None:
    """The benchmark of nano-vllm."""
    _measure(part, "Qwen3-0.6B, 256 requests", QWEN_SMALL, mixed_lengths(part), 27_000)


def qwen_small_int8(part: Part) -> None:
    """The same over a cache of half the bytes."""
    name = "Qwen3-0.6B, 256 requests, int8 KV"
    _measure(part, name, QWEN_SMALL, mixed_lengths(part), 42_000, kv_cache_dtype="int8")


def qwen_small_stream(part: Part) -> None:
    """Bound by launches and by reading 1.2 GB of weights per token."""
    _measure(part, "Qwen3-0.6B, one stream", QWEN_SMALL, _stream(part), 1_300)


def llama_stream(part: Part) -> None:
    """Bound by reading 15 GB of weights per token."""
    _measure(part, "Llama-3.1-8B, one stream", LLAMA_8B, _stream(part), 225)


def qwen_large(part: Part) -> None:
    """All 400 requests at once."""
    lengths = [(8, 8)] * 3 if part.is_dry else [(128, 1024)] * 400
    _measure(part, "Qwen3-8B, 400 streams of 128 + 1,024", QWEN_LARGE, lengths, 17_000, repeats=1)


def mixed_lengths(part: Part) -> Lengths:
    """Draw the lengths of nano-vllm's benchmark with its seed: 142,827 prompt and 133,966 output
    tokens."""
    if part.is_dry:
        return [(20, 12), (7, 30), (40, 5)]
    generator, prompts = random.Random(0), []
    for _ in range(256):
        prompts.append(generator.randint(100, 1024))
        for _ in range(prompts[-1]):  # its token ids come from the same generator
            generator.randint(0, 10_000)
    return [(prompt, generator.randint(100, 1024)) for prompt in prompts]


def _stream(part: Part) -> Lengths:
    return [(8, 16)] if part.is_dry else [(128, 512)]


def _measure(
    part: Part,
    name: str,
    config: dict[str, Any],
    lengths: Lengths,
    goal: float,
    *,
    repeats: int = _REPEATS,
    **settings: Any,
) -> None:
    """goal: output tokens per second."""
    with model_folder(TINY if part.is_dry else config) as folder:
        started = time.monotonic()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            device=part.device.type,
            max_model_len=max(map(sum, lengths)) + 16,
            max_num_seqs=len(lengths),
            **settings,
        )
        part.figure(f"{name}: start", "s", [time.monotonic() - started])
        with llm:
            vocabulary = llm.engine.spec.vocab_size
            seconds = [_run(llm, lengths, seed, vocabulary) for seed in range(1 + repeats)]
    tokens = sum(output for _, output in lengths)
    part.figure(f"{name}: first run", "output tok/s", [tokens / seconds[0]])
    part.figure(name, "output tok/s", [tokens / each for each in seconds[1:]], goal)


def _run(llm: LLM, lengths: Lengths, seed: int, vocabulary: int) -> float:
    """Seconds. Raises RuntimeError if a request did not get all of its tokens."""
    generator = random.Random(seed)
    limit = min(10_000, vocabulary - 1)
    prompts = [[generator.randint(0, limit) for _ in range(prompt)] for prompt, _ in lengths]
    drawn = SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, detokenize=False)
    params = [replace(drawn, max_tokens=output) for _, output in lengths]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for output, (_, wanted) in zip(outputs, lengths, strict=True):
        if output.error is not None or len(output.outputs[0].token_ids) != wanted:
            raise RuntimeError(f"a request ended early: {output.error}")
    return seconds
