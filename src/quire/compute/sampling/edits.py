"""Changes of a request to its logits, before they become a distribution.

Order: user's logits processors → logit_bias → bans (allowed_token_ids, bad_words, min_tokens) →
penalties → grammar mask → XTC, which comes after top-k, top-p and min-p and so brings them along. A
banned token has the logit -inf.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.base.errors import RequestError
from quire.base.platform.interrupts import is_ctrl_c
from quire.ops.sampling.draw.candidates import select_candidates
from quire.ops.sampling.draw.noise import row_uniform
from quire.ops.sampling.draw.ranking import IdArray, LogitArray, in_order
from quire.protocol.sampling_params import LogitsProcessor, SamplingParams
from quire.protocol.step import IntArray, MaskArray

__all__ = ["Penalties", "RowEdits", "RowPlace", "draw_filters", "edit_row", "edits_of"]

_BANNED = np.float32(-np.inf)


class Penalties(NamedTuple):
    """Penalties of one row, in the order of the operation `edit_logits`."""

    repetition: float
    presence: float
    frequency: float


_NO_PENALTIES = Penalties(1.0, 0.0, 0.0)


_LARGEST_FACTOR = 1e30
"""A larger factor of DRY bans no more than this one, and may leave float32."""

_MOST_GROWING = 1024
"""Tokens beyond the allowed length after which DRY's penalty grows no more."""


@dataclass(frozen=True, slots=True)
class RepetitionEnd:
    """DRY of one row; the numbers are those of `SamplingParams`. breakers: tokens behind the first
    one of each breaker, by its first token. longest_breaker: number of tokens of the longest one.
    """

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: Mapping[int, Sequence[tuple[int, ...]]]
    longest_breaker: int

    @property
    def longest(self) -> int:
        """Tokens of the longest repetition that counts. A longer one has no larger penalty, or is
        beyond the tokens that a step may compare."""
        if self.base == 1.0:
            return self.allowed_length
        growing = int(math.log(_LARGEST_FACTOR) / math.log(self.base))
        return self.allowed_length + min(growing, _MOST_GROWING)


class TopExclusion(NamedTuple):
    """XTC of one row, with the filters before it."""

    probability: float
    threshold: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The edits of one row, ready to be applied; immutable, so forked rows share one.

    bias_ids int64 and bias_values float32 [number of biases]. allowed_ids: int64, or None for all.
    stop_ids: int64, banned while the output has fewer than min_tokens tokens.
    """

    processors: tuple[LogitsProcessor, ...]
    bias_ids: IdArray
    bias_values: LogitArray
    allowed_ids: IdArray | None
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    stop_ids: IdArray
    penalties: Penalties
    repetition_end: RepetitionEnd | None
    top_exclusion: TopExclusion | None

    @property
    def needs_host(self) -> bool:
        """True if no kernel can make these edits, so that the host draws for the row."""
        by_host = (self.repetition_end, self.top_exclusion)
        return bool(self.processors) or any(each is not None for each in by_host)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A row at its next token.

    prompt_ids, output_ids: int32, the tokens before it. mask: [ceil(V / 32)] of the tokens that a
    grammar allows; None: all. seed (64 bits), sample_index, position: arguments of its noise.
    """

    prompt_ids: IntArray
    output_ids: IntArray
    mask: MaskArray | None = None
    seed: int = 0
    sample_index: int = 0
    position: int = 0


def draw_filters(params: SamplingParams) -> tuple[int, float, float]:
    """Return top_k, top_p and min_p for the draw that follows the edits; 0, 1 and 0 are off."""
    if _excludes_top(params):
        return 0, 1.0, 0.0
    return max(params.top_k, 0), params.top_p or 1.0, params.min_p  # top_p 0 is greedy


def _excludes_top(params: SamplingParams) -> bool:
    may_exclude = params.xtc_probability > 0.0 and params.xtc_threshold <= 0.5
    return may_exclude and not params.is_greedy


