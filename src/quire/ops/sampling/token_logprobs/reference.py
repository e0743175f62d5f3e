"""Log-probabilities by the definition, in float64."""

from __future__ import annotations

import torch

__all__ = ["token_logprobs"]


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes as in the contract (`quire.ops.sampling.token_logprobs`)."""
    table = logits[rows].double().add(0.0)  # -0.0 becomes 0.0, which GPUs sort apart
    normalizer = table.logsumexp(dim=1, keepdim=True)
    tokens = token_ids.long().clamp(min=0)[:, None]
    chosen = table.gather(1, tokens)
    before = torch.arange(table.shape[1], device=table.device) < tokens
    better = (table > chosen) | ((table == chosen) & before)
    ids = _best_ids(table, min(k, table.shape[1]))
    missing = k - ids.shape[1]
    top = torch.nn.functional.pad(table.gather(1, ids), (0, missing), value=-torch.inf)
    top_ids = torch.nn.functional.pad(ids, (0, missing))
    return (
        (chosen - normalizer).float()[:, 0],
        (1 + better.sum(dim=1)).to(torch.int32),
        torch.where(top > -torch.inf, top_ids, -1).to(torch.int32),
        (top - normalizer).float(),
    )


def _best_ids(table: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the k largest logits of each row, int64 [M, k], best first, equal ones by
    id. table: float64 [M, V], every value a float32, and no -0.0.

    Logit and id share one integer, so that no two are equal: a float32 read as an integer sorts
    like the number once the lower 31 bits of negative ones are flipped.
    """
    if k == 0:
        return torch.empty(len(table), 0, dtype=torch.int64, device=table.device)
    bits = table.float().view(torch.int32)
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(table.shape[1], device=table.device)
    return ((~ascending << 32) | ids).topk(k, largest=False).values & 0xFFFFFFFF
