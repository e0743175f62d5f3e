"""Token ids of a conversation that goes on.

What a model wrote may be other tokens than its text would be tokenized to, and the cache knows
prompts by their tokens. So the tokens stay as they were, as far as the new prompt has their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.rendering import RenderedPrompt, Tokenizer

__all__ = ["continued"]


def continued(
    prompt: RenderedPrompt, previous: Sequence[int], tokenizer: Tokenizer
) -> tuple[RenderedPrompt, int]:
    """Return the prompt with the longest beginning of `previous` that ends with a special token and
    is the beginning of the prompt's text; and how many tokens that is.

    Tokenizers split texts at special tokens, so that what follows is tokenized by itself. Where the
    text of the tokens would not be exactly that of the prompt, the prompt stays as it is.
    """
    text = prompt.text
    if text is None:
        return prompt, 0
    num_kept = num_chars = start = 0
    for end, token_id in enumerate(previous, start=1):
        if not tokenizer.is_special(token_id):
            continue
        piece = tokenizer.decode(previous[start:end], skip_special_tokens=False)
        if not text.startswith(piece, num_chars):
            break
        start = num_kept = end
        num_chars += len(piece)
    if not num_kept:
        return prompt, 0
    rest = tokenizer.encode(text[num_chars:], add_special_tokens=False) if text[num_chars:] else []
    if tokenizer.decode(rest, skip_special_tokens=False) != text[num_chars:]:
        return prompt, 0
    return replace(prompt, token_ids=[*previous[:num_kept], *rest]), num_kept
