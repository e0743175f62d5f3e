"""Tokens that a row may draw: top-k, then top-p, then min-p, without sorting the vocabulary.

With logits l, m = max(l) and z = (l - m) / temperature, the law of a row is exp(z) over its sum.
Tokens are ranked as in `ranking.py`. Top-k keeps the first k. Top-p keeps a token while those
ranked before it hold less than top_p of what top-k left (Holtzman et al., "The Curious Case of
Neural Text Degeneration", ICLR 2020, section 3.1: the smallest set whose mass reaches p). Min-p
keeps those with exp(z) >= min_p (Nguyen et al., "Turning Up the Heat", ICLR 2025, section 3).
Everything here looks at one row alone, so a row's result cannot depend on its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.ops.sampling.draw.ranking import IdArray, LogitArray, best_ids, in_order

__all__ = ["Candidates", "select_candidates"]

_STEP = 2.0**-6
"""Each attempt to reach top_p's mass goes down to 1/64 of the probability of the one before."""

_SLACK = 1e-5
"""Margin for the rounding of float32: a mass or logit this close to its bound is checked
exactly."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn: token_ids [C], and z [C] = (logit - max) / temperature."""

    token_ids: IdArray
    z: npt.NDArray[np.float64]


def select_candidates(
    row: LogitArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> Candidates:
    """Return the candidates of one row of logits [V] whose largest is finite.

    temperature > 0. top_k 0, top_p 1 and min_p 0 are off.
    """
    best = float(row.max())
    total = 0.0
    if top_k:
        ranked = best_ids(row, top_k)
    elif top_p < 1.0:
        ranked, total = _head(row, best, temperature, top_p)
    else:
        ranked = _at_least(row, best, temperature, min_p * (1.0 - _SLACK))
    z = (row[ranked].astype(np.float64) - best) / temperature
    weights = np.exp(z)
    if top_p < 1.0:
        mass = np.cumsum(weights)
        goal = top_p * (mass[-1] if top_k else total)
        kept = 1 + int(np.searchsorted(mass[:-1], goal))
        ranked, z, weights = ranked[:kept], z[:kept], weights[:kept]
    possible = (weights >= min_p) & (z > -np.inf)
    return Candidates(ranked[possible], z[possible])


def _at_least(row: LogitArray, best: float, temperature: float, weight: float) -> IdArray:
    """Return the ids, ascending, of tokens with exp(z) >= weight, and perhaps some just below
    it."""
    least = best + temperature * math.log(weight) if weight > 0.0 else -math.inf
    return np.flatnonzero(row >= np.float32(least - abs(least) * _SLACK))


def _head(row: LogitArray, best: float, temperature: float, top_p: float) -> tuple[IdArray, float]:
    """Return the first tokens in rank that together hold at least top_p, and the sum of exp(z) over
    V."""
    weights = np.subtract(row, np.float32(best))
    np.multiply(weights, np.float32(1.0 / temperature), out=weights)
    np.exp(weights, out=weights)
    total = float(weights.sum())
    goal = top_p * total * (1.0 + _SLACK)
    weight, least_weight = _STEP, (1.0 - top_p) / row.size * _SLACK
    while True:
        token_ids = _at_least(row, best, temperature, weight)
        if float(weights[token_ids].sum()) >= goal or weight == 0.0:
            return in_order(row, token_ids), total
        weight = weight * _STEP if weight > least_weight else 0.0
