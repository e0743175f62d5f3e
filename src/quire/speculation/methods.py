"""Choice of a drafter for each sequence."""

from __future__ import annotations

from quire.config.speculation import HEADS, OF_MODELS, SpeculationSettings
from quire.protocol.request import EngineRequest
from quire.speculation.drafter import BestOf, Drafter, DraftsOfModel, NoDrafter, PredictionDrafter
from quire.speculation.ngram import NgramDrafter
from quire.speculation.suffix import EarlierAnswers, SuffixDrafter

__all__ = ["DraftMethods"]

MAX_PREDICTED = 16
"""Predicted tokens that one step verifies of a sequence, where no setting says how many drafts."""


class DraftMethods:
    """Makes drafters by the settings of an engine. Without settings, those of requests with a
    prediction alone.

    num_drafts: that a sequence has in one step at most.
    """

    def __init__(self, settings: SpeculationSettings | None) -> None:
        self._settings = settings
        self._answers = EarlierAnswers()
        self.num_drafts = MAX_PREDICTED if settings is None else settings.num_speculative_tokens

    def serves(self, request: EngineRequest) -> bool:
        """Return whether anything is guessed for this request."""
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
        """True if later requests may repeat what earlier ones gave."""
        return self._settings is not None and self._settings.method in ("suffix", "auto")

    @property
    def are_of_model(self) -> bool:
        """True if a model makes the drafts, on the data side: they follow tokens that nobody here
        knows yet."""
        return self._settings is not None and self._settings.method in OF_MODELS

    @property
    def follow_states(self) -> bool:
        """True if drafts follow a hidden state of the step before, so that a row that computes
        several certain tokens can have none."""
        return self._settings is not None and self._settings.method in HEADS

    def ended(self, request: EngineRequest, output: list[int]) -> None:
        """A sequence has ended with this output: later ones of the same tenant may repeat it."""
        self._answers.add(request.salt, output)
