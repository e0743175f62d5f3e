"""Schedule short answers before long ones, by a policy of our own.

    PYTHONPATH=examples python examples/custom_policy.py
    PYTHONPATH=examples quire serve --scheduling-policy custom_policy:ShortAnswersFirst

The engine imports `package.module:Class` and calls it without arguments.
"""

from __future__ import annotations

from quire import LLM, SamplingParams
from quire.plan.scheduler import KeyedPolicy
from quire.plan.scheduler.sequence import SequenceGroup

UNLIMITED = 10**6


class ShortAnswersFirst(KeyedPolicy):
    """Orders requests by the tokens that they may generate, then by arrival."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """Return the key of a new group; smaller ones go first."""
        return (group.request.params.max_tokens or UNLIMITED, group.number)


def finishing_order(policy: str) -> list[int]:
    """Return the max_tokens of requests in the order in which they finish, one at a time."""
    lengths = [24, 4, 12]
    with LLM(scheduling_policy=policy, max_num_seqs=1, quiet=True) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate(["import "] * len(lengths), params, use_tqdm=False)
    ends = [output.metrics.last_token_ts for output in outputs if output.metrics is not None]
    return [length for _, length in sorted(zip(ends, lengths, strict=True))]


def main() -> None:
    print("fcfs:", finishing_order("fcfs"))
    print("ours:", finishing_order("custom_policy:ShortAnswersFirst"))


if __name__ == "__main__":
    main()
