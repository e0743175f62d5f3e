"""Next tokens: drawn by kernels, which may be recorded, or by the host where rows ask for more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.layers import LogitParts
from quire.compute.runner.changes import Upload
from quire.compute.runner.device.state import DeviceState
from quire.compute.runner.drafts import draw_in_turns, keep_in_turns
from quire.compute.runner.halves import in_halves
from quire.compute.runner.kernel_rows import KernelRows
from quire.compute.runner.late import RowMasks
from quire.compute.runner.rows import RowTable, Slots
from quire.compute.sampling import (
    NO_TOKEN,
    DeviceExtras,
    DeviceHistory,
    DeviceLogprobs,
    DeviceSampler,
    Draw,
    ReadLogprobs,
    RowsOfMasks,
    SampleOutput,
    Sampler,
    SamplingState,
    failures_of,
    find_candidates,
    mask_arguments,
    token_logprobs,
)
from quire.protocol.step import (
    NOTHING_DRAWN,
    REPORT_IT,
    IntArray,
    RowFailure,
    RowTokens,
    TokenCandidates,
    TokenLogprobs,
)

__all__ = ["Draws", "DrawnPiece", "GraphDraws", "PartDraws", "Sampled"]


@dataclass(frozen=True, slots=True)
class DrawnPiece:
    """Rows whose tokens kernels have drawn. slots [N] on the host; token ids int32 [N] where the
    kernels work; the log-probabilities that they asked for."""

    slots: Slots
    token_ids: torch.Tensor
    logprobs: DeviceLogprobs | None


@dataclass(slots=True)
class Sampled:
    """Tokens that the rows of a step have been given, and have appended. pieces: drawn by kernels,
    so that the host learns the tokens later. drawn: tokens drawn by the host. kept: drafts that
    rows with candidates have accepted. candidates, logprobs: results of rows that the host has
    served, by slot. failed: rows with neither tokens nor candidates."""

    pieces: list[DrawnPiece] = field(default_factory=list[DrawnPiece])
    drawn: RowTokens = NOTHING_DRAWN
    kept: RowTokens = NOTHING_DRAWN
    candidates: dict[int, tuple[TokenCandidates, ...]] = field(
        default_factory=dict[int, tuple[TokenCandidates, ...]]
    )
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs, ...]]
    )
    failed: list[RowFailure] = field(default_factory=list[RowFailure])


@dataclass(frozen=True, slots=True)
class PartDraws:
    """Draws of ranks that keep their `parts` of logits. draw: `draw` for these, on the host."""

    draw: Draw
    parts: LogitParts


class GraphDraws:
    """Draws one token per row with kernels alone, without the host, for rows that ask for nothing
    else. sampler: gathers the rows' parameters by slot within its kernel. Without it, `prepare`
    gathers them into buffers that stay where they are."""

    def __init__(
        self,
        sampling: SamplingState,
        rows: KernelRows,
        draw: Draw,
        append_tokens: Callable[..., None],
        sampler: DeviceSampler | None = None,
        of_parts: PartDraws | None = None,
        read_logprobs: ReadLogprobs | None = None,
    ) -> None:
        """draw, append_tokens: the operations. of_parts: None where logits are gathered.
        read_logprobs: the operation `token_logprobs` on the host, with which rows that also ask for
        raw log-probabilities are served; None to leave these rows to others."""
        self._of_parts = of_parts
        self._read = None if of_parts is not None else read_logprobs
        self._asking = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._sampling = sampling
        self._rows = rows
        self._draw = draw
        self._append_tokens = append_tokens
        self._sampler = sampler
        max_rows = len(rows.slots)
        self._index = torch.arange(max_rows)
        self._slots = np.zeros(0, np.int64)
        self._version = -1
        self._is_plain = False
        self.may_draw_masked = False
        """True if the rows of `prepare` ask no more than a draw and, some of them, a mask."""
        self._positions = np.zeros(max_rows, np.int64)
        self._gathered = [
            np.zeros(max_rows, column.dtype) for column in sampling.draw_parameters(self._slots)
        ]

    def prepare(self, slots: Slots, positions: Slots) -> bool:
        """Row i of the next draw is slots[i], and draws its token at positions[i]. Return False if
        some of these rows ask for more than is served here. A later draw for the same rows needs no
        new call: each draw leaves their next positions."""
        sampling = self._sampling
        if self._sampler is not None:
            return sampling.is_plain(slots)
        self._positions[: len(slots)] = positions
        if self._version != sampling.version or not np.array_equal(slots, self._slots):
            columns = sampling.draw_parameters(slots)
            for kept, column in zip(self._gathered, columns, strict=True):
                kept[: len(slots)] = column
            self._is_plain = sampling.is_plain(slots, may_be_read=self._read is not None)
            self._asking = sampling.asking(slots)
            self._counts = sampling.num_logprobs[slots[self._asking]]
            only_draw = sampling.is_plain(slots, may_be_masked=True)
            self.may_draw_masked = only_draw and not self._is_plain
            self._slots, self._version = slots, sampling.version
        return self._is_plain

    def logits_as_drawn(self) -> AbstractContextManager[None]:
        """A model computes logits meanwhile that a call draws from."""
        return nullcontext() if self._of_parts is None else self._of_parts.parts.kept()

    def __call__(
        self, logits: torch.Tensor, slots: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw and append one token for each of `slots` int64 [N]. Return the token ids, int32 [N];
        NO_TOKEN in rows that have none and fail. logits: made within `logits_as_drawn`. index:
        int64 [N], the row of logits that each draws from; None for its own."""
        count = len(slots)
        if self._sampler is None:
            index = self._index[:count] if index is None else index
            draw = self._draw if self._of_parts is None else self._of_parts.draw
            token_ids = draw(logits, index, *self._columns(count))
            self.append(slots, token_ids, torch.from_numpy(self._positions[:count]))
            return token_ids
        positions = self._rows.num_tokens[slots]
        token_ids = self._sampler.sample(logits, slots, positions, index).token_ids
        self.append(slots, token_ids)
        return token_ids

    def under_masks(
        self, logits: torch.Tensor, slots: torch.Tensor, masks: RowsOfMasks
    ) -> torch.Tensor | None:
        """Draw like a call, row i of `slots` from row i of logits, under its mask. Return None, and
        leave all rows as they are, if one of them has no token."""
        count = len(slots)
        token_ids = self._draw(
            logits,
            self._index[:count],
            *self._columns(count),
            **mask_arguments(masks),
        )
        if (token_ids < 0).any():
            return None
        self.append(slots, token_ids, torch.from_numpy(self._positions[:count]))
        return token_ids

    def read_logprobs(
        self, logits: torch.Tensor, token_ids: IntArray
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Return the log-probabilities that the rows of the last draw asked for, by slot. logits:
        logits of that draw. token_ids: int32 [N], tokens that it gave; rows without one have no
        log-probabilities."""
        if self._read is None or not len(self._asking):
            return {}
        drawn = token_ids[self._asking] >= 0
        rows, counts = self._asking[drawn], self._counts[drawn]
        if not len(rows):
            return {}
        entries = token_logprobs(self._read, logits, rows, token_ids[rows], counts)
        return {
            slot: (entry,) for slot, entry in zip(self._slots[rows].tolist(), entries, strict=True)
        }

    def _columns(self, count: int) -> list[torch.Tensor]:
        """The parameters and positions of the first rows of `prepare`, as the operation's."""
        columns = (*self._gathered, self._positions)
        return [torch.from_numpy(column[:count]) for column in columns]

    def append(
        self, slots: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> None:
        """Append these tokens to their rows. positions: set to where the rows' next tokens go."""
        rows = self._rows
        columns = (rows.num_computed, rows.num_tokens, rows.token_ids)
        self._append_tokens(slots, token_ids, *columns, rows.spare, positions)


class Draws:
    """Draws outside of graphs. Where `extras` is given, kernels serve all rows but those with edits
    that need the host, drafts or candidates; the host serves the others."""

    def __init__(
        self,
        sampling: SamplingState,
        rows: RowTable,
        sampler: Sampler,
        graph: GraphDraws,
        upload: Upload,
        extras: DeviceExtras | None = None,
        state: DeviceState | None = None,
    ) -> None:
        """sampler: draws on the host. state: rows on the device, which `extras` reads."""
        self._sampling = sampling
        self._rows = rows
        self._sampler = sampler
        self._graph = graph
        self._state = state
        self._upload = upload
        self._extras = extras
        self.failures = failures_of if extras is None else extras.failures

    def by_kernels(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return for each row whether kernels draw its token; the host verifies drafts."""
        if self._extras is None:
            return np.zeros(len(slots), np.bool_)
        return self._extras.serves(slots) & (self._rows.num_drafts[slots] == 0)

    def waiting_for_masks(self, slots: Slots) -> Slots:
        """Return the rows that wait for masks."""
        return slots[self._sampling.masked[slots]]

    def sample(
        self, logits: torch.Tensor, slots: Slots, index: Slots, masks: RowMasks | None = None
    ) -> Sampled:
        """Draw for `slots` [N] from rows `index` [N] of logits [L, V], and verify their drafts by
        the rows of logits that follow. Find the candidates of rows that do not draw. The host must
        know all tokens of the rows that it serves. masks: masks for the rows that wait for some."""
        result = Sampled()
        by_kernels = self.by_kernels(slots)
        if not by_kernels.all():
            of_host = ~by_kernels
            brought = self._brought(logits, slots[of_host], index[of_host])
            self._on_host(*brought, masks, result)
        if by_kernels.any():
            self._by_kernels(logits, slots[by_kernels], index[by_kernels], masks, result)
        return result

    def _brought(
        self, logits: torch.Tensor, slots: Slots, index: Slots
    ) -> tuple[torch.Tensor, Slots, Slots]:
        """Return the arguments of `_on_host`, with the logits of these rows on the host."""
        if self._extras is None:
            return logits, slots, index
        counts = 1 + self._rows.num_drafts[slots]
        firsts = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(index - firsts, counts)
        return logits[self._upload(places)].float().cpu(), slots, firsts

    def _on_host(
        self,
        logits: torch.Tensor,
        slots: Slots,
        index: Slots,
        masks: RowMasks | None,
        result: Sampled,
    ) -> None:
        draws = self._sampling.num_candidates[slots] == 0
        if not draws.all():
            self._find_candidates(logits, slots[~draws], index[~draws], masks, result)
            slots, index = slots[draws], index[draws]

        def draw(which: Slots, turn: int) -> IntArray:
            return self._draw(logits, slots[which], index[which], turn, masks, result)

        result.drawn = draw_in_turns(self._rows, slots, draw)

    def _find_candidates(
        self,
        logits: torch.Tensor,
        slots: Slots,
        index: Slots,
        masks: RowMasks | None,
        result: Sampled,
    ) -> None:
        def see(which: Slots, turn: int) -> npt.NDArray[np.bool_]:
            these = slots[which]
            allowed = None if masks is None else masks.by_slot(these, turn)
            found = find_candidates(
                logits,
                index[which] + turn,
                these,
                self._sampling,
                self._rows,
                self._sampler.read_logprobs,
                allowed,
            )
            for slot, entry in found.candidates.items():
                result.candidates[slot] = (*result.candidates.get(slot, ()), entry)
            if not turn:  # later a guess was at fault, which costs no request
                result.failed += found.failed
            return np.isin(these, list(found.candidates))

        result.kept = keep_in_turns(self._rows, slots, see)

    def _draw(
        self,
        logits: torch.Tensor,
        slots: Slots,
        index: Slots,
        turn: int,
        masks: RowMasks | None,
        result: Sampled,
    ) -> IntArray:
        """A token for each of `slots` [N] after `turn` drafts, of which the first logits are those
        at `index` [N]; NO_TOKEN in rows that fail."""
        positions, rows = self._rows.num_tokens[slots], index + turn
        of_rows = None if masks is None else masks.index(slots, turn)

        def compute(part: slice) -> SampleOutput:
            allowed = None
            if masks is not None and of_rows is not None:
                allowed = masks.words, of_rows[part]
            return self._sampler.sample(
                logits, slots[part], positions[part], self._rows, allowed, rows[part]
            )

        def alone(row: int, error: BaseException) -> SampleOutput:
            failure = _cannot_draw(int(slots[row]), error)
            return SampleOutput(np.full(1, NO_TOKEN, np.int32), failed=(failure,))

        outputs = in_halves(slice(0, len(slots)), compute, alone)
        for output in outputs:
            result.failed += output.failed
            for slot, entry in output.logprobs.items():
                result.logprobs[slot] = (*result.logprobs.get(slot, ()), entry)
        return np.concatenate([output.token_ids for output in outputs])

    def _by_kernels(
        self,
        logits: torch.Tensor,
        slots: Slots,
        index: Slots,
        masks: RowMasks | None,
        result: Sampled,
    ) -> None:
        def alone(row: int, error: BaseException) -> RowFailure:
            return _cannot_draw(int(slots[row]), error)

        def compute(part: slice) -> DrawnPiece:
            return self._piece(logits, slots[part], index[part], masks)

        for part in in_halves(slice(0, len(slots)), compute, alone):
            if isinstance(part, DrawnPiece):
                result.pieces.append(part)
            else:
                result.failed.append(part)

    def _piece(
        self, logits: torch.Tensor, slots: Slots, index: Slots, masks: RowMasks | None
    ) -> DrawnPiece:
        assert self._extras is not None
        assert self._state is not None
        rows, where = self._state.rows, self._state.inbox.drawing_of(slots)
        where = self._upload(slots) if where is None else where
        is_whole = np.array_equal(index, np.arange(len(logits)))
        taken = None if is_whole else self._upload(index)
        if self._sampling.is_plain(slots):
            return DrawnPiece(slots, self._graph(logits, where, taken), None)
        history = DeviceHistory(rows.token_ids, rows.num_prompt, rows.num_tokens)
        positions = rows.num_tokens[where]
        allowed = None if masks is None else (masks.words, masks.index(slots, 0))
        sample = self._extras.sample(logits, slots, where, positions, history, taken, allowed)
        self._graph.append(where, sample.token_ids)
        return DrawnPiece(slots, sample.token_ids, sample.logprobs)


def _cannot_draw(slot: int, error: BaseException) -> RowFailure:
    return RowFailure(slot, f"the sampler could not draw for this request ({error}); {REPORT_IT}")
