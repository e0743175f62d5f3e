"""Draws tokens from logits on the device, without the host in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.sampling.device_columns import DeviceColumns
from quire.compute.sampling.sampler import Draw
from quire.compute.sampling.state import SamplingState

__all__ = ["NO_MASKS", "DeviceSample", "DeviceSampler"]

NO_MASKS: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Drawn tokens. token_ids: int32 [N] on the device; in rows that failed NO_TOKEN (-1), or
    BANNED (-2) where a mask left none."""

    token_ids: torch.Tensor


class DeviceSampler:
    """Draws the next token of each row, by the rules of `Sampler`, with tensors that stay where
    they are: a call can be captured in a graph and replayed for whatever rows its inputs name then.
    """

    def __init__(self, state: SamplingState, columns: DeviceColumns, draw: Draw) -> None:
        """state: parameters on the host, the source of `columns`; its owner keeps these up to date
        (`DeviceColumns.updates`). draw: `ops.sampling.draw`, on tensors of the device."""
        self._state = state
        self._columns = columns
        self._draw = draw
        # a step may be padded to the next power of two
        self._identity = torch.arange(2 * len(state.occupied), device=columns.seed.device)

    def is_graphable(self, slots: npt.NDArray[np.integer[Any]]) -> bool:
        """Return whether `sample` alone computes everything that these rows ask for."""
        return self._state.is_plain(slots)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
        masks: Mapping[str, torch.Tensor] = NO_MASKS,
    ) -> DeviceSample:
        """Draw one token for each of N slots.

        logits: float32 or bfloat16 [R, V], left as they are. slots, positions: int64 [N], the
            absolute position of the drawn token. rows: int64 [N], which row of logits each draws
            from; None for its own, in order. masks: the arguments of the operation that say what
            rows may draw. All on the device.
        """
        columns = self._columns
        token_ids = self._draw(
            logits,
            self._identity[: len(slots)] if rows is None else rows,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            columns.seed,
            columns.sample_index,
            positions,
            slots,
            **masks,
        )
        return DeviceSample(token_ids)
