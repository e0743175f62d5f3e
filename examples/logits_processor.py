"""Change logits with a function of our own: allow only tokens of lowercase letters and spaces.

    python examples/logits_processor.py "import "

A processor gets the output's token ids so far and the logits [vocabulary] of the next token, and
returns the logits to use. It runs for its own request only; if it raises, only that request fails.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

import torch

from quire import LLM, SamplingParams

ALLOWED = re.compile(r"[a-z ]+")


def only_letters(llm: LLM) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor]:
    """Make a processor that bans every token with other characters."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ValueError("this example needs a tokenizer")
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    banned = torch.tensor([ALLOWED.fullmatch(text) is None for text in texts])

    def process(output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        del output_token_ids  # this rule does not depend on them
        return logits.masked_fill(banned.to(logits.device), -torch.inf)

    return process


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate lowercase letters and spaces only.")
    parser.add_argument("prompt")
    options = parser.parse_args(arguments)
    with LLM(quiet=True) as llm:
        params = SamplingParams(
            temperature=0.0, max_tokens=24, logits_processors=[only_letters(llm)]
        )
        print(llm.generate(options.prompt, params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
