"""One vector per prompt out of its hidden states, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.protocol.pooling_params import Pooling
from quire.protocol.step import FloatArray

__all__ = ["PoolPiece", "VectorPools", "wanted_tokens"]


@dataclass(frozen=True, slots=True)
class PoolPiece:
    """Tokens start <= i < end of a row that pools. first: index of the row's first token among the
    step's wanted tokens. is_last: whether the prompt ends with this piece."""

    slot: int
    pooling: Pooling
    start: int
    end: int
    first: int
    is_last: bool

    @property
    def positions(self) -> range:
        """Tokens whose hidden states are wanted; if only to see whether the numbers are finite."""
        if self.pooling in ("mean", "classify_mean"):
            return range(self.start, self.end)
        if self.pooling in ("cls", "classify") and not self.start:
            return range(1)
        return range(self.end - 1, self.end)


def wanted_tokens(table: RowTable, rows: ScheduledRows) -> tuple[Slots, Slots, list[PoolPiece]]:
    """Tokens of the batch whose hidden states are read. Their places, row after row; how many each
    row [R] has; and how the rows that pool use theirs. A row that draws needs its last certain
    token and its drafts, an unfinished one its last token."""
    counts = 1 + rows.num_drafts
    ends = np.cumsum(rows.num_tokens)
    firsts = ends - counts
    pieces: list[PoolPiece] = []
    for i, slot in enumerate(rows.slots.tolist() if table.pooling else ()):
        if slot in table.pooling:
            start, count = int(rows.num_computed[i]), int(rows.num_tokens[i])
            end = start + count
            is_last = end == int(table.num_tokens[slot])
            first = int(counts[:i].sum())
            piece = PoolPiece(slot, table.pooling[slot], start, end, first, is_last)
            counts[i] = len(piece.positions)
            firsts[i] = ends[i] - end + piece.positions[0]
            pieces.append(piece)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return places + np.repeat(firsts, counts), counts, pieces


class VectorPools:
    """Partial results of rows that pool. Pieces of a row are added in order, each once, after it is
    certain that they were computed. Sums are of float64, token after token, so no bit depends on
    how a prompt was cut."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, npt.NDArray[np.float64]]] = {}  # by slot: end, sum

    def take(self, piece: PoolPiece, hidden: FloatArray) -> FloatArray | None:
        """Add a piece; return the vector float32 [E] of a prompt that is complete. hidden: float32
        [N, E] at the piece's `positions`; for classification the class scores, [N, C], or by the
        mean [1, C]: a prompt of which that is taken is one piece."""
        if piece.pooling in ("last", "classify_last", "classify_mean"):
            return hidden[-1].astype(np.float32) if piece.is_last else None
        if not piece.start:
            total = np.zeros(hidden.shape[1], np.float64)
        else:
            end, total = self._known.pop(piece.slot, (0, np.zeros(0)))
            if end != piece.start:
                raise EngineError(
                    f"slot {piece.slot} pools its prompt ({piece.pooling}) from token "
                    f"{piece.start}, but was given those before {end}"
                )
        if piece.pooling == "mean":
            # numpy adds whole rows, one after the other, where it reduces the slower axis.
            total = np.add.reduce(np.concatenate((total[None], hidden)), axis=0)
        elif not piece.start:
            total += hidden[0]
        if not piece.is_last:
            self._known[piece.slot] = piece.end, total
            return None
        self._known.pop(piece.slot, None)
        count = piece.end if piece.pooling == "mean" else 1
        return (total / count).astype(np.float32)
