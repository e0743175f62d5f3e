"""Embeddings that came with requests, and those that a step computes with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from quire.base.errors import EngineError
from quire.compute.attention import GivenRows
from quire.compute.runner.rows import RowTable, ScheduledRows

__all__ = ["MediaStore"]


class MediaStore:
    """Embeddings [N, E] on the host, by the handle that requests name. The thread that receives
    requests adds them; they are removed in the order of the steps."""

    def __init__(self, device: torch.device) -> None:
        """device: device of the steps."""
        self._device = device
        self._rows: dict[int, torch.Tensor] = {}

    def put(self, handle: int, rows: torch.Tensor) -> None:
        self._rows[handle] = rows

    def drop(self, handles: Sequence[int]) -> None:
        """Remove the embeddings with these handles; unknown ones are ignored."""
        for handle in handles:
            self._rows.pop(handle, None)

    def gather(self, table: RowTable, rows: ScheduledRows) -> GivenRows | None:
        """Return the given embeddings that `rows` compute; None if there are none.
        Raises EngineError if some are missing."""
        places: list[np.ndarray] = []
        pieces: list[torch.Tensor] = []
        for span, first, end, place in table.spans_in(rows):
            places.append(np.arange(place, place + end - first))
            row = span.first_row + first - span.position
            pieces.append(self.get(span.handle)[row : row + end - first])
        if not pieces:
            return None
        index = torch.from_numpy(np.concatenate(places)).to(self._device)
        width = max(piece.shape[1] for piece in pieces)
        # Prompt embeddings have no vectors for later layers, unlike some images beside them.
        alike = [pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        return GivenRows(index, torch.cat(alike).to(self._device))

    def get(self, handle: int) -> torch.Tensor:
        """Return embeddings. EngineError if there are none."""
        rows = self._rows.get(handle)
        if rows is None:
            raise EngineError(f"the embeddings of its prompt (handle {handle}) are not here")
        return rows
