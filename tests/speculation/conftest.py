from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.plan.grammar.trial import GrammarTrial
from quire.plan.grammar.vocabulary import Vocabulary
from tests.small_engines import forked_ranks, kernels_by_flags

__all__ = ["forked_ranks", "kernels_by_flags", "one_trial"]


class _LastingTrial(GrammarTrial):
    """A trial that engines leave to the next one."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module", autouse=True)
def one_trial() -> Iterator[None]:
    """Engines of a file try the grammars of a vocabulary in one process, which takes half a second
    of the processor to start. No test of this room is about it."""
    trials: list[tuple[Vocabulary, _LastingTrial]] = []

    def trial_of(vocabulary: Vocabulary) -> _LastingTrial:
        for known, trial in trials:
            if known == vocabulary:
                return trial
        trials.append((vocabulary, _LastingTrial(vocabulary)))
        return trials[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.plan.grammar.guidance.GrammarTrial", trial_of)
        yield
    for _, trial in trials:
        trial.end()
