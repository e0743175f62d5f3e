"""The most likely next tokens of rows whose token the plan side chooses: beams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import QuireError, RequestError
from quire.base.platform.interrupts import is_ctrl_c
from quire.compute.sampling.edits import RowEdits, RowPlace, edit_row
from quire.compute.sampling.logprobs import NUM_IN_CACHE, ReadLogprobs, log_sum_exp, token_logprobs
from quire.compute.sampling.sampler import TokenHistory, check_finite
from quire.compute.sampling.state import NO_LOGPROBS, SamplingState
from quire.ops.sampling.draw.ranking import IdArray, LogitArray, best_ids, best_ids_of_rows
from quire.protocol.sampling_params import GREEDY_TEMPERATURE
from quire.protocol.step import (
    REPORT_IT,
    IntArray,
    MaskArray,
    RowFailure,
    TokenCandidates,
    TokenLogprobs,
)

__all__ = ["CandidateOutput", "find_candidates"]


@dataclass(slots=True)
class CandidateOutput:
    """candidates: candidates of rows, by slot. failed: a sentence for each row that has none."""

    candidates: dict[int, TokenCandidates] = field(default_factory=dict[int, TokenCandidates])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])


def find_candidates(
    logits: torch.Tensor,
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    state: SamplingState,
    history: TokenHistory,
    read: ReadLogprobs,
    masks: Mapping[int, MaskArray] | None = None,
) -> CandidateOutput:
    """The candidates of `slots` [N] from `rows` [N] of the logits [R, V], those that `masks` allow,
    by slot; a row at fault fails alone."""
    values: LogitArray = logits.detach().to("cpu", torch.float32).numpy()
    output = CandidateOutput()
    laws = _laws(values, rows, slots, state)
    for law, slot in zip(laws, slots.tolist(), strict=True):
        try:
            mask = None if masks is None else masks.get(slot)
            found = _candidates_of(law, slot, state, history, mask)
            count = int(state.num_logprobs[slot])
            if count != NO_LOGPROBS:
                found = replace(found, logprobs=_logprobs_of(law, found.token_ids, count, read))
            output.candidates[slot] = found
        except QuireError as error:
            output.failed.append(RowFailure.of(slot, error))
        except BaseException as error:  # whatever it is, it must end with its row
            if is_ctrl_c(error):
                raise
            message = f"no candidates could be found for this request ({error}); {REPORT_IT}"
            output.failed.append(RowFailure(slot, message))
    return output


@dataclass(frozen=True, slots=True)
class _Law:
    """logits: raw, [V]. best: ids of the largest of them, in order. normalizer: logarithm of the
    sum of exp(logit / temperature); not finite if some logit is not, and then `best` is nothing."""

    logits: LogitArray
    best: IdArray
    temperature: float
    normalizer: float


def _laws(values: LogitArray, rows: IdArray, slots: IdArray, state: SamplingState) -> list[_Law]:
    """Compute what needs a pass over whole rows, for all of them."""
    temperatures = state.temperature[slots]
    temperatures = np.where(temperatures < GREEDY_TEMPERATURE, 1.0, temperatures).tolist()
    scratch = np.empty(min(values.shape[1], NUM_IN_CACHE), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        normalizers = [
            log_sum_exp(values[row] if t == 1.0 else values[row] / np.float32(t), scratch)
            for row, t in zip(rows.tolist(), temperatures, strict=True)
        ]
    wanted = state.num_candidates[slots]
    best = np.zeros((len(rows), min(int(wanted.max(initial=0)), values.shape[1])), np.int64)
    is_whole = np.isfinite(normalizers)
    best[is_whole] = best_ids_of_rows(values, rows[is_whole], best.shape[1])
    return [
        _Law(values[row], best[i], temperatures[i], normalizers[i])
        for i, row in enumerate(rows.tolist())
    ]


def _candidates_of(
    law: _Law,
    slot: int,
    state: SamplingState,
    history: TokenHistory,
    mask: MaskArray | None,
) -> TokenCandidates:
    """Return the candidates of one row. Tokens of equal score stand in the order of their ids."""
    logits, edits = law.logits, state.edits.get(slot)
    if not math.isfinite(law.normalizer):
        position = len(history.prompt_ids(slot)) + len(history.output_ids(slot))
        check_finite(float(logits.max()), position)
    count = int(state.num_candidates[slot])
    edited, token_ids = logits, law.best[:count]
    if edits is not None or mask is not None:
        edited = _edit(logits, edits, slot, history, mask)
        token_ids = best_ids(edited, count)
    return TokenCandidates(
        token_ids.astype(np.int32),
        edited[token_ids].astype(np.float64) / law.temperature - law.normalizer,
    )


def _logprobs_of(
    law: _Law, token_ids: IntArray, count: int, read: ReadLogprobs
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of candidates of one row."""
    row, number = torch.from_numpy(law.logits[None]), len(token_ids)
    same = np.zeros(number, np.int64)
    return tuple(token_logprobs(read, row, same, token_ids, np.full(number, count)))


def _edit(
    row: LogitArray,
    edits: RowEdits | None,
    slot: int,
    history: TokenHistory,
    mask: MaskArray | None,
) -> LogitArray:
    """The logits [V] as the request wants them. RequestError if they are no numbers then."""
    place = RowPlace(history.prompt_ids(slot), history.output_ids(slot), mask)
    edited = edit_row(row, edits, place)
    if not edited.max() < np.inf:
        raise RequestError(
            "the request's own logits processors or penalties made a logit that is not a number "
            "or infinite. Keep logits finite, or -inf for a ban."
        )
    return edited
