"""`quire demo`: a chat answer and a completion, printed as they are generated."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from quire.bundled import SMOLLM2_PACKAGE, smollm2_path
from quire.entrypoints.cli.flags.engine import add_engine_flags, given_settings
from quire.entrypoints.cli.parser import CommandParser

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM
    from quire.protocol.sampling_params import SamplingParams
    from quire.text.rendering import Prompt

__all__ = ["add_arguments", "run"]

PROMPT = 'def parse_args(argv):\n    """'
QUESTION = "What is your name?"
TEMPERATURE = 0.7
"""For completions: the likeliest tokens of a small model soon repeat themselves."""
BATCH = 16
"""Requests of the closing batch, which shows what batching is worth."""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, help="text to complete")
    parser.add_argument("--question", default=QUESTION, help="message to answer")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per answer (64)")
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Generate with the model that is named; without one SmolLM2 if a package has brought it, else
    the bundled model."""
    from quire.entrypoints.llm import LLM
    from quire.protocol.sampling_params import SamplingParams

    settings = given_settings(options)
    if "model" not in settings and (smollm2 := smollm2_path()) is not None:
        print(f"model: {smollm2} of the package {SMOLLM2_PACKAGE}")
        settings["model"] = str(smollm2)
    with LLM(**settings) as llm:
        print(f"\n--- answer to {options.question!r}")
        messages = [{"role": "user", "content": options.question}]
        rendered = llm.engine.renderer.render_chat(messages)
        answer = SamplingParams(temperature=0, max_tokens=options.max_tokens)
        _stream(llm, {"prompt_token_ids": rendered.token_ids}, answer)
        print(f"\n--- completion of {options.prompt!r}")
        _stream(llm, options.prompt, _completion(0, options.max_tokens))
        _batch(llm, options.prompt, options.max_tokens)
    return 0


def _completion(seed: int, max_tokens: int) -> SamplingParams:
    from quire.protocol.sampling_params import SamplingParams

    return SamplingParams(
        temperature=TEMPERATURE,
        top_p=0.95,
        seed=seed,
        max_tokens=max_tokens,
    )


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Print text as it comes, then how fast it came."""
    start, shown, first, num_tokens = time.perf_counter(), "", 0.0, 0
    for output in llm.stream(prompt, params):
        sample = output.outputs[0]
        if num_tokens == 0 and sample.token_ids:
            first = time.perf_counter() - start
        num_tokens = len(sample.token_ids)
        sys.stdout.write(sample.text[len(shown) :])
        sys.stdout.flush()
        shown = sample.text
    seconds = time.perf_counter() - start
    print(
        f"\n    {num_tokens} tokens in {seconds:.2f} s, the first after {first * 1000:.0f} ms: "
        f"{num_tokens / seconds:.0f} tokens/s"
    )


def _batch(llm: LLM, prompt: str, max_tokens: int) -> None:
    """The same prompt with different seeds, all at once."""
    params = [_completion(seed, max_tokens) for seed in range(BATCH)]
    start = time.perf_counter()
    outputs = llm.generate([prompt] * BATCH, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"\n--- {BATCH} completions at once\n"
        f"    {num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s"
    )
