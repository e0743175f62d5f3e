"""Guesses at the next tokens of sequences, from token ids alone. Never imports torch."""

from quire.speculation.drafter import Drafter, NoDrafter
from quire.speculation.methods import DraftMethods
from quire.speculation.policy import Acceptance, DraftPolicy

__all__ = ["Acceptance", "DraftMethods", "DraftPolicy", "Drafter", "NoDrafter"]
