"""Small batches for the tests of sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.platform import detect_platform
from quire.compute.sampling import SampleOutput, Sampler, SamplingState
from quire.ops import ALL_OPS, select
from quire.protocol import IntArray, SamplingParams


class Tokens:
    """A token history for a few slots; the others have none."""

    def __init__(self, by_slot: dict[int, tuple[Sequence[int], Sequence[int]]] | None = None):
        self._by_slot = by_slot or {}

    def prompt_ids(self, slot: int) -> IntArray:
        return np.array(self._by_slot.get(slot, ((), ()))[0], np.int32)

    def output_ids(self, slot: int) -> IntArray:
        return np.array(self._by_slot.get(slot, ((), ()))[1], np.int32)


def sampler(state: SamplingState) -> Sampler:
    """With the best provider of this machine; tests/ops compares all of them."""
    return Sampler(state, operation("draw"), operation("token_logprobs"))


def operation(name: str) -> Callable[..., Any]:
    """The best provider of an operation on this machine."""
    return select(ALL_OPS[name], detect_platform())[1]


def sample_rows(
    logits: npt.ArrayLike,
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    history: Tokens | None = None,
    stop_token_ids: Sequence[int] = (),
    mask: npt.NDArray[np.uint32] | None = None,
    logprobs_mode: str = "raw_logprobs",
) -> SampleOutput:
    """Return one step of a fresh sampler; row i is in slot i. mask: mask of all rows."""
    rows = torch.from_numpy(np.array(logits, np.float32))
    state = SamplingState(len(params), rows.shape[1], logprobs_mode)
    for slot, row_params in enumerate(params):
        state.enter(slot, row_params, seeds[slot] if seeds else slot, 0, stop_token_ids)
    places = positions if positions is not None else [7] * len(params)
    masks = None if mask is None else (mask[None], np.zeros(len(params), np.int64))
    return sampler(state).sample(rows, range(len(params)), places, history or Tokens(), masks)


def sample_one(logits: npt.ArrayLike, params: SamplingParams, **how: object) -> SampleOutput:
    """One row alone; `how` as in `sample_rows`, history given as prompt_ids and output_ids."""
    prompt_ids, output_ids = how.pop("prompt_ids", ()), how.pop("output_ids", ())
    history = Tokens({0: (prompt_ids, output_ids)})  # type: ignore[dict-item]
    return sample_rows([logits], [params], history=history, **how)  # type: ignore[arg-type]


def draw_many(logits: npt.ArrayLike, params: SamplingParams, count: int) -> IntArray:
    """`count` draws of one sequence at positions 0 … count - 1, all from the same logits."""
    row = torch.from_numpy(np.array(logits, np.float32))
    state = SamplingState(1, row.numel())
    state.enter(0, params, params.seed or 0, 0)
    rows = row.expand(count, -1)
    return sampler(state).sample(rows, [0] * count, range(count), Tokens()).token_ids