def edits_of(params: SamplingParams, stop_token_ids: Collection[int]) -> RowEdits | None:
    """Return the changes that `params` makes to logits; None if there are none.

    stop_token_ids: tokens that end the sequence, beside `params.stop_token_ids`.
    """
    biases = params.logit_bias or {}
    allowed = params.allowed_token_ids
    edits = RowEdits(
        processors=tuple(params.logits_processors or ()),
        bias_ids=np.array(list(biases.keys()), np.int64),
        bias_values=np.array(list(biases.values()), np.float32),
        allowed_ids=None if allowed is None else np.array(allowed, np.int64),
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
        min_tokens=params.min_tokens,
        stop_ids=np.array(sorted({*stop_token_ids, *(params.stop_token_ids or ())}), np.int64),
        penalties=Penalties(
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        ),
        repetition_end=_repetition_end(params),
        top_exclusion=_top_exclusion(params) if _excludes_top(params) else None,
    )
    return edits if _changes_anything(edits) else None


def edit_row(row: LogitArray, edits: RowEdits | None, place: RowPlace) -> LogitArray:
    """The edited logits [V]; `row` [V] is left as it is. Raises RequestError if a logits processor
    does not do its part."""
    edited, prompt_ids, output_ids = row.copy(), place.prompt_ids, place.output_ids
    if edits is not None:
        for index, processor in enumerate(edits.processors):
            edited = _process(processor, index, output_ids, edited)
        edited[edits.bias_ids] += edits.bias_values
        _ban(edited, edits, output_ids)
        _penalize(edited, edits, prompt_ids, output_ids)
    if place.mask is not None:
        allowed = np.unpackbits(place.mask.view(np.uint8), bitorder="little")[: row.size]
        np.copyto(edited, _BANNED, where=allowed == 0)
    if edits is not None and edits.top_exclusion is not None:
        _exclude_top(edited, edits.top_exclusion, place)
    return edited


def _changes_anything(edits: RowEdits) -> bool:
    return (
        edits.bias_ids.size > 0
        or edits.allowed_ids is not None
        or bool(edits.bad_words)
        or (edits.min_tokens > 0 and edits.stop_ids.size > 0)
        or edits.penalties != _NO_PENALTIES
        or edits.needs_host
    )


def _process(
    processor: LogitsProcessor, index: int, output_ids: IntArray, row: LogitArray
) -> LogitArray:
    """`row` as the processor returns it, in memory that is ours alone."""
    name = f"logits processor {index} ({getattr(processor, '__name__', type(processor).__name__)})"
    try:
        result = processor(output_ids.tolist(), torch.from_numpy(row))
    # foreign code: an error is its own request's failure
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise RequestError(
            f"{name} raised {type(error).__name__}: {error}. Correct it; other requests go on."
        ) from error
    if not isinstance(result, torch.Tensor) or result.shape != row.shape:
        shape = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise RequestError(
            f"{name} returned {shape}, but logits are a tensor of shape [{row.size}]. "
            "Return the logits that it was given, changed as needed."
        )
    return np.array(result.detach().to("cpu", torch.float32).numpy())


def _ban(row: LogitArray, edits: RowEdits, output_ids: IntArray) -> None:
    """Ban, in place, what is not allowed, what would end a bad word, and stops that come early."""
    if edits.allowed_ids is not None:
        allowed = row[edits.allowed_ids]
        row[:] = _BANNED
        row[edits.allowed_ids] = allowed
    for word in edits.bad_words:
        if _ends_with(output_ids, word[:-1]):
            row[word[-1]] = _BANNED
    if output_ids.size < edits.min_tokens:
        row[edits.stop_ids] = _BANNED


def _ends_with(output_ids: IntArray, tokens: Sequence[int]) -> bool:
    """Return whether the output, without the prompt, ends with `tokens`; true if `tokens` is
    empty."""
    if not tokens:
        return True
    return output_ids.size >= len(tokens) and output_ids[-len(tokens) :].tolist() == list(tokens)


def _penalize(row: LogitArray, edits: RowEdits, prompt_ids: IntArray, output_ids: IntArray) -> None:
    """Repetition over prompt and output, once per token: a positive logit is divided, another
    multiplied (Keskar et al., "CTRL", 2019, section 4.1). Then frequency, per occurrence in the
    output, and presence, once per token of the output, are subtracted (OpenAI API reference).

    Counted anew from the history, so forks, preemption and rollback need no care here.
    """
    repetition, presence, frequency = edits.penalties
    if repetition != 1.0:
        penalty = np.float32(repetition)
        seen = np.concatenate((prompt_ids, output_ids))
        seen = seen[seen < row.size]  # placeholders of media may lie outside the vocabulary
        logits = row[seen]
        row[seen] = np.where(logits > 0, logits / penalty, logits * penalty)
    if output_ids.size and (frequency or presence):
        token_ids, counts = np.unique(output_ids, return_counts=True)
        subtrahend = frequency * counts + presence
        row[token_ids] -= subtrahend.astype(np.float32)
    if edits.repetition_end is not None:
        _end_repetitions(row, edits.repetition_end, np.concatenate((prompt_ids, output_ids)))


