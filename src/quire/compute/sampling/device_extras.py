"""Rows that ask a device for more than a draw: edits of their logits, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.sampling.device_edits import DeviceEdits, Upload
from quire.compute.sampling.device_sampler import NO_MASKS, DeviceSampler
from quire.compute.sampling.logprobs import entries_of
from quire.compute.sampling.sampler import BANNED, NO_TOKEN, RowsOfMasks, mask_arguments, not_finite
from quire.compute.sampling.state import NO_LOGPROBS, SamplingState
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.protocol.step import RowFailure, TokenLogprobs

__all__ = ["DeviceExtras", "DeviceHistory", "DeviceLogprobs", "ExtraSample"]

Slots = npt.NDArray[np.integer[Any]]

_ALL_BANNED = (
    "every token is banned by the request's own allowed_token_ids, bad_words, min_tokens and "
    "grammar taken together, or its penalties made a logit that is not finite. Relax them."
)


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """The tokens of all slots on the device: row_tokens int32 [S, L], num_prompt and num_tokens
    int64 [S]; the drawn token is not among them yet."""

    row_tokens: torch.Tensor
    num_prompt: torch.Tensor
    num_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """asked: int64 [M], indices of the rows that want them, among the N of a sample. slots, counts:
    int64 [M], for these rows. tensors: results of `quire.ops.sampling.token_logprobs` for them, on
    the device."""

    asked: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    tensors: tuple[torch.Tensor, ...]

    def by_slot(
        self, token_ids: npt.NDArray[np.int32], values: Sequence[np.ndarray]
    ) -> dict[int, TokenLogprobs]:
        """Return log-probabilities by slot, in the form of the host's sampler. token_ids: tokens of
        all N rows; negative ones have no log-probabilities. values: contents of `tensors`, once
        they have come to the host."""
        given = token_ids[self.asked]
        entries = entries_of(given, self.counts.tolist(), values)
        drawn = zip(self.slots.tolist(), entries, strict=True)
        return {slot: entry for slot, entry in drawn if entry.token_id >= 0}


@dataclass(frozen=True, slots=True)
class ExtraSample:
    """token_ids: int32 [N] on the device; in rows that failed NO_TOKEN, or BANNED if the fault is
    the request's. logprobs: None if no row wants any."""

    token_ids: torch.Tensor
    logprobs: DeviceLogprobs | None


class DeviceExtras:
    """Draws for any rows but those with edits that need the host (`RowEdits.needs_host`), those
    that want the whole vocabulary's log-probabilities, or others than raw ones, and those that give
    candidates.

    What it launches depends on the rows, so it is not for graphs; it does not wait for the device.
    """

    def __init__(
        self,
        state: SamplingState,
        sampler: DeviceSampler,
        edit_logits: Callable[..., torch.Tensor],
        token_logprobs: Callable[..., tuple[torch.Tensor, ...]],
        upload: Upload,
    ) -> None:
        """edit_logits, token_logprobs: the operations. upload: copies an array to the device."""
        self._state = state
        self._sampler = sampler
        self._edit_logits = edit_logits
        self._token_logprobs = token_logprobs
        self._edits = DeviceEdits(upload)
        self._upload = upload

    def serves(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return for each row [N] whether `sample` draws for it."""
        state = self._state
        served = state.num_candidates[slots] == 0
        asked = state.num_logprobs[slots]
        most = MAX_LOGPROBS if state.logprobs_mode == "raw_logprobs" else NO_LOGPROBS
        served &= (asked == NO_LOGPROBS) | ((asked >= 0) & (asked <= most))
        for index in np.flatnonzero(state.edited[slots]).tolist():
            served[index] &= not state.edits[int(slots[index])].needs_host
        return served

    def sample(
        self,
        logits: torch.Tensor,
        host_slots: Slots,
        slots: torch.Tensor,
        positions: torch.Tensor,
        history: DeviceHistory,
        rows: torch.Tensor | None = None,
        masks: RowsOfMasks | None = None,
    ) -> ExtraSample:
        """Sample like `DeviceSampler.sample`. host_slots: a copy of the slots on the host [N].
        masks: masks on the host."""
        if rows is None:
            rows = torch.arange(len(host_slots), device=logits.device)
        is_edited = self._state.edited[host_slots]
        allowed = NO_MASKS if masks is None else mask_arguments(masks, self._upload)
        token_ids = self._sampler.sample(logits, slots, positions, rows, allowed).token_ids
        edited = np.flatnonzero(is_edited)
        if len(edited):
            edits = [self._state.edits[slot] for slot in host_slots[edited].tolist()]
            which = self._upload(edited)
            of_edited = self._edit_logits(
                logits,
                rows[which],
                slots[which],
                history.row_tokens,
                history.num_prompt,
                history.num_tokens,
                *self._edits.of(edits),
            )
            if allowed:
                allowed = {**allowed, "mask_rows": allowed["mask_rows"][which]}
            drawn = self._sampler.sample(of_edited, slots[which], positions[which], None, allowed)
            # a row that was no law before its edits has no token, whatever they banned
            sound = token_ids[which] != NO_TOKEN
            found = torch.where(drawn.token_ids == NO_TOKEN, BANNED, drawn.token_ids)
            token_ids = token_ids.index_copy(0, which, torch.where(sound, found, NO_TOKEN))
        return ExtraSample(token_ids, self._logprobs(logits, host_slots, rows, token_ids))

    def _logprobs(
        self,
        logits: torch.Tensor,
        host_slots: Slots,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> DeviceLogprobs | None:
        asked = np.flatnonzero(self._state.num_logprobs[host_slots] != NO_LOGPROBS)
        if not len(asked):
            return None
        counts = self._state.num_logprobs[host_slots[asked]]
        which = self._upload(asked)
        found = self._token_logprobs(logits, rows[which], token_ids[which], int(counts.max()))
        return DeviceLogprobs(asked, host_slots[asked].astype(np.int64), counts, found)

    def failures(
        self, token_ids: npt.NDArray[np.int32], slots: Slots, positions: Slots
    ) -> tuple[RowFailure, ...]:
        """A sentence for each row without a token, once the tokens [N] have come to the host."""
        return tuple(
            RowFailure(int(slots[index]), _ALL_BANNED, is_request_fault=True)
            if token_ids[index] == BANNED
            else RowFailure(int(slots[index]), not_finite(int(positions[index])))
            for index in np.flatnonzero(token_ids < 0).tolist()
        )
