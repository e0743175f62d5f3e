"""Copies of blocks to the device that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from quire.plan.kv_cache.pool import BlockPool

__all__ = ["Ended", "Transfers"]

Ended = Callable[[Collection[int]], None]
"""Called with the device blocks that did not arrive, when a ticket ends."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    blocks: tuple[int, ...]
    ended: Ended


class Transfers:
    """Owns, by ticket, the device blocks that copies fill, beside their other owners. No block is
    given to others while a copy may still write it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_ticket: dict[int, _Transfer] = {}

    def start(self, ticket: int, blocks: Sequence[int], ended: Ended) -> None:
        """Take over one reference to each of `blocks` until the ticket ends."""
        self._by_ticket[ticket] = _Transfer(tuple(blocks), ended)

    def end(self, ticket: int, lost: Collection[int] = ()) -> None:
        """Release the blocks of a ticket. An unknown ticket is ignored. lost: blocks that did not
        arrive."""
        transfer = self._by_ticket.pop(ticket, None)
        if transfer is not None:
            transfer.ended(lost)
            for block in transfer.blocks:
                self._pool.release(block)

    def lose_all(self) -> list[int]:
        """End all tickets as if nothing had arrived; return them."""
        tickets = list(self._by_ticket)
        for ticket in tickets:
            self.end(ticket, self._by_ticket[ticket].blocks)
        return tickets

    @property
    def are_under_way(self) -> bool:
        """True if copies to the device have not ended."""
        return bool(self._by_ticket)

    @property
    def num_orphaned(self) -> int:
        """Return the number of device blocks that only running copies hold."""
        return sum(self._pool.ref_count(block) == 1 for block in self.held_blocks())

    def held_blocks(self) -> list[int]:
        """Return the blocks of all tickets."""
        return [block for each in self._by_ticket.values() for block in each.blocks]
