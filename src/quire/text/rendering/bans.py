"""Bans of a request that leave it too few tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.base.errors import RequestError
from quire.protocol.sampling_params import SamplingParams

__all__ = ["check_bans", "check_beam_bans"]


class _TokensLeft(NamedTuple):
    """Numbers of tokens that a request allows somewhere. ending: tokens that stop a sequence, once
    it has min_tokens tokens. going_on: all others."""

    going_on: int
    ending: int


def _tokens_left(
    params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int
) -> _TokensLeft:
    """Return the tokens of a vocabulary that `params`, checked by `check_vocabulary`, leave.
    stop_token_ids: all that end the sequence."""
    banned = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    stops = {token_id for token_id in stop_token_ids if token_id < vocab_size} - banned
    if params.allowed_token_ids is None:
        return _TokensLeft(vocab_size - len(banned) - len(stops), len(stops))
    allowed = set(params.allowed_token_ids) - banned
    return _TokensLeft(len(allowed - stops), len(allowed & stops))


def check_bans(params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse parameters that together ban every token from the start; arguments as in
    `_tokens_left`. Raises RequestError naming them."""
    names = _ban_names(params)
    if not names:
        return
    left = _tokens_left(params, stop_token_ids, vocab_size)
    if left.going_on or (left.ending and not params.min_tokens):
        return
    stops = (
        "" if not left.ending else f" (min_tokens {params.min_tokens} bans stop tokens at first)"
    )
    raise RequestError(
        f"{_listed(names)} leave no token that the answer could begin with{stops}. Relax "
        f"{'one of them' if len(names) > 1 else 'it'}."
    )


def check_beam_bans(
    params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int
) -> None:
    """Refuse bans that leave a search fewer than `params.n` sequences to find; arguments as in
    `_tokens_left`. Raises RequestError naming the fields."""
    left = _tokens_left(params, stop_token_ids, vocab_size)
    num_sequences = _num_sequences(left, params)
    if num_sequences < params.n:
        bounds = [] if params.max_tokens is None else ["max_tokens"]
        names = [*_ban_names(params), *bounds] or ["stop tokens"]
        raise RequestError(
            f"n is {params.n}, but {_listed(names)} leave a beam search (use_beam_search) "
            f"only {num_sequences} sequences to find: lower n and the beam width, or allow more"
        )


def _num_sequences(left: _TokensLeft, params: SamplingParams) -> int:
    """Return the number of sequences that the tokens left make, at most `params.n`. A search finds
    as many, up to its width: it drops none while there are no more."""
    longest = 2**31 if params.max_tokens is None else params.max_tokens
    if left.going_on <= 1:
        num_ends = longest - params.min_tokens if left.going_on else int(not params.min_tokens)
        return min(left.going_on + left.ending * max(num_ends, 0), params.n)
    found, live, length = 0, 1, 0
    while length < longest and found + live < params.n:
        length += 1
        found += left.ending * live if length > params.min_tokens else 0
        live *= left.going_on
    return min(found + live, params.n)


def _listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _ban_names(params: SamplingParams) -> list[str]:
    """Return the fields by which a request may ban tokens, of the fields that it has set."""
    words = "bad_words" if params.bad_words else "bad_words_token_ids"
    is_set = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        words: bool(params.bad_words_token_ids),
        "min_tokens": params.min_tokens > 0,
        "stop_token_ids": params.min_tokens > 0 and bool(params.stop_token_ids),
    }
    return [name for name, value in is_set.items() if value]
