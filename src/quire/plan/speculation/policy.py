"""Choice of how many drafts a step verifies: the number that maximises tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

from quire.plan.speculation.step_times import StepTimes

__all__ = ["Acceptance", "DraftPolicy"]

PRIOR_ACCEPTED, PRIOR_TRIED = 0.3, 0.5
"""Prior of a new sequence: 6 of 10 drafts right. Two wrong drafts outweigh it."""

FADES = 0.8
"""Decay of older observations with each step that verifies drafts."""

FORGETS = 0.25
"""Decay of older observations when drafts are tried again."""

RESTS = 8
"""Steps between offers of drafts once offers have not paid, because making them takes time too."""

FEWEST_SKIPPED, MOST_SKIPPED = 4, 128
"""Unprofitable offers before drafts are tried again."""

GAIN = 1.02
"""Least expected gain. Smaller gains are lost in the noise of measured times."""

LONGER = 1.05
"""Least ratio of a step's time with drafts to its time without. It guards against plain steps that
were measured while something else ran, beside which even wrong drafts seem to gain."""

EXPLORES, LIKELY, PART = 16, 0.5, 4
"""Steps without drafts, though some are likely to be right, after which a few are verified (one per
this many tokens). The assumed time of such steps may be too long."""

PLACES = 16
"""Drafts per row whose worth is estimated before any are made; later ones are worth less."""

CREDIT, ALLOWANCE, MOST_CREDIT = 1.0, 0.005, 4.0
"""Budget of time that drafts may lose, in steps without drafts: a start, an income per such step,
and a cap on the balance. It bounds the loss from wrong measurements, so wrong drafts cost about 1 %
of the time, whoever makes them."""


class Acceptance:
    """Record of how many drafts of one sequence were right recently."""

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTED
        self._tried = PRIOR_TRIED
        self._skipped = 0
        self._patience = FEWEST_SKIPPED

    @property
    def chance(self) -> float:
        """Probability that a draft is right if all drafts before it are."""
        return self._accepted / self._tried

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Record one verification. Drafts behind the first wrong one tell nothing."""
        self._skipped = 0
        tried = min(num_accepted + 1, num_drafts)
        self._accepted = PRIOR_ACCEPTED + FADES * (self._accepted - PRIOR_ACCEPTED) + num_accepted
        self._tried = PRIOR_TRIED + FADES * (self._tried - PRIOR_TRIED) + tried
        if num_accepted:
            self._patience = FEWEST_SKIPPED

    def skipped(self) -> None:
        """Record drafts that were offered and not verified. Now and then they are tried again, less
        often after each wholly wrong try."""
        self._skipped += 1
        if self._skipped >= self._patience:
            self._skipped = 0
            self._patience = min(2 * self._patience, MOST_SKIPPED)
            self._accepted = PRIOR_ACCEPTED + FORGETS * (self._accepted - PRIOR_ACCEPTED)
            self._tried = PRIOR_TRIED + FORGETS * (self._tried - PRIOR_TRIED)


class DraftPolicy:
    """Chooses the drafts of a step.

    A step's time grows with its tokens, slowly at first, and a draft is worth its chance of being
    right. Drafts are taken in order of their chances while tokens per second still rise. Steps
    without drafts are measured first, since every gain is relative to them.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._num_plain = 0  # steps since the last one with drafts
        self._credit = CREDIT

    def counts(
        self, num_tokens: int, chances: Sequence[float], offered: Sequence[int], most: int
    ) -> list[int] | None:
        """Return the number of drafts to verify for each sequence [R], or None while no gain can be
        estimated. Has no side effect; `took` records what was done.

        num_tokens: tokens that the step computes anyway. chances: acceptance chance of each
        sequence's drafts [R]. offered: number of drafts of each sequence [R]. most: limit for all
        together.
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
        """Return True if the gain of drafts in a step of this size can be estimated."""
        return self._times.knows(num_tokens)

    def may_take(self, num_tokens: int, chances: Sequence[float], most: int) -> bool:
        """Return True if `counts` could choose any draft at all; if not, none need be made. Has no
        side effect. Arguments as of `counts`."""
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
        """Record that `counts` [R] of the offered drafts are verified."""
        if any(counts):
            self._num_plain = 0

    def passed(self) -> None:
        """Record a step that was planned without drafts."""
        self._num_plain += 1
        self._credit = min(self._credit + ALLOWANCE, MOST_CREDIT)

    def verified(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """Record that a step of `num_tokens`, without its drafts, was computed, and how many drafts
        were right."""
        plain = self._times.expected(num_tokens, False)
        taken = self._times.expected(num_tokens + num_drafts, True) / plain
        lost = max(taken, LONGER) - 1.0
        gained = num_accepted / num_tokens
        credit = self._credit + gained - lost
        self._credit = min(max(credit, -MOST_CREDIT), MOST_CREDIT)

    def _best(self, num_tokens: int, worths: Sequence[float]) -> int:
        """Return how many drafts, in the order of these worths, give the most tokens per second."""
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
