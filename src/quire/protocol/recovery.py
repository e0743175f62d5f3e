"""Costs of bringing a preempted request back."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALWAYS_SWAP", "RecoveryCosts"]


@dataclass(frozen=True, slots=True)
class RecoveryCosts:
    """Seconds to compute a token of a prompt again, and to copy one block to the host or back.
    Both grow with the length of what is recovered, so their ratio decides."""

    seconds_per_token: float
    seconds_per_block: float

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether copying `num_blocks` out and in beats computing `num_tokens` again."""
        return 2 * num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token


ALWAYS_SWAP = RecoveryCosts(seconds_per_token=1.0, seconds_per_block=0.0)
"""Whatever it costs."""
