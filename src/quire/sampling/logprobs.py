"""Log-probabilities of tokens, and logits in their place (`logprobs_mode`, in vLLM's names).

Raw ones are of the model itself: log-softmax of its logits as they left it, so they say what the
model thinks, whatever the request does to it. Processed ones are of the law that a token was drawn
from: after bias, penalties, mask, temperature and filters, 0 in sum over the tokens that are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import EngineError
from quire.ops.sampling.draw.candidates import select_candidates
from quire.ops.sampling.draw.ranking import IdArray, LogitArray, best_ids
from quire.protocol.step import TokenLogprobs

__all__ = [
    "NUM_IN_CACHE",
    "left_by_filters",
    "log_mass",
    "log_sum_exp",
    "logprobs_of",
    "prompt_logprobs",
    "token_logprobs",
]


NO_IDS: IdArray = np.zeros(0, np.int64)
NUM_IN_CACHE = 32_768
"""Logits that are worked on together: 128 KiB."""


NOT_FINITE_ADVICE = (
    "An equal request gives the same: check the model's files, or give a dtype with a wider range "
    "(bfloat16 or float32)."
)


def token_logprobs(
    row: LogitArray, token_id: int, k: int, mode: str = "raw_logprobs"
) -> TokenLogprobs:
    """Return the log-probabilities at one position.

    row: logits [V] whose largest is finite, raw or processed. token_id: the token that is there.
    k: number of most likely tokens to list; -1 for all. Equal logits are ranked by token id.
    mode: the setting `logprobs_mode`; processed ones list no token that cannot be drawn.
    """
    if mode.startswith("processed"):
        possible = int(np.count_nonzero(row > -np.inf))
        k = possible if k < 0 else min(k, possible)
    normalizer = 0.0 if mode.endswith("logits") else log_sum_exp(row)
    return logprobs_of(row, (token_id,), k, normalizer)[0]


def left_by_filters(row: LogitArray, temperature: float, *filters: Any) -> LogitArray:
    """Return logits [V] over the temperature, -inf where the filters leave a token out. row: after
    the request's edits. temperature 0: the row itself, since a greedy draw filters nothing.
    filters: in the order of `select_candidates`."""
    if not temperature > 0.0:
        return row
    left = select_candidates(row, temperature, *filters)
    found = np.full(row.shape, -np.inf, np.float32)
    found[left.token_ids] = row[left.token_ids].astype(np.float64) / temperature
    return found


def log_mass(row: LogitArray, left: LogitArray, temperature: float) -> float:
    """Return the log of the sum of probabilities of the tokens that filters leave in; 0 if they
    leave all. row: logits [V] after the request's edits. left: see `left_by_filters`."""
    if left is row:
        return 0.0
    scaled = (row.astype(np.float64) / temperature).astype(np.float32)
    return min(log_sum_exp(left) - log_sum_exp(scaled), 0.0)


def logprobs_of(
    row: LogitArray,
    token_ids: Sequence[int],
    k: int,
    normalizer: float | None = None,
    best: IdArray | None = None,
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of several possible tokens at one position; row and k as in
    `token_logprobs`. normalizer: `log_sum_exp` of the row, and best: its best ids in order, if they
    are known."""
    if normalizer is None:
        normalizer = log_sum_exp(row)
    num_listed = row.size if k < 0 else k
    if best is None or len(best) < num_listed:
        # To find the best takes longer than to rank one token.
        num_best = max(num_listed, len(token_ids) if len(token_ids) > 1 else 0)
        best = best_ids(row, num_best) if num_best else NO_IDS
    ranks = {token_id: rank for rank, token_id in enumerate(best.tolist(), 1)}
    top_ids = best[:num_listed]
    top = (row[top_ids].astype(np.float64) - normalizer).astype(np.float32)
    listed = top_ids.astype(np.int32)
    return tuple(
        TokenLogprobs(
            token_id=int(token_id),
            logprob=float(np.float32(float(row[token_id]) - normalizer)),  # as it is listed
            rank=ranks.get(int(token_id)) or _rank(row, token_id),
            top_ids=listed,
            top_logprobs=top,
        )
        for token_id in token_ids
    )


def _rank(row: LogitArray, token_id: int) -> int:
    """1 for the most likely token."""
    logit = row[token_id]
    better = np.count_nonzero(row > logit) + np.count_nonzero(row[:token_id] == logit)
    return 1 + int(better)


def prompt_logprobs(
    logits: torch.Tensor, targets: npt.ArrayLike, k: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens.

    logits: [C, V], for C positions of a chunk; the caller chooses C to bound memory, as one row at
        a time is worked on here. targets: int [C], the token after each of these positions.
    k: see `token_logprobs`.
    Raises EngineError if a row of logits is not finite.
    """
    rows = logits.detach().to("cpu", torch.float32).numpy()
    found: list[TokenLogprobs] = []
    for row, target in zip(rows, np.asarray(targets).tolist(), strict=True):
        if not math.isfinite(row.max()):
            raise EngineError(
                f"the model's logits before prompt token {target} are not finite. "
                f"{NOT_FINITE_ADVICE}"
            )
        found.append(token_logprobs(row, target, k))
    return tuple(found)


def log_sum_exp(row: LogitArray, scratch: LogitArray | None = None) -> float:
    """Compute the log of the sum of exponentials of logits [V] whose largest is finite, in float64;
    NaN if it is not. scratch: memory [S] to overwrite. The row is read in pieces of S, which stay
    in cache."""
    if scratch is None:
        scratch = np.empty(min(row.size, NUM_IN_CACHE), np.float32)
    largest, total = row.max(), 0.0
    for start in range(0, row.size, scratch.size):
        piece = row[start : start + scratch.size]
        weights = np.subtract(piece, largest, out=scratch[: piece.size])
        np.exp(weights, out=weights)
        total += float(weights.sum(dtype=np.float64))
    return float(largest) + math.log(total)
