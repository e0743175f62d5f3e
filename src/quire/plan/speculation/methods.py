"""Choice of a drafter for each sequence."""

from __future__ import annotations

from quire.config.speculation import HEADS, OF_MODELS, SpeculationSettings
from quire.plan.speculation.drafter import (
    BestOf,
    Drafter,
    DraftsOfModel,
    NoDrafter,
    PredictionDrafter,
)
from quire.plan.speculation.ngram import NgramDrafter
from quire.plan.speculation.suffix import EarlierAnswers, SuffixDrafter
from quire.protocol.request import EngineRequest

__all__ = ["DraftMethods"]

MAX_PREDICTED = 16
"""Tokens of a client's prediction that one step verifies, unless a setting says otherwise."""


class DraftMethods:
    """Makes drafters according to the engine's settings. Without settings, only requests with a
    prediction get one.

    num_drafts: most drafts of a sequence in one step.
    """

    def __init__(self, settings: SpeculationSettings | None) -> None:
        self._settings = settings
        self._answers = EarlierAnswers()
        self.num_drafts = MAX_PREDICTED if settings is None else settings.num_speculative_tokens

    def serves(self, request: EngineRequest) -> bool:
        """Return True if this request gets drafts."""
        return self._settings is not None or len(request.prediction_token_ids) > 0

    def drafter(self, request: EngineRequest) -> Drafter:
        """Make the drafter of one sequence of a request."""
        if self.are_of_model:
            return DraftsOfModel()
        drafter = self._by_settings(request)
        if len(request.prediction_token_ids):
            predicted = request.prediction_token_ids.tolist()
            return PredictionDrafter(predicted, len(request.prompt_token_ids), drafter)
        return drafter

    def _by_settings(self, request: EngineRequest) -> Drafter:
        settings = self._settings
        if settings is None:
            return NoDrafter()
        ngram = NgramDrafter(settings.prompt_lookup_min, settings.prompt_lookup_max)
        if settings.method == "ngram":
            return ngram
        suffix = SuffixDrafter(
            self._answers, request.salt, settings.max_tree_depth, settings.min_token_prob
        )
        return suffix if settings.method == "suffix" else BestOf([suffix, ngram])

    @property
    def keeps_answers(self) -> bool:
        """True if answers are kept, because later requests may repeat them."""
        return self._settings is not None and self._settings.method in ("suffix", "auto")

    @property
    def are_of_model(self) -> bool:
        """True if a model on the data side makes the drafts, since they follow tokens that the plan
        side does not know yet."""
        return self._settings is not None and self._settings.method in OF_MODELS

    @property
    def follow_states(self) -> bool:
        """True if drafts need a hidden state of the step before. A row that computes several
        certain tokens then gets none."""
        return self._settings is not None and self._settings.method in HEADS

    def ended(self, request: EngineRequest, output: list[int]) -> None:
        """Keep the output of a sequence that has ended; later requests of the same tenant may
        repeat it."""
        self._answers.add(request.salt, output)
