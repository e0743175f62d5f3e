"""Sampling written like its definitions, in float64 and plain integers: the oracle of the tests.

Slow on purpose: it sorts whole vocabularies, loops over tokens, and shares no code with the fast
path but the order of `SamplingParams`' steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.protocol.sampling_params import SamplingParams

__all__ = [
    "draw",
    "edited_logits",
    "excludes_top",
    "gumbel_noise",
    "law",
    "log_softmax",
    "noise_word",
]

FloatArray = npt.NDArray[np.float64]


def noise_word(seed: int, sample_index: int, position: int, token_id: int) -> int:
    """The 32 random bits of one token of one draw: Philox4x32-10 (Salmon et al., SC 2011)."""
    seed %= 2**64
    counter = (token_id // 4, position, sample_index, 0)
    return philox4x32(counter, (seed % 2**32, seed // 2**32))[token_id % 4]


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10
) -> tuple[int, int, int, int]:
    """Four words from a counter of four words and a key of two (section 3.3, and Random123)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high_0, low_0 = divmod(0xD2511F53 * c0, 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def gumbel_noise(seed: int, sample_index: int, position: int, token_id: int) -> float:
    """-log(-log(1 - v)) with v = (word + 1/2) / 2**32."""
    v = (noise_word(seed, sample_index, position, token_id) + 0.5) / 2**32
    return -math.log(-math.log1p(-v))


def edited_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_token_ids: Sequence[int] = (),
) -> FloatArray:
    """Logits [V] after bias, bans and penalties (user's logits processors are not run here)."""
    edited = [float(logit) for logit in logits]
    for token_id, bias in (params.logit_bias or {}).items():
        edited[token_id] += bias
    for token_id in range(len(edited)):
        if _is_banned(token_id, params, list(output_ids), stop_token_ids):
            edited[token_id] = -math.inf
        if token_id in prompt_ids or token_id in output_ids:
            if edited[token_id] > 0:
                edited[token_id] /= params.repetition_penalty
            else:
                edited[token_id] *= params.repetition_penalty
        count = list(output_ids).count(token_id)
        edited[token_id] -= params.frequency_penalty * count
        edited[token_id] -= params.presence_penalty * (count > 0)
        edited[token_id] -= _dry_penalty(token_id, params, [*prompt_ids, *output_ids])
    return np.array(edited)


def excludes_top(params: SamplingParams, seed: int, sample_index: int, position: int) -> bool:
    """Return whether XTC leaves out the most likely tokens of this draw."""
    key = (seed % 2**32, seed % 2**64 // 2**32)
    word = philox4x32((0, position, sample_index, 1), key)[0]
    return (word + 0.5) / 2**32 < params.xtc_probability and params.xtc_threshold <= 0.5


def law(logits: FloatArray, params: SamplingParams, *, is_top_excluded: bool = False) -> FloatArray:
    """Probabilities [V] of the next token, from edited logits. is_top_excluded: XTC leaves out the
    most likely tokens."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if params.is_greedy:
        return np.eye(len(logits))[order[0]]
    probabilities = np.exp((logits - max(logits)) / params.temperature)
    left = [token_id for token_id in order if logits[token_id] > -math.inf]
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0.0
        left = left[: params.top_k]
    probabilities /= sum(probabilities)
    mass = 0.0
    for token_id in order:
        if mass >= params.top_p and params.top_p < 1.0:
            probabilities[token_id] = 0.0
            left = [each for each in left if each != token_id]
        mass += probabilities[token_id]
    is_below = probabilities < params.min_p * max(probabilities)
    probabilities[is_below] = 0.0
    if is_top_excluded:
        return _law_without_top(logits, params, [each for each in left if not is_below[each]])
    return probabilities / sum(probabilities)


def _law_without_top(
    logits: FloatArray, params: SamplingParams, ranked: Sequence[int]
) -> FloatArray:
    """Probabilities [V] of what XTC leaves of `ranked`, the tokens that the filters leave: the last
    of those with enough of their probability at temperature 1, and all behind it."""
    weights = {each: math.exp(logits[each] - logits[ranked[0]]) for each in ranked}
    least = params.xtc_threshold * sum(weights.values())
    likely = [each for each in ranked if weights[each] >= least]
    left = ranked[max(len(likely) - 1, 0) :]
    probabilities = np.zeros(len(logits))
    for each in left:
        probabilities[each] = math.exp((logits[each] - logits[left[0]]) / params.temperature)
    return probabilities / sum(probabilities)


def draw(probabilities: FloatArray, seed: int, sample_index: int, position: int) -> int:
    """argmax over tokens of log p + Gumbel noise."""
    scores = [
        math.log(p) + gumbel_noise(seed, sample_index, position, token_id) if p > 0 else -math.inf
        for token_id, p in enumerate(probabilities)
    ]
    return int(np.argmax(scores))


def log_softmax(logits: Sequence[float]) -> FloatArray:
    """log(exp(l) / sum exp(l)), [V]."""
    shifted = np.array(logits, np.float64) - max(logits)
    return shifted - math.log(math.fsum(np.exp(shifted)))


def _is_banned(
    token_id: int, params: SamplingParams, output_ids: list[int], stop_token_ids: Sequence[int]
) -> bool:
    if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
        return True
    stops = {*stop_token_ids, *(params.stop_token_ids or ())}
    if len(output_ids) < params.min_tokens and token_id in stops:
        return True
    for word in params.bad_words_token_ids or ():
        start = len(output_ids) + 1 - len(word)
        if start >= 0 and [*output_ids[start:], token_id] == list(word):
            return True
    return False


def _dry_penalty(token_id: int, params: SamplingParams, history: Sequence[int]) -> float:
    """Penalty of a token that would continue the longest repetition at the end of the history."""
    breakers = [[each] if isinstance(each, int) else list(each)
                for each in params.dry_breaker_token_ids or ()]  # fmt: skip
    seen = list(history)
    if params.dry_penalty_last_n >= 0:
        seen = seen[max(len(seen) - params.dry_penalty_last_n, 0) :]
    if not params.dry_multiplier or [token_id] in breakers:
        return 0.0
    most = len(seen)
    for start in range(len(seen)):
        lengths = [len(each) for each in breakers if seen[start : start + len(each)] == each]
        if lengths:
            most = len(seen) - start - max(lengths)
    for length in range(min(most, len(seen)), params.dry_allowed_length - 1, -1):
        wanted = [*seen[len(seen) - length :], token_id]
        if any(seen[i : i + length + 1] == wanted for i in range(len(seen) - length)):
            return params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return 0.0
