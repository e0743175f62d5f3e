"""Log-probabilities of the model itself: log-softmax of its logits as they left it.

Before bias, penalties, temperature and filters (vLLM's default, `raw_logprobs`), so they say what
the model thinks, whatever the request does to it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import EngineError
from quire.ops.draw.ranking import LogitArray, best_ids
from quire.protocol.step import TokenLogprobs

__all__ = ["prompt_logprobs", "token_logprobs"]


def token_logprobs(row: LogitArray, token_id: int, k: int) -> TokenLogprobs:
    """Log-probabilities at one position.

    row: raw logits [V] whose largest is finite. token_id: the token that is there.
    k: how many of the most likely to list; -1 for all. Equal logits are ranked by token id.
    """
    normalizer = _log_sum_exp(row)
    logit = row[token_id]
    better = np.count_nonzero(row > logit) + np.count_nonzero(row[:token_id] == logit)
    top_ids = best_ids(row, row.size if k < 0 else k)
    top = row[top_ids].astype(np.float64) - normalizer
    return TokenLogprobs(
        token_id=int(token_id),
        logprob=float(logit) - normalizer,
        rank=1 + int(better),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top.astype(np.float32),
    )


def prompt_logprobs(
    logits: torch.Tensor, targets: npt.ArrayLike, k: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens.

    logits: [C, V], of C positions of a chunk; the caller chooses C to bound memory, as one row at
        a time is worked on here. targets: int [C], the token after each of these positions.
    k: as in `token_logprobs`.
    Raises EngineError if a row of logits is not finite.
    """
    rows = logits.detach().to("cpu", torch.float32).numpy()
    found: list[TokenLogprobs] = []
    for row, target in zip(rows, np.asarray(targets).tolist(), strict=True):
        if not math.isfinite(row.max()):
            raise EngineError(
                f"the model's logits before prompt token {target} are not finite. "
                "Send the request again; if it stays so, check the model's files and data type."
            )
        found.append(token_logprobs(row, target, k))
    return tuple(found)


def _log_sum_exp(row: LogitArray) -> float:
    largest = row.max()
    weights = np.subtract(row, largest)
    np.exp(weights, out=weights)
    return float(largest) + math.log(float(weights.sum(dtype=np.float64)))
