"""Shortest remaining tokens first."""

from __future__ import annotations

from quire.plan.scheduler.policies.keyed import KeyedPolicy
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["Srtf"]


class Srtf(KeyedPolicy):
    """Orders by the tokens that must be computed before the next one can be drawn: the prompt, and
    the output with which a request resumes (Woosuk Kwon's thesis, section 4.5.2).

    The prefix cache is not asked: it would have to be, for all that wait, before each admission.
    While shorter prompts keep coming a long one waits forever; `TwoLevel` has neither fault.
    """

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return (float(len(group.sequences[0].token_ids)), group.number)
