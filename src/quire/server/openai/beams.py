"""Beam search as requested by OpenAI-style bodies."""

from __future__ import annotations

from collections.abc import Mapping

from quire.protocol.beam_search import BeamRules
from quire.protocol.sampling_params import SAMPLING_PARAMETERS
from quire.server.requests.bodies import GenerationRequest
from quire.server.requests.errors import RefusedError

__all__ = ["beam_rules", "defaults_of"]

_OF_SAMPLING = {
    "temperature",
    "stop",
    *(name for name, each in SAMPLING_PARAMETERS.items() if each.facts.is_filter),
}
"""Recommended parameters that a search has no use for: only tokens end its sequences."""


def beam_rules(body: GenerationRequest, max_width: int) -> BeamRules | None:
    """Return the requested search, which gives the `n` best sequences; None without
    `use_beam_search`. The width is `best_of`, or else `n`. Raises RefusedError for a width over the
    limit, and for rules of a search without `use_beam_search`; RequestError for a bad value."""
    if not body.use_beam_search:
        _check_unused(body)
        return None
    width = body.best_of if body.best_of is not None else body.n or 1
    if not 1 <= width <= max_width:
        raise RefusedError(
            f"The beam width (best_of, or else n) is {width}, but this server takes 1 to "
            f"{max_width} (max_beam_width). Ask for {'less' if width > max_width else 'more'}.",
            param="n" if body.best_of is None else "best_of",
        )
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamRules(width, penalty, body.early_stopping or False)


def defaults_of(body: GenerationRequest, defaults: Mapping[str, object]) -> Mapping[str, object]:
    """Return the model's recommended parameters, without those of sampling where nothing is
    sampled."""
    if not body.use_beam_search:
        return defaults
    kept = {name: value for name, value in defaults.items() if name not in _OF_SAMPLING}
    return {**kept, "temperature": 0.0}


def _check_unused(body: GenerationRequest) -> None:
    for name, value, neutral in (
        ("best_of", body.best_of, (None, 1, body.n)),
        ("length_penalty", body.length_penalty, (None, 1.0)),
        ("early_stopping", body.early_stopping, (None, False)),
    ):
        if value not in neutral:
            raise RefusedError(
                f"{name} is {value!r}, but it is a rule of beam search. Set use_beam_search, or "
                "leave it out.",
                param=name,
            )
