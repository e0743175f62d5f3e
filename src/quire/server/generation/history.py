"""Token ids of a continued conversation.

The tokens that a model wrote may differ from those of its tokenized text, and the cache knows
prompts by their tokens. So old tokens are kept as far as the new prompt has their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.text.rendering import RenderedPrompt, Tokenizer
from quire.text.rendering.chat_template.control_tokens import ChatText, shifted

__all__ = ["continued"]


def continued(
    prompt: RenderedPrompt, previous: Sequence[int], tokenizer: Tokenizer
) -> tuple[RenderedPrompt, int]:
    """Return the prompt on top of the kept tokens, and the number of these.

    Kept is the longest beginning of `previous` that ends with a special token and whose text begins
    the prompt. Tokenizers split texts at special tokens, so the rest is tokenized by itself. If the
    text of all tokens would differ from the prompt's, the prompt stays as it is.
    """
    text = prompt.text
    if text is None:
        return prompt, 0
    num_kept = num_chars = start = 0
    own = frozenset(prompt.own or ())
    for end, token_id in enumerate(previous, start=1):
        if not tokenizer.is_special(token_id):
            continue
        piece = tokenizer.decode(previous[start:end], skip_special_tokens=False)
        if not text.startswith(piece, num_chars):
            break
        past = num_chars + len(piece)
        mark = tokenizer.decode([token_id], skip_special_tokens=False)
        if prompt.own is not None and (past - len(mark), past) not in own:
            break  # here it is text
        start = num_kept = end
        num_chars += len(piece)
    if not num_kept:
        return prompt, 0
    left = None if prompt.own is None else shifted(prompt.own, num_chars)
    rest = tokenizer.encode_chat(ChatText(text[num_chars:], left)) if text[num_chars:] else []
    if tokenizer.decode(rest, skip_special_tokens=False) != text[num_chars:]:
        return prompt, 0
    return replace(prompt, token_ids=[*previous[:num_kept], *rest]), num_kept
