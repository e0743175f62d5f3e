"""Beam search: parameters for users, and the rules that the engine follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from quire.base.errors import RequestError, quoted
from quire.base.foreign import ForeignName, explaining
from quire.protocol.sampling_params import MAX_SAMPLES, SAMPLING_PARAMETERS, SamplingParams

__all__ = ["BeamRules", "BeamSearchParams", "check_beam_sampling"]

MAX_LENGTH_PENALTY = 10
"""Far beyond any use; a length to this power is still a finite float."""


@dataclass(frozen=True, slots=True)
class BeamRules:
    """Rules by which the beams of one request are kept and the search ends; those of
    `transformers`.

    width: beams that go on after each step, 1 … 128. A finished sequence of L output tokens (its
    stop token counted) has the score cum_logprob / L ** length_penalty. The search ends when
    `width` sequences are finished and, by `early_stopping`:
    True: at once. False: if the best beam, at its present length, scores no better than the worst
    of them. "never": the same, but with length_penalty > 0 at the greatest length it may reach.

    Raises RequestError naming the rule, its value and what it may be.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        width, penalty = cast("object", self.width), cast("object", self.length_penalty)
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_SAMPLES:
            raise RequestError(
                f"the beam width is {width!r}, but it must be an integer from 1 to {MAX_SAMPLES}. "
                "Change it."
            )
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty is {penalty!r}, but it must be a number from "
                f"-{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}. Give 1 for scores per token, 0 "
                "for sums; larger values favour longer sequences."
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping is {self.early_stopping!r}. Give true, false or "never".'
            )

    def score(self, cum_logprob: float, num_output: int) -> float:
        """Return the score of a sequence with `num_output` tokens after the prompt."""
        return cum_logprob / num_output**self.length_penalty


_FOREIGN: Mapping[str, ForeignName] = {
    "include_stop_str_in_output": ForeignName("the texts of beams have their stop tokens' texts"),
    "best_of": ForeignName("beam_width says how many beams there are"),
    "n": ForeignName("beam_width says how many sequences there are"),
    "stop": ForeignName("stop_token_ids end beams"),
}


@explaining(RequestError, "a parameter of beam search", _FOREIGN)
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    beam_width, length_penalty, early_stopping: see `BeamRules`. max_tokens None: up to the context.
    temperature: 0 and 1 are the model's own probabilities; others are of logits / temperature.
    min_tokens: no stop token before that many. logprobs: k most likely tokens at each position
    beside the one that is there, as in `SamplingParams`.

    Raises RequestError naming the parameter, its value and what it may be.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    min_tokens: int = 0
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _ = self.rules, self.sampling

    def clone(self, **changes: Any) -> BeamSearchParams:
        """Equal parameters, but for `changes`."""
        return replace(self, **changes)

    @property
    def rules(self) -> BeamRules:
        return BeamRules(self.beam_width, self.length_penalty, self.early_stopping)

    @property
    def sampling(self) -> SamplingParams:
        """Parameters that the request shares with others; its n samples are the best sequences
        found."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
        )


def check_beam_sampling(
    params: SamplingParams, rules: BeamRules, vocab_size: int, text_stops: Collection[str]
) -> None:
    """Refuse what has no effect on, or no place in, a search: RequestError.

    text_stops: stop strings that are not a token's.
    """
    if params.n > rules.width:
        raise RequestError(
            f"n is {params.n}, but a search of width {rules.width} finds {rules.width} sequences: "
            "raise the width (best_of) or lower n"
        )
    if rules.width > vocab_size:
        raise RequestError(
            f"the beam width is {rules.width}, but the vocabulary has {vocab_size} tokens: lower it"
        )
    if text_stops:
        raise RequestError(
            f"stop has {min(text_stops)[:80]!r}, but with beam search (use_beam_search) only "
            "tokens end a sequence: use stop_token_ids, or stop strings that are one special token"
        )
    for name, each in SAMPLING_PARAMETERS.items():
        reason = "does not sample" if each.facts.is_filter else each.facts.not_in_beams
        value = getattr(params, name)
        if reason and value not in (each.default, -1):  # -1 is off too, if it is allowed
            raise RequestError(
                f"{name} is {quoted(value)}, but beam search (use_beam_search) {reason}: leave "
                f"{name} out"
            )
