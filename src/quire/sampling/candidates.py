"""The most likely next tokens of rows whose token the plan side chooses: beams."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import QuireError, RequestError
from quire.ops.draw.ranking import LogitArray, best_ids
from quire.protocol.sampling_params import GREEDY_TEMPERATURE
from quire.protocol.step import RowFailure, TokenCandidates
from quire.sampling.edits import edit_row
from quire.sampling.logprobs import log_sum_exp, logprobs_of
from quire.sampling.sampler import TokenHistory, check_finite
from quire.sampling.state import NO_LOGPROBS, SamplingState

__all__ = ["CandidateOutput", "find_candidates"]


@dataclass(slots=True)
class CandidateOutput:
    """candidates: by slot. failed: a sentence for each row that has none."""

    candidates: dict[int, TokenCandidates] = field(default_factory=dict[int, TokenCandidates])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])


def find_candidates(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    state: SamplingState,
    history: TokenHistory,
) -> CandidateOutput:
    """The candidates of rows [N] from their logits [N, V]; a row at fault fails alone."""
    output = CandidateOutput()
    rows: LogitArray = logits.detach().to("cpu", torch.float32).numpy()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        try:
            output.candidates[slot] = _candidates_of(row, slot, state, history)
        except QuireError as error:
            output.failed.append(RowFailure(slot, str(error)))
        except Exception as error:  # noqa: BLE001  whatever it is, it must end with its row
            message = f"no candidates could be found for this request ({error}): send it again"
            output.failed.append(RowFailure(slot, message))
    return output


def _candidates_of(
    row: LogitArray, slot: int, state: SamplingState, history: TokenHistory
) -> TokenCandidates:
    """From the raw logits [V] of one row. Tokens of equal score stand in the order of their ids."""
    prompt_ids, output_ids = history.prompt_ids(slot), history.output_ids(slot)
    check_finite(float(row.max()), len(prompt_ids) + len(output_ids))
    edited, edits = row, state.edits.get(slot)
    if edits is not None:
        edited = edit_row(row, edits, prompt_ids, output_ids, None)
    if not edited.max() < np.inf:
        raise RequestError(
            "the request's own logits processors or penalties made a logit that is not a number "
            "or infinite. Keep logits finite, or -inf for a ban."
        )
    token_ids = best_ids(edited, int(state.num_candidates[slot]))
    temperature = float(state.temperature[slot])
    if temperature < GREEDY_TEMPERATURE:
        temperature = 1.0
    normalizer = log_sum_exp(row if temperature == 1.0 else row / np.float32(temperature))
    logprobs = ()
    if state.num_logprobs[slot] != NO_LOGPROBS:
        logprobs = logprobs_of(row, token_ids.tolist(), int(state.num_logprobs[slot]))
    return TokenCandidates(
        token_ids.astype(np.int32),
        edited[token_ids].astype(np.float64) / temperature - normalizer,
        logprobs,
    )
