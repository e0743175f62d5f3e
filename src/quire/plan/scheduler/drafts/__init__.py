"""Drafts: guesses at the next tokens of sequences, verified beside a step's certain work."""

from quire.plan.scheduler.drafts.chosen import NO_DRAFTS, ChosenDrafts, DraftTotals
from quire.plan.scheduler.drafts.drafts import Drafts
from quire.plan.scheduler.drafts.proposer import DraftProposer

__all__ = ["NO_DRAFTS", "ChosenDrafts", "DraftProposer", "DraftTotals", "Drafts"]
