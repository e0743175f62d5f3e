"""Log-probabilities of tokens, and logits in their place (`logprobs_mode`, in vLLM's names).

Raw ones are of the model itself: log-softmax of its logits as they left it, so they say what the
model thinks, whatever the request does to it. Processed ones are of the law that a token was drawn
from: after bias, penalties, mask, temperature and filters, 0 in sum over the tokens that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError
from quire.ops.sampling.draw.candidates import select_candidates
from quire.ops.sampling.draw.ranking import IdArray, LogitArray
from quire.protocol.step import IntArray, TokenLogprobs, TopTokens

__all__ = [
    "NUM_IN_CACHE",
    "ReadLogprobs",
    "entries_of",
    "left_by_filters",
    "log_mass",
    "log_sum_exp",
    "prompt_logprobs",
    "token_logprobs",
]

ReadLogprobs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, ...]]
"""The operation `quire.ops.sampling.token_logprobs`, for tensors on the host."""

NUM_IN_CACHE = 32_768
"""Logits that are worked on together: 128 KiB."""


NOT_FINITE_ADVICE = (
    "An equal request gives the same: check the model's files, or give a dtype with a wider range "
    "(bfloat16 or float32)."
)


def token_logprobs(
    read: ReadLogprobs,
    logits: torch.Tensor,
    rows: IdArray,
    token_ids: IntArray,
    counts: IdArray,
    mode: str = "raw_logprobs",
) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens [M].

    logits: float32 [N, V], raw or processed, the largest of each of these rows finite. rows: row of
    each token. counts: number of most likely tokens to list for each, -1 for all; none is listed
    whose logit is -inf. Equal logits are ranked by token id. mode: the setting `logprobs_mode`.
    """
    different = set(counts.tolist())
    if len(different) == 1:
        return _with_equal_counts(read, logits, rows, token_ids, different.pop(), mode)
    found: dict[int, TokenLogprobs] = {}
    for k in different:
        which = np.flatnonzero(counts == k)
        entries = _with_equal_counts(read, logits, rows[which], token_ids[which], k, mode)
        found.update(zip(which.tolist(), entries, strict=True))
    return [found[index] for index in range(len(counts))]


def _with_equal_counts(
    read: ReadLogprobs,
    logits: torch.Tensor,
    rows: IdArray,
    token_ids: IntArray,
    k: int,
    mode: str,
) -> list[TokenLogprobs]:
    most = logits.shape[1]
    columns = torch.from_numpy(rows), torch.from_numpy(token_ids)
    tensors = read(logits, *columns, most if k < 0 else min(k, most))
    values, ranks, top_ids, top_values = (each.numpy() for each in tensors)
    if mode.endswith("logits"):
        table = logits.numpy()
        values, top_values = table[rows, token_ids], table[rows[:, None], top_ids]
    return entries_of(
        token_ids, [top_ids.shape[1]] * len(rows), (values, ranks, top_ids, top_values)
    )


def entries_of(
    token_ids: IntArray, counts: Sequence[int], values: Sequence[npt.NDArray[Any]]
) -> list[TokenLogprobs]:
    """Return entries of tokens [M]. values: contents of the operation's results for them. counts:
    number of tokens to list for each, at most as many as were asked of the operation."""
    logprobs, ranks, top_ids, top_logprobs = values
    columns = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    if not any(counts):
        return [TokenLogprobs(*each) for each in columns]
    exist = (top_ids >= 0).sum(axis=1).tolist()
    listed = map(min, counts, exist)
    return [
        TokenLogprobs(*each, TopTokens(top_ids[i, :number], top_logprobs[i, :number]))
        for i, (each, number) in enumerate(zip(columns, listed, strict=True))
    ]


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


def prompt_logprobs(
    read: ReadLogprobs, logits: torch.Tensor, targets: npt.ArrayLike, k: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens.

    logits: [C, V], for C positions of a chunk; the caller chooses C to bound memory. targets:
        int [C], the token after each of these positions.
    k: number of most likely tokens to list, -1 for all.
    Raises EngineError if a row of logits is not finite.
    """
    rows = logits.detach().to("cpu", torch.float32)
    token_ids = np.ascontiguousarray(targets, np.int32)
    broken = np.flatnonzero(~rows.amax(dim=1).isfinite().numpy())
    if len(broken):
        raise EngineError(
            f"the model's logits before prompt token {token_ids[broken[0]]} are not finite. "
            f"{NOT_FINITE_ADVICE}"
        )
    count = len(token_ids)
    return tuple(token_logprobs(read, rows, np.arange(count), token_ids, np.full(count, k)))


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
