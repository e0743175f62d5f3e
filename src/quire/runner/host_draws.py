"""Next tokens that the host chooses, or whose candidates it finds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.protocol.step import (
    NOTHING_DRAWN,
    IntArray,
    RowFailure,
    RowTokens,
    TokenCandidates,
    TokenLogprobs,
)
from quire.runner.drafts import draw_in_turns
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
    """drawn: what rows have drawn and taken. candidates, logprobs: by slot. failed: rows that have
    neither tokens nor candidates."""

    drawn: RowTokens
    candidates: dict[int, TokenCandidates] = field(default_factory=dict[int, TokenCandidates])
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )
    failed: list[RowFailure] = field(default_factory=list[RowFailure])


class HostDraws:
    """Draws for rows whose tokens are all known to the host."""

    def __init__(self, sampling: SamplingState, rows: RowTable, draw: Draw) -> None:
        """draw: the operation `quire.ops.draw`, on the host."""
        self._sampling = sampling
        self._rows = rows
        self._sampler = Sampler(sampling, draw)

    def sample(self, logits: torch.Tensor, slots: Slots, index: Slots) -> HostSample:
        """Draw for `slots` [N] from rows `index` [N] of logits [L, V], and for what follows their
        drafts from the rows after these. Find the candidates of rows that do not draw, and mark
        those that fail."""
        result = HostSample(NOTHING_DRAWN)
        draws = self._sampling.num_candidates[slots] == 0
        if not draws.all():
            found = find_candidates(
                logits, index[~draws], slots[~draws], self._sampling, self._rows
            )
            result.candidates = found.candidates
            result.failed += found.failed
            slots, index = slots[draws], index[draws]

        def draw(which: Slots, turn: int) -> IntArray:
            output = self._draw(_taken(logits, index[which] + turn), slots[which])
            for slot, entry in output.logprobs.items():
                result.logprobs[slot] = (*result.logprobs.get(slot, ()), entry)
            result.failed += output.failed
            return output.token_ids

        result.drawn = draw_in_turns(self._rows, slots, draw)
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


def _taken(logits: torch.Tensor, index: Slots) -> torch.Tensor:
    """Rows `index` [N] of logits [L, V]."""
    is_whole = np.array_equal(index, np.arange(len(logits)))
    return logits if is_whole else logits[torch.from_numpy(index)]
