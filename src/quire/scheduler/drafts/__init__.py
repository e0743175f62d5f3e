"""Drafts: guesses at the next tokens of sequences, verified beside a step's certain work."""

from quire.scheduler.drafts.chosen import NO_DRAFTS, ChosenDrafts, DraftTotals
from quire.scheduler.drafts.drafts import Drafts
from quire.scheduler.drafts.proposer import DraftProposer

__all__ = ["NO_DRAFTS", "ChosenDrafts", "DraftProposer", "DraftTotals", "Drafts"]
