"""Choice of a step's drafts: as many as make it give the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speculation.step_times import StepTimes

__all__ = ["Acceptance", "DraftPolicy"]

PRIOR_ACCEPTED, PRIOR_TRIED = 0.3, 0.5
"""A sequence begins as if 6 drafts of 10 were right, which two wrong ones refute."""

FADES = 0.8
"""Share that old drafts of a sequence keep with each step that verifies new ones."""

FORGETS = 0.25
"""Share that they keep when drafts are tried again."""

RESTS = 8
"""Period in which drafts are asked for after some were offered that do not pay, in steps: asking
takes time too."""

FEWEST_SKIPPED, MOST_SKIPPED = 4, 128
"""Offers that did not pay, before drafts are tried again."""

GAIN = 1.02
"""Drafts must be expected to gain more than times can be told apart."""

LONGER = 1.05
"""A step with drafts takes so many times as long as one without at least, whatever was measured:
else those without were measured while something else ran, and even wrong drafts seem to gain."""

EXPLORES, LIKELY, PART = 16, 0.5, 4
"""After so many steps without drafts, although some are as likely to be right as not, a few are
verified, one for so many tokens: times of such steps may be better than was assumed."""

PLACES = 16
"""Drafts of a row whose worth is looked at before any are made; later ones are worth less."""

CREDIT, ALLOWANCE, MOST_CREDIT = 1.0, 0.005, 4.0
"""Time that drafts may lose, in steps without drafts: at first, more with each of these, and what
is kept at most of what they have gained. They owe no more than that, since a time may have been
measured wrong. So wrong drafts lose about a hundredth of the time, whoever makes them."""


class Acceptance:
    """Record of how many drafts of one sequence were right of late."""

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTED
        self._tried = PRIOR_TRIED
        self._skipped = 0
        self._patience = FEWEST_SKIPPED

    @property
    def chance(self) -> float:
        """Probability that a draft is right if all before it are."""
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
        """Drafts were offered, and none was taken. Now and then they are tried again, less often
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
        self._credit = CREDIT

    def counts(
        self, num_tokens: int, chances: Sequence[float], offered: Sequence[int], most: int
    ) -> list[int] | None:
        """Drafts to verify of each sequence [R]; None while nothing is known that they could gain.
        Asking changes nothing: `took` says what was done.

        num_tokens: that the step computes anyway. chances: of each sequence's drafts [R]. offered:
            how many it has [R]. most: in all.
        """
        if not self.knows(num_tokens):
            return None
        counts = [0] * len(chances)
        if self._credit <= 0.0:
            return counts
        order = sorted(
            (-(chance ** (place + 1)), place, row)
            for row, (chance, count) in enumerate(zip(chances, offered, strict=True))
            for place in range(min(count, most))
        )[: max(most, 0)]
        num_best = self._best(num_tokens, [-worth for worth, _, _ in order])
        if not num_best and self._is_due and order and order[0][0] <= -LIKELY:
            num_best = max(1, num_tokens // PART)
        for _, _, row in order[:num_best]:
            counts[row] += 1
        return counts

    def knows(self, num_tokens: int) -> bool:
        """Return whether the gain of drafts in a step of so many tokens could be told."""
        return self._times.knows(num_tokens)

    def may_take(self, num_tokens: int, chances: Sequence[float], most: int) -> bool:
        """Return whether `counts` could take any, however many drafts there are: making them takes
        time. Asking changes nothing; arguments as of `counts`."""
        if not chances or most <= 0 or self._credit <= 0.0 or not self.knows(num_tokens):
            return False
        if self._is_due and max(chances) >= LIKELY:
            return True
        places = min(most, PLACES)
        worths = sorted((c ** (i + 1) for c in chances for i in range(places)), reverse=True)
        return self._best(num_tokens, worths[:most]) > 0

    @property
    def _is_due(self) -> bool:
        """True if a few likely drafts are verified although they do not seem to pay."""
        return self._num_plain + 1 >= EXPLORES

    def took(self, counts: Sequence[int]) -> None:
        """Take note that `counts` [R] of what was offered for a step are verified."""
        if any(counts):
            self._num_plain = 0

    def passed(self) -> None:
        """A step without drafts was planned."""
        self._num_plain += 1
        self._credit = min(self._credit + ALLOWANCE, MOST_CREDIT)

    def verified(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """A step of `num_tokens` without its drafts was computed, and so many were right."""
        plain = self._times.expected(num_tokens, False)
        taken = self._times.expected(num_tokens + num_drafts, True) / plain
        lost = max(taken, LONGER) - 1.0
        gained = num_accepted / num_tokens
        credit = self._credit + gained - lost
        self._credit = min(max(credit, -MOST_CREDIT), MOST_CREDIT)

    def _best(self, num_tokens: int, worths: Sequence[float]) -> int:
        """Return how many drafts of these worths, in order, give the most tokens per second."""
        plain = self._times.expected(num_tokens, False)
        best, least = GAIN * num_tokens / plain, LONGER * plain
        gained, num_best = float(num_tokens), 0
        seconds = self._times.drafted(num_tokens, len(worths))
        for index, worth in enumerate(worths):
            gained += worth
            taken = max(seconds[index], least)
            if gained > best * taken:
                best, num_best = gained / taken, index + 1
        return num_best