def _repetition_end(params: SamplingParams) -> RepetitionEnd | None:
    if not params.dry_multiplier or not params.dry_penalty_last_n:
        return None
    breakers: dict[int, list[tuple[int, ...]]] = {}
    for each in params.dry_breaker_token_ids or ():
        first, *rest = [each] if isinstance(each, int) else each
        breakers.setdefault(first, []).append(tuple(rest))
    return RepetitionEnd(
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_penalty_last_n,
        breakers,
        max((len(rest) for each in breakers.values() for rest in each), default=0) + 1,
    )


def _end_repetitions(row: LogitArray, rules: RepetitionEnd, history: IntArray) -> None:
    """Penalize, in place, tokens that followed an earlier occurrence of the last tokens ("Don't
    Repeat Yourself", Weidmann, 2024; the names and rules are llama.cpp's). history: int32, prompt
    and output."""
    seen = history if rules.last_n < 0 else history[-rules.last_n :]
    last = seen[-(rules.longest + rules.longest_breaker) :].tolist()
    most = min(_num_since_breaker(last, rules.breakers), rules.longest, seen.size - 1)
    if most < rules.allowed_length:
        return
    num_ends = seen.size - 1  # of occurrences of the last tokens, by their own last token
    is_end, lengths = np.ones(num_ends, np.bool_), np.zeros(num_ends, np.int64)
    for length in range(1, most + 1):
        is_end[: length - 1] = False
        is_end[length - 1 :] &= seen[: num_ends - length + 1] == seen[-length]
        if not is_end.any():
            break
        lengths += is_end
    ends = np.flatnonzero(lengths >= rules.allowed_length)
    ends = ends[seen[ends + 1] < row.size]  # placeholders of media may lie outside the vocabulary
    token_ids, which = np.unique(seen[ends + 1], return_inverse=True)
    longest = np.zeros(token_ids.size, np.int64)
    np.maximum.at(longest, which, lengths[ends])
    factors = rules.base ** (longest - rules.allowed_length)
    is_breaker = [() in rules.breakers.get(token_id, ()) for token_id in token_ids.tolist()]
    factors[is_breaker] = 0.0
    row[token_ids] -= (rules.multiplier * factors).astype(np.float32)


def _num_since_breaker(
    seen: Sequence[int], breakers: Mapping[int, Sequence[tuple[int, ...]]]
) -> int:
    """Return the number of tokens behind the last breaker; all if there is none."""
    for start in range(len(seen) - 1, -1, -1):
        found = [
            len(rest)
            for rest in breakers.get(seen[start], ())
            if tuple(seen[start + 1 : start + 1 + len(rest)]) == rest
        ]
        if found:
            return len(seen) - start - 1 - max(found)
    return len(seen)


def _top_exclusion(params: SamplingParams) -> TopExclusion:
    return TopExclusion(
        params.xtc_probability,
        params.xtc_threshold,
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        params.min_p,
    )


def _exclude_top(row: LogitArray, rules: TopExclusion, place: RowPlace) -> None:
    """Ban, in place, all but the candidates of top-k, top-p and min-p; and, by chance, those of
    them with at least `threshold` of their probability at temperature 1, except the least likely
    such one ("Exclude Top Choices", Weidmann, 2024; the names and the order are llama.cpp's).
    """
    best = float(row.max())
    if not math.isfinite(best):
        return
    candidates = select_candidates(row, rules.temperature, rules.top_k, rules.top_p, rules.min_p)
    logits = row[candidates.token_ids]
    row[:] = _BANNED
    row[candidates.token_ids] = logits
    if row_uniform(place.seed, place.sample_index, place.position) < rules.probability:
        weights = np.exp(logits.astype(np.float64) - best)
        likely = candidates.token_ids[weights >= rules.threshold * weights.sum()]
        row[in_order(row, likely)[:-1]] = _BANNED
