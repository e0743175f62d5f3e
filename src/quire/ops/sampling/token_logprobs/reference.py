"""Log-probabilities by the definition, in float64, whole rows sorted."""

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
    ranked, ids = table.sort(dim=1, descending=True, stable=True)
    missing = k - min(k, table.shape[1])
    top = torch.nn.functional.pad(ranked[:, :k], (0, missing), value=-torch.inf)
    top_ids = torch.nn.functional.pad(ids[:, :k], (0, missing))
    return (
        (chosen - normalizer).float()[:, 0],
        (1 + better.sum(dim=1)).to(torch.int32),
        torch.where(top > -torch.inf, top_ids, -1).to(torch.int32),
        (top - normalizer).float(),
    )
