"""Next tokens that the host chooses, or whose candidates it finds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.protocol.step import IntArray, RowFailure, TokenCandidates, TokenLogprobs
from quire.runner.rows import RowTable, Slots
from quire.sampling import (
    NO_TOKEN,
    Draw,
    SampleOutput,
    Sampler,
    SamplingState,
    find_candidates,
)

__all__ = ["HostDraws", "HostSample"]


@dataclass(slots=True)
class HostSample:
    """slots, token_ids [N]: of the rows that have drawn. candidates, logprobs: by slot. failed:
    rows that have neither token nor candidates."""

    slots: Slots
    token_ids: IntArray
    candidates: dict[int, TokenCandidates] = field(default_factory=dict[int, TokenCandidates])
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])


class HostDraws:
    """Draws for rows whose tokens are all known to the host."""

    def __init__(self, sampling: SamplingState, rows: RowTable, draw: Draw) -> None:
        """draw: the operation `quire.ops.draw`, on the host."""
        self._sampling = sampling
        self._rows = rows
        self._sampler = Sampler(sampling, draw)

    def sample(self, logits: torch.Tensor, slots: Slots, index: Slots) -> HostSample:
        """Draw for `slots` [N] from rows `index` [N] of logits [R, V], and find the candidates of
        those that do not draw. Rows that fail are marked so."""
        result = HostSample(slots, np.zeros(0, np.int32))
        draws = self._sampling.num_candidates[slots] == 0
        if not draws.all():
            found = find_candidates(
                logits, index[~draws], slots[~draws], self._sampling, self._rows
            )
            result.candidates = found.candidates
            result.failed += found.failed
            slots, index = slots[draws], index[draws]
        if not np.array_equal(index, np.arange(len(logits))):
            logits = logits[torch.from_numpy(index)]
        output = self._draw(logits, slots)
        drawn = output.token_ids != NO_TOKEN
        result.slots, result.token_ids = slots[drawn], output.token_ids[drawn]
        result.logprobs = output.logprobs
        result.failed += output.failed
        self._rows.failed[[failure.slot for failure in result.failed]] = True
        return result

    def _draw(self, logits: torch.Tensor, slots: Slots) -> SampleOutput:
        """Sample rows [N, V]; on an exception, in halves, so that only the row at fault fails."""
        try:
            positions = self._rows.num_tokens[slots]
            return self._sampler.sample(logits, slots, positions, self._rows)
        except Exception as error:  # noqa: BLE001  whatever it is, it must end with its row
            if len(slots) == 1:
                message = f"the sampler could not draw for this request ({error}): send it again"
                failure = RowFailure(int(slots[0]), message)
                return SampleOutput(np.full(1, NO_TOKEN, np.int32), failed=(failure,))
        middle = len(slots) // 2
        first = self._draw(logits[:middle], slots[:middle])
        second = self._draw(logits[middle:], slots[middle:])
        return SampleOutput(
            np.concatenate((first.token_ids, second.token_ids)),
            {**first.logprobs, **second.logprobs},
            (*first.failed, *second.failed),
        )
