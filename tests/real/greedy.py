"""Greedy answers of `transformers`, in one pass over an answer that is there already."""

from __future__ import annotations

from typing import Any

import torch

from quire import RequestOutput

__all__ = ["most_probable"]


def most_probable(model: Any, output: RequestOutput) -> list[int]:
    """Return the most probable token after the prompt, and after each token of the answer but the
    last. If these are the answer, then it is the greedy one of this model too."""
    assert output.prompt_token_ids is not None
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()
