"""How many drafts a step verifies: as many as make it give the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speculation.step_times import StepTimes

__all__ = ["Acceptance", "DraftPolicy"]

PRIOR_ACCEPTED, PRIOR_TRIED = 0.3, 0.5
"""A sequence begins as if 6 drafts of 10 were right, which two wrong ones refute."""

FADES = 0.8
"""Of what is known of a sequence, with each step that verifies drafts of it."""

FORGETS = 0.25
"""Of what is known, when drafts are tried again."""

FEWEST_SKIPPED, MOST_SKIPPED = 32, 1024
"""Steps without drafts of a sequence that had some to offer, before they are tried again."""

GAIN = 1.02
"""Drafts must be expected to gain more than times can be told apart."""

EXPLORES, LIKELY, PART = 128, 0.5, 4
"""After so many steps without drafts, although some are as likely to be right as not, a few are
verified, one for so many tokens: times of such steps may be better than what was assumed."""


class Acceptance:
    """How many drafts of one sequence were right of late."""

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTED
        self._tried = PRIOR_TRIED
        self._skipped = 0
        self._patience = FEWEST_SKIPPED

    @property
    def chance(self) -> float:
        """Of a draft to be right, if all before it are."""
        return self._accepted / self._tried

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """So many drafts were verified. What follows the first wrong one tells nothing."""
        self._skipped = 0
        tried = min(num_accepted + 1, num_drafts)
        self._accepted = PRIOR_ACCEPTED + FADES * (self._accepted - PRIOR_ACCEPTED) + num_accepted
        self._tried = PRIOR_TRIED + FADES * (self._tried - PRIOR_TRIED) + tried
        if num_accepted:
            self._patience = FEWEST_SKIPPED

    def skipped(self) -> None:
        """Drafts were offered, and none was verified. Now and then they are tried again, less often
        each time that they were all wrong."""
        self._skipped += 1
        if self._skipped >= self._patience:
            self._skipped = 0
            self._patience = min(2 * self._patience, MOST_SKIPPED)
            self._accepted = PRIOR_ACCEPTED + FORGETS * (self._accepted - PRIOR_ACCEPTED)
            self._tried = PRIOR_TRIED + FORGETS * (self._tried - PRIOR_TRIED)


class DraftPolicy:
    """A step's time rises with its tokens, at first slowly, while a draft is worth what its chance
    is. Drafts are taken in the order of their chances, up to where tokens per second are most.
    Steps without drafts are measured first, since all gain is measured by them."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._num_plain = 0  # steps since the last one with drafts

    def counts(
        self, num_tokens: int, chances: Sequence[float], offered: Sequence[int], most: int
    ) -> list[int]:
        """Drafts to verify of each sequence [R].

        num_tokens: that the step computes anyway. chances: of each sequence's drafts [R]. offered:
            how many it has [R]. most: in all.
        """
        counts = [0] * len(chances)
        if not self._times.knows(num_tokens):
            return counts
        order = sorted(
            (-(chance ** (place + 1)), place, row)
            for row, (chance, count) in enumerate(zip(chances, offered, strict=True))
            for place in range(min(count, most))
        )[: max(most, 0)]
        num_best = self._best(num_tokens, [-worth for worth, _, _ in order])
        self._num_plain = 0 if num_best else self._num_plain + 1
        if self._num_plain >= EXPLORES and order and order[0][0] <= -LIKELY:
            self._num_plain, num_best = 0, max(1, num_tokens // PART)
        for _, _, row in order[:num_best]:
            counts[row] += 1
        return counts

    def _best(self, num_tokens: int, worths: Sequence[float]) -> int:
        """How many drafts of these worths, in this order, give the most tokens per second."""
        best = GAIN * num_tokens / self._times.expected(num_tokens, False)
        gained, num_best = float(num_tokens), 0
        seconds = self._times.drafted(num_tokens, len(worths))
        for index, worth in enumerate(worths):
            gained += worth
            if gained > best * seconds[index]:
                best, num_best = gained / seconds[index], index + 1
        return num_best
