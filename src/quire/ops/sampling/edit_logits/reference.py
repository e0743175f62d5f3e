"""One row after the other, one edit after the other."""

from __future__ import annotations

import torch

__all__ = ["edit_logits"]


def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    row_tokens: torch.Tensor,
    num_prompt: torch.Tensor,
    num_tokens: torch.Tensor,
    penalties: torch.Tensor,
    bias_start: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    allowed_start: torch.Tensor,
    allowed_ids: torch.Tensor,
    ban_start: torch.Tensor,
    bans: torch.Tensor,
    words: torch.Tensor,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.sampling.edit_logits`)."""
    edited = logits[rows].float()
    prompt_lens, lens = num_prompt[slots].tolist(), num_tokens[slots].tolist()
    starts = zip(*(start.tolist() for start in (bias_start, allowed_start, ban_start)), strict=True)
    bounds = list(starts)
    for e, row in enumerate(edited):
        (bias, allowed, ban), (bias_end, allowed_end, ban_end) = bounds[e : e + 2]
        history = row_tokens[slots[e], : lens[e]]
        output = history[prompt_lens[e] :]
        row[bias_ids[bias:bias_end].long()] += bias_values[bias:bias_end]
        if allowed_end > allowed:
            ids = allowed_ids[allowed:allowed_end].long()
            kept = row[ids]
            row.fill_(-torch.inf)
            row[ids] = kept
        for token, minimum, first, length in bans[ban:ban_end].tolist():
            if _is_banned(output, minimum, words[first : first + length], length):
                row[token] = -torch.inf
        _penalize(row, history, output, *penalties[e].unbind())
    return edited


def _is_banned(output: torch.Tensor, minimum: int, word: torch.Tensor, length: int) -> bool:
    if length < 0:
        return len(output) < minimum
    return len(output) >= length and torch.equal(output[len(output) - length :], word)


def _penalize(
    row: torch.Tensor,
    history: torch.Tensor,
    output: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    vocab_size, penalty = len(row), repetition.float()
    seen = history[(history >= 0) & (history < vocab_size)].long()
    row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    drawn = output[(output >= 0) & (output < vocab_size)].long()
    counts = torch.bincount(drawn, minlength=vocab_size)
    subtrahend = (frequency * counts + presence).float()
    row -= torch.where(counts > 0, subtrahend, 0.0)
