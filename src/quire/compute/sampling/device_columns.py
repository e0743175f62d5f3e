"""Sampling parameters on a device: their columns of `SamplingState`, and their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError
from quire.compute.sampling.state import SamplingState

__all__ = ["DeviceColumns"]

Words = npt.NDArray[np.int32]

_WORDS = 2
"""Words of 32 bits in each value."""

_NAMES = ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index")


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """Inputs of the operation `draw`, by slot: [num_slots] each, all on one device.

    temperature (0 for greedy rows), top_p, min_p: float64. top_k, seed (64 bits), sample_index:
    int64. They are views of one region of int32 words, in this order, so that a runner can keep
    them in memory of its own and change single words there.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    sample_index: torch.Tensor

    @staticmethod
    def num_words(num_slots: int) -> int:
        """int32 words that the columns of so many slots take."""
        return len(_NAMES) * num_slots * _WORDS

    @classmethod
    def over(cls, words: torch.Tensor) -> DeviceColumns:
        """The columns in `words`: int32 [num_words(num_slots)], contiguous, at an even word of its
        storage. What the words hold is left as it is. Raises EngineError if they do not fit."""
        if words.dtype != torch.int32 or words.numel() % (len(_NAMES) * _WORDS):
            raise EngineError(
                f"sampling columns are int32 words, {len(_NAMES) * _WORDS} for each slot, not "
                f"{words.dtype}{list(words.shape)}."
            )
        columns = words.view(torch.int64).view(len(_NAMES), -1)
        numbers = columns.view(torch.float64)
        return cls(*numbers[:3].unbind(), *columns[3:].unbind())

    @classmethod
    def of_state(cls, state: SamplingState, device: torch.device) -> DeviceColumns:
        """A copy of all columns as they are now."""
        num_slots = len(state.occupied)
        words = np.zeros(cls.num_words(num_slots), np.int32)
        for slot in range(num_slots):
            indices, values = cls.updates(state, slot)
            words[indices] = values
        return cls.over(torch.from_numpy(words).to(device))

    @staticmethod
    def updates(state: SamplingState, slot: int) -> tuple[npt.NDArray[np.int64], Words]:
        """Return a slot's current values: (word index within the region, value) pairs, [12] each.
        After `enter` and `fork` of the slot, the region must hold them; after `leave` nothing reads
        it."""
        num_slots = len(state.occupied)
        temperature = 0.0 if state.greedy[slot] else state.temperature[slot]
        numbers = np.array([temperature, state.top_p[slot], state.min_p[slot]], np.float64)
        integers = np.array([state.top_k[slot], state.sample_index[slot]], np.int64)
        values = np.concatenate(
            (
                numbers.view(np.int32),
                integers[:1].view(np.int32),
                state.seed[slot : slot + 1].view(np.int32),
                integers[1:].view(np.int32),
            )
        )
        firsts = (np.arange(len(_NAMES), dtype=np.int64) * num_slots + slot) * _WORDS
        return (firsts[:, None] + np.arange(_WORDS)).ravel(), values
