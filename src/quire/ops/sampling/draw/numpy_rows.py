"""`draw` on processors without compiled kernels: row by row, only candidates are sorted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.base.platform import Platform
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_CPUS, Provider
from quire.ops.sampling.draw.candidates import select_candidates
from quire.ops.sampling.draw.masks import with_masks
from quire.ops.sampling.draw.noise import gumbel, token_bits
from quire.ops.sampling.draw.ranking import LogitArray

__all__ = ["PROVIDER"]

_NO_TOKEN = -1


def _draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contract in `quire.ops.sampling.draw`."""
    columns = (temperature, top_k, top_p, min_p, seeds, sample_indices)
    if slots is not None:
        columns = tuple(column[slots] for column in columns)
    filters = zip(*(column.tolist() for column in columns[:4]), strict=True)
    streams = torch.stack((*columns[4:], positions), dim=1)[:, :, None].unbind()
    token_ids = [
        _draw_one(logits[row].float().numpy(), keep, stream)
        for row, keep, stream in zip(rows.tolist(), filters, streams, strict=True)
    ]
    return torch.tensor(token_ids, dtype=torch.int32)


def _draw_one(row: LogitArray, keep: tuple[float, int, float, float], stream: torch.Tensor) -> int:
    """Draw from one row [V]. keep: temperature, top_k, top_p, min_p. stream: seed, sample index and
    position, [3, 1]."""
    greedy = int(row.argmax())  # NaN counts as the largest
    if not np.isfinite(row[greedy]):
        return _NO_TOKEN
    if not keep[0] > 0.0:
        return greedy
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        candidates = select_candidates(row, *keep)
    seed, sample_index, position = stream
    bits = token_bits(seed, sample_index, position, torch.from_numpy(candidates.token_ids))
    scores = candidates.z + gumbel(bits).numpy()
    return int(candidates.token_ids[scores == scores.max()].min())


def _unavailable(platform: Platform) -> str | None:
    return None if platform.device == "cpu" else FOR_CPUS


def _load(team: Team = ALONE) -> Callable[..., torch.Tensor]:  # noqa: ARG001  the caller computes
    return with_masks(_draw)


PROVIDER = Provider("numpy", _unavailable, _load)
