"""Steps in which every row computes one token and draws the next: what decoding is made of."""

from __future__ import annotations

import logging

import numpy as np
import torch

from quire.models import CausalLM
from quire.runner.decode_inputs import DecodeInputs
from quire.runner.device_draws import DeviceDraws
from quire.runner.device_state import DeviceState
from quire.runner.inbox import RowList
from quire.runner.rows import ScheduledRows

__all__ = ["UniformSteps"]

_log = logging.getLogger("quire.runner")


class UniformSteps:
    """From the rows' slots to their next tokens without a number of the host's in between."""

    def __init__(
        self, model: CausalLM, inputs: DecodeInputs, state: DeviceState, draws: DeviceDraws
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._state = state
        self._draws = draws
        self._starts = np.arange(state.spare + 1, dtype=np.int32)

    def serves(self, rows: ScheduledRows) -> bool:
        """Whether these rows make such a step."""
        return bool(
            len(rows.slots)
            and rows.samples.all()
            and (rows.num_tokens == 1).all()
            and self._draws.serves(rows.slots).all()
        )

    def launch(self, rows: ScheduledRows) -> torch.Tensor | None:
        """Token ids int32 [R] of rows that have them then; None if an exception was raised: whose
        fault it is, another way has to find out."""
        num_rows = len(rows.slots)
        self._state.send(RowList(rows.slots, self._starts[: num_rows + 1], rows.slots))
        try:
            return self._compute(num_rows)
        except Exception:  # noqa: BLE001  whoever is at fault, another way finds out
            _log.warning("a decode step failed and is computed anew", exc_info=True)
            return None

    def _compute(self, num_rows: int) -> torch.Tensor:
        """Of the first rows in the inbox."""
        inputs = self._inputs.gather(num_rows)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.step)
        logits = self._model.logits(hidden)
        return self._draws.draw_and_append(logits, self._state.inbox.slots[:num_rows])
