"""Guesses at the next tokens of sequences, from token ids alone. Never imports torch."""

from quire.plan.speculation.drafter import Drafter, NoDrafter
from quire.plan.speculation.methods import DraftMethods
from quire.plan.speculation.policy import Acceptance, DraftPolicy

__all__ = ["Acceptance", "DraftMethods", "DraftPolicy", "Drafter", "NoDrafter"]
